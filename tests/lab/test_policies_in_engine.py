"""Policies that rank blocks, inside the compiled serving loop."""

import jax
import numpy as np
import pytest

from jaxpaged.memory.invariants import check_invariants
from jaxpaged.memory.ranked_queue import RankedQueue
from jaxpaged.step import scheduler, waiting
from tests import tiny
from tests.marks import slow_and_nightly


@pytest.mark.parametrize("policy", slow_and_nightly(["tinylfu", "queue_lru"], ["queue_lru"]))
def test_answers_are_the_same_under_any_policy_and_short_pools(policy):
    """Prompts that share how they begin, preempted and found again, twice.

    `tests/engine/test_layouts.py` has an engine of each policy.
    """
    first, *others = tiny.prompts([24, 20, 30, 12, 25])
    prompts = [first, *(first[:16] + other for other in others), first]
    driver = tiny.driver(**tiny.SMALL, eviction_policy=policy)
    for _ in range(2):
        answers = tiny.generate(driver, prompts, tiny.greedy(40))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == tiny.reference_answer(tuple(prompt), 40)
    assert driver.stats.num_preemptions > 0
    assert driver.stats.num_hit_tokens > 0
    tiny.assert_nothing_is_held(driver)
    check_invariants(driver.state.tables)


def waiting_finds(is_waiting, rows, cache, block_size):
    """Return which blocks the waiting rows find, by walking from parent to child in a cache read back."""
    wanted = np.zeros(cache.num_blocks, np.int32)
    for place, row in enumerate(rows.order):
        if not is_waiting[row]:
            continue
        tokens = rows.token_ids[row, : rows.num_findable[row] - 1]
        is_prompt = np.arange(len(tokens)) < rows.prompt_lens[row]
        tokens = np.where(is_prompt, tokens, -1 - tokens)  # as the cache keeps answers
        name = [-1, int(rows.salt[row])]
        for block in tokens[: len(tokens) // block_size * block_size].reshape(-1, block_size):
            is_next = (cache.parent == name).all(axis=1) & (cache.token_ids == block).all(axis=1)
            found = np.flatnonzero(is_next & (cache.slot >= 0))
            if not len(found):
                break
            slot = cache.slot[found[0]]
            name = [int(slot), int(cache.generation[slot])]
            first = cache.neighbours[cache.last[slot], 0]
            wanted[first] = max(wanted[first], len(rows.order) - place)
    return wanted


@pytest.mark.nightly
def test_queue_lru_knows_what_waiting_requests_will_find(monkeypatch):
    """Compare the numbers of all blocks with a walk by hand, at each step, and ranks with the numbers."""
    seen = []
    ask = waiting.note_waiting

    def note(state, config):
        after = ask(state, config)
        queue = after.tables.pool.free_queue
        jax.debug.callback(
            lambda *parts: seen.append(jax.device_get(parts)),
            state.rows.waiting,
            state.rows,
            state.tables.pool.prefix_cache,
            queue.notes,
            queue.rank,
            queue.place,
        )
        return after

    monkeypatch.setattr(scheduler, "note_waiting", note)
    first, *others = tiny.prompts([24, 20, 30, 12, 25, 9])
    prompts = [first, *others, *(first[:16] + other for other in others), first]
    driver = tiny.driver(**tiny.SMALL | {"num_blocks": 1 + 18}, eviction_policy="queue_lru")  # traced anew
    answers = tiny.generate(driver, prompts, tiny.greedy(20))
    assert answers == [tiny.reference_answer(tuple(prompt), 20) for prompt in prompts]
    jax.effects_barrier()
    most = 0
    for is_waiting, rows, cache, notes, rank, place in seen:
        wanted = waiting_finds(is_waiting, rows, cache, 8)
        np.testing.assert_array_equal(notes[:, RankedQueue.OTHER], wanted)
        free = (place >= 0) & (cache.slot >= 0)
        np.testing.assert_array_equal(rank[free, 0], wanted[free])
        most = max(most, np.count_nonzero(wanted))
    assert most > 2
    check_invariants(driver.state.tables)
