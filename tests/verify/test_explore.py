"""Every interleaving of a small world, and faults planted in the scheduler and the pool."""

import argparse
import dataclasses
import re

import jax.numpy as jnp
import pytest

from jaxpaged.checks import InputError
from jaxpaged.commands import verify_parts
from jaxpaged.memory import block_pool, block_table, free_queue
from jaxpaged.research.verify.explore import lockstep, walk
from jaxpaged.research.verify.explore.worlds import WORLDS
from jaxpaged.step import admission, scheduler


def test_a_world_that_is_none_is_refused():
    with pytest.raises(InputError, match="world='moon' must be one of two, three"):
        verify_parts.verify_explore(argparse.Namespace(world="moon", max_states=5))


@pytest.mark.slow
def test_every_interleaving_of_three_requests_is_right_and_the_oracles():
    found = walk.explore(WORLDS["three"])
    assert found.finding is None, str(found)
    assert found.complete
    assert found.met["preempted"]
    assert found.met["hits"]
    assert lockstep.compare(found) == found.num_edges
    assert found.finding is None, str(found)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in WORLDS if name != "three"])
def test_every_interleaving_of_larger_worlds(name):
    found = walk.explore(WORLDS[name])
    assert found.finding is None, str(found)
    assert found.complete
    assert lockstep.compare(found) == found.num_edges
    assert found.finding is None, str(found)
    assert bool(found.met["swapped"]) == (name == "swap")
    assert bool(found.met["accepted"]) == bool(found.met["rejected"]) == (name == "drafts")


def twice_in_one_free(patch):
    """Count each naming of a block that several rows free at once."""
    patch.setattr(free_queue, "last_namings", lambda queue, ids, mask: (queue, mask))


def preemption_frees_nothing(patch):
    real = scheduler._preempt

    def keeps_tables(state, *rest):
        after, *masks = real(state, *rest)
        return dataclasses.replace(after, tables=state.tables), *masks

    patch.setattr(scheduler, "_preempt", keeps_tables)


def stale_content(patch):
    """Let a block's content be found when the block was given to someone else."""
    patch.setattr(block_pool, "forget", lambda pool, ids, mask: pool)


def overtaking(patch):
    def last_waiting(rows):
        return rows.order[rows.order.shape[0] - 1 - jnp.argmax(rows.waiting[rows.order][::-1])]

    patch.setattr(admission, "_first_waiting", last_waiting)


def abort_keeps_blocks(patch):
    real = scheduler.abort
    patch.setattr(
        scheduler,
        "abort",
        lambda state, arrivals: dataclasses.replace(real(state, arrivals), tables=state.tables),
    )


def rejected_drafts_stay(patch):
    """Leave rejected drafts where the last of them is the first of its block."""
    real = block_table.truncate

    def within(tables, num, *rest):
        return real(tables, jnp.where(tables.seq_lens % tables.block_size == 1, 0, num), *rest)

    patch.setattr(block_table, "truncate", within)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("plant", "world", "says", "length"),
    [
        (twice_in_one_free, "four", "a block is in the queue twice", 5),
        (preemption_frees_nothing, "three", "WAITING, and holds blocks", 5),
        (stale_content, "three", "is found for tokens", 7),
        (overtaking, "three", "is admitted before", 20),
        (abort_keeps_blocks, "three", "FINISHED, and holds blocks", 3),
        (rejected_drafts_stay, "drafts", "reads position 6 in a slot with token 3 of 6", 6),
    ],
)
def test_planted_faults_are_found_with_the_shortest_story(monkeypatch, plant, world, says, length):
    plant(monkeypatch)
    found = walk.explore(WORLDS[world])
    assert found.finding is not None
    assert re.search(says, found.finding.what), str(found)
    assert len(found.finding.story) == len(found.finding.path) <= length
