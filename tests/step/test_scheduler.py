"""Whole histories of the engine against `reference.engine`: who runs, with which blocks, with what answer."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpaged.memory.cache_specs import FULL, ChunkedLocal, SlidingWindow
from jaxpaged.memory.policies import LRU_SPLIT
from reference.engine_state import Phase, Request
from tests.outsiders.layer_kind import WindowWithSinks
from tests.step.lockstep import Event, LockStep, Setting
from tests.step.sum_model import VOCAB, next_token
from tests.step.workloads import workloads

pytestmark = pytest.mark.usefixtures("small_chunks")

SETTINGS = [
    Setting("tight", num_blocks=1 + 17),
    Setting("drafts", num_blocks=1 + 22, num_host_blocks=1 + 8, has_arena=True, most_drafts=2, cost=(8,)),
    Setting(
        "drafts, full and windows",
        num_blocks=1 + 26,
        num_tiles=1,
        specs=(FULL, SlidingWindow(5)),
        policy=LRU_SPLIT,
        most_drafts=2,
        by_suffix=True,
        past_tokens=40,
        most_drafting=1,
        cost=(20,),
    ),
    Setting(
        "drafts by a model",
        num_blocks=1 + 44,
        num_tiles=1,
        specs=(FULL, SlidingWindow(5)),
        num_host_blocks=1 + 24,
        has_arena=True,
        most_drafts=3,
        by_model=True,
        most_prompt=3,
        cost=(1, 1, 3),
    ),
    Setting(
        "drafts by a head",
        num_blocks=1 + 34,
        num_tiles=1,
        num_host_blocks=1 + 16,
        has_arena=True,
        most_drafts=3,
        by_model=True,
        by_head=True,
        cost=(8, 16, 40),
    ),
    Setting("swap, split", num_blocks=1 + 17, num_host_blocks=1 + 8, policy=LRU_SPLIT, has_arena=True),
    Setting("window", num_blocks=1 + 14, num_tiles=1, specs=(SlidingWindow(10),), num_host_blocks=1 + 6),
    Setting(
        "full and windows",
        num_blocks=1 + 26,
        num_tiles=1,
        specs=(FULL, ChunkedLocal(8), SlidingWindow(5)),
        num_host_blocks=1 + 12,
    ),
    Setting(  # where the second class alone is short
        "two classes",
        num_blocks=1 + 60,
        num_tiles=1,
        specs=(FULL, SlidingWindow(5), FULL),
        classes=(0, 1, 1),
        more_blocks=(1 + 34,),
        num_host_blocks=1 + 24,
        more_host_blocks=(1 + 16,),
        watermark_blocks=(0, 1),
        policy=LRU_SPLIT,
    ),
    Setting(
        "two classes, the first short",
        num_blocks=1 + 26,
        num_tiles=1,
        specs=(FULL, ChunkedLocal(8), SlidingWindow(5)),
        classes=(0, 1, 0),
        more_blocks=(1 + 40,),
        most_drafts=2,
    ),
    Setting("two groups", num_blocks=1 + 40, specs=(FULL, SlidingWindow(21)), policy=LRU_SPLIT),
    Setting(
        "sinks kept",
        num_blocks=1 + 30,
        num_tiles=1,
        specs=(FULL, WindowWithSinks(9, 5)),
        num_host_blocks=1 + 14,
    ),
    Setting("sinks kept in all layers", num_blocks=1 + 16, num_tiles=1, specs=(WindowWithSinks(6, 3),)),
    Setting(
        "big blocks", num_blocks=1 + 5, block_size=24, num_tiles=1, watermark_blocks=1, reuse_answers=True
    ),
    Setting("no caching", num_blocks=1 + 30, block_size=3, prefix_caching=False),
    Setting(
        "answers with gaps",
        num_blocks=1 + 34,
        num_tiles=1,
        specs=(FULL, SlidingWindow(2)),
        reuse_answers=True,
    ),
]


# Run every time: rows are swapped out while the host pool has room, and recomputed when it has none.
QUICK = next(each for each in SETTINGS if each.name == "swap, split")
GAPS = SETTINGS[-1]
BY_MODEL = next(each for each in SETTINGS if each.by_model)
# Each is a program of its own. `test_mixes` has random windows and chunks in one program.
SLOW = ("drafts, full and windows", "answers with gaps")


def marks(setting):
    if setting is QUICK:
        return ()
    return pytest.mark.slow if setting.name in SLOW else pytest.mark.nightly


@pytest.mark.parametrize(
    "setting",
    [pytest.param(each, id=each.name, marks=marks(each)) for each in SETTINGS],
)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_step_is_the_oracles(setting, data):
    priorities = data.draw(st.booleans())
    LockStep(setting).run(data.draw(workloads(setting, priorities=priorities)))


def test_nobody_is_admitted_in_the_step_that_preempts():
    """Even an urgent request waits that had no slot till then and fits where the preempted row was."""
    lock = LockStep(QUICK)
    lock.happen(Event(tuple(request(arrival, 17, 40, priority=2 * (arrival > 1)) for arrival in (1, 2, 3))))
    lock.step()
    lock.happen(Event((request(4, 1, 8, priority=1),)))
    while lock.unfinished and not lock.seen["preempted"]:
        lock.step()
    urgent = lock.oracle.rows[3]
    assert urgent is not None
    assert urgent.phase is Phase.WAITING
    lock.step()
    assert urgent.phase is Phase.RUNNING
    assert lock.seen["preempted"] == 1


def test_answers_of_one_prompt_share_its_blocks_and_compute_it_once():
    """Four of them, where three can run: the fourth hits what the others left behind."""
    lock = LockStep(QUICK)
    prompt_len, block_size = 39, 4
    leader = request(1, prompt_len, prompt_len + 6, priority=0)
    followers = [dataclasses.replace(leader, arrival=arrival, leader=1) for arrival in (2, 3, 4)]
    lock.happen(Event((leader, *followers)))
    tables = [lock.tables_after_step() for _ in range(2)]
    shared = tables[0][0]
    assert tables[0] == {0: shared, 1: shared, 2: shared}
    assert len(shared) == -(-prompt_len // block_size)
    assert lock.num_computed == prompt_len + 3
    own = {row: line[-1] for row, line in tables[1].items()}
    assert all(line[:-1] == shared[:-1] for line in tables[1].values())
    assert len(set(own.values())) == 3
    assert shared[-1] in own.values()  # the last to write keeps it
    while lock.unfinished:
        lock.step()
    assert lock.seen["forked"] == lock.seen["copied"] == 2
    assert lock.seen["hits"] == prompt_len // block_size


def test_a_rejected_row_is_looked_up_again_when_others_hold_enough_of_its_blocks():
    """The first 14 blocks are not there when the request is first looked up, and are in the next step."""
    lock = LockStep(QUICK)
    shared = tuple(i % VOCAB for i in range(56))
    lock.happen(Event((Request(0, shared, 60), Request(1, (*shared, 1, 2, 3, 4), 62))))
    lock.step()
    assert lock.state.last_rejected.tolist() == [1, 0 + 14 + 14]  # taken by the other one, and published
    lock.step()
    waited = lock.oracle.rows[1]
    assert waited is not None
    assert waited.phase is Phase.RUNNING
    lock.run([])


@pytest.mark.slow
def test_a_rejected_row_is_looked_up_again_when_a_group_closes_a_gap():
    """One block that is published makes eleven hits: till then no beginning has what its window reads."""
    lock = LockStep(GAPS)
    line = [i % VOCAB for i in range(41)]
    lock.happen(Event((Request(1, tuple(line), 60),)))
    while lock.num_computed < 42:
        lock.step()
    lock.evict_free()  # the window's last block is there again when the token at 43 is computed
    while len(line) < 47:
        line.append(next_token(GAPS.reaches, line))
    lock.happen(Event((Request(2, tuple(line), 50),)))
    waits = lock.oracle.rows[1]
    assert waits is not None
    while lock.num_computed < 44:
        lock.step()
        assert waits.phase is Phase.WAITING
    lock.step()
    assert waits.phase is Phase.RUNNING
    assert lock.seen["hits"] == 11
    lock.run([])


SHORT = Setting(
    "the second class short",
    num_blocks=1 + 60,
    num_tiles=1,
    specs=(FULL, FULL),
    classes=(0, 1),
    more_blocks=(1 + 16,),
    watermark_blocks=(0, 1),
    prefix_caching=False,
)


@pytest.mark.slow
def test_rows_wait_for_a_size_class_that_alone_is_short_and_all_end():
    """The first class has room for all: the second decides who waits and who is preempted."""
    lock = LockStep(SHORT)
    assert SHORT.longest == 16 * SHORT.block_size + 1
    lock.happen(Event(tuple(request(arrival, 17, 40) for arrival in (1, 2, 3))))
    while lock.unfinished and not lock.seen["preempted"]:
        lock.step()
        assert any(row and row.phase is Phase.WAITING for row in lock.oracle.rows)
        first, second = map(int, lock.state.tables.pool.num_free)
        assert first >= 30 > second
    lock.run([])
    assert lock.seen["preempted"]


def request(arrival: int, prompt_len: int, max_num_tokens: int, priority: int = 0) -> Request:
    return Request(
        arrival, tuple((arrival + i) % VOCAB for i in range(prompt_len)), max_num_tokens, priority=priority
    )


@pytest.mark.slow
def test_a_model_that_drafts_catches_up_with_answers_that_had_no_drafts():
    """A full batch makes none; then one row is behind with a tile, and one with two: a pass has one."""
    lock = LockStep(BY_MODEL)
    lock.happen(Event((request(1, 32, 60), request(2, 31, 60), request(3, 1, 14))))
    while any(row is None or row.num_tokens < 3 for row in lock.oracle.rows[:3]):
        lock.step()
    before = dict(lock.seen)
    while all(row is not None and row.finish_reason is None for row in lock.oracle.rows[:3]):
        lock.step()
    assert lock.seen["drafted"] == before["drafted"]
    lock.run([])
    assert lock.seen["accepted"] > before["accepted"]


@pytest.mark.slow
def test_a_swapped_row_has_what_the_drafting_model_knew_of_its_prompt():
    lock = LockStep(BY_MODEL)
    lock.run([Event((request(1, 40, 112), request(2, 41, 112)))])
    assert lock.seen["swapped"]
    assert lock.seen["accepted"] > 20


@pytest.mark.slow
def test_a_model_that_drafts_computes_no_prompt_twice_and_no_long_one_for_a_short_answer():
    """Blocks that are hit have a mark; a block that is taken anew has none."""
    lock = LockStep(BY_MODEL)
    lock.run([Event((request(1, 40, 60),))])
    assert lock.seen["marked"]
    before = dict(lock.seen)
    lock.happen(Event((request(1 + VOCAB, 40, 52),)))
    lock.step()
    assert lock.seen["hits"] > before["hits"]
    assert lock.seen["marked"] - before["marked"] == lock.seen["hits"] - before["hits"]
    lock.run([])
    assert lock.seen["drafted"] == before["drafted"], "40 tokens are more than 3 for each of 12"
    lock.run([Event((request(15, 41, 90), request(16, 40, 90)))])  # which take these blocks
