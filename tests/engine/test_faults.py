"""Faults on the way: pools that run out, and aborts at every stage, thousands of both. Nothing leaks."""

import collections
import random
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxpaged.engine.driver import Driver
from jaxpaged.engine.handle import collect
from jaxpaged.engine.request import Delta
from jaxpaged.memory.invariants import check_invariants
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.status import Status
from jaxpaged.step.state import FinishReason, Phase, Rows
from tests import tiny

# Steps of one tile, so that a long prompt is still being computed after one.
URGENT = tiny.SMALL | {"scheduling_policy": "priority"}


def assert_every_block_is_free_or_used(driver: Driver) -> None:
    """Check the counts of the tables, and those of the last run's statistics."""
    stats = driver.stats
    assert 0 <= stats.num_cached_blocks <= stats.num_free_blocks <= stats.num_blocks
    assert stats.num_running >= 0
    assert stats.num_waiting >= 0
    state = driver.state
    for tables in [state.tables] + ([state.host.tables] if state.host else []):
        pool = tables.pool
        block_tables, ref_count, num_free = jax.device_get(
            (tables.block_tables, pool.ref_count, pool.num_free)
        )
        used = set(block_tables[block_tables > 0].tolist())
        assert used == set(np.flatnonzero(ref_count).tolist())
        assert len(used) + int(num_free) == pool.num_blocks - 1
    assert int(state.status) == Status.OK


def computed(driver: Driver) -> np.ndarray:
    return np.asarray(driver.state.tables.seq_lens)


def someone(driver: Driver, where: Callable[[Rows, np.ndarray], np.ndarray]) -> int:
    """Step until some row is so; its request. `where` gets the rows and how many tokens each has computed."""
    for _ in range(300):
        rows = jax.device_get(driver.state.rows)
        wanted = where(rows, computed(driver))
        wanted[driver.rows.free_rows] = False
        if np.any(wanted):
            return int(rows.arrival[np.argmax(wanted)])
        driver.turn(max_steps=1)
    raise AssertionError("no row was ever so")


def has_answer(rows: Rows) -> np.ndarray:
    return np.asarray(rows.num_tokens > rows.prompt_lens)


def gave_way(rows: Rows) -> np.ndarray:
    return np.isin(rows.phase, [Phase.WAITING, Phase.SWAPPED]) & has_answer(rows)


STAGES = {
    "waits in a row": (tiny.SMALL, lambda rows, done: rows.phase == Phase.WAITING),
    "in its prompt": (tiny.SWAP, lambda rows, done: (done > 0) & (done < rows.prompt_lens)),
    "decodes": (
        tiny.SMALL,
        lambda rows, done: (rows.phase == Phase.RUNNING) & has_answer(rows),
    ),
    "preempted": (tiny.SMALL, lambda rows, done: gave_way(rows)),
    "swapped": (tiny.SWAP, lambda rows, done: rows.phase == Phase.SWAPPED),
    "computed again": (
        tiny.SMALL,
        lambda rows, done: (done > 0) & (done < rows.num_tokens - 1) & has_answer(rows),
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_at_any_stage_frees_all_and_hurts_nobody(stage):
    options, where = STAGES[stage]
    driver = tiny.driver(**options)
    prompts = tiny.prompts([10, 90 if stage == "in its prompt" else 20, 30, 12, 25, 9])
    ids = tiny.submit(driver, prompts, tiny.greedy(60))
    deltas: dict[int, list[Delta]] = {i: [] for i in ids}
    turn = driver.turn
    driver.turn = lambda max_steps=None: [deltas[d.request_id].append(d) or d for d in turn(max_steps)]
    driver.fill_rows()
    gone = someone(driver, where)
    for _ in range(2):  # twice: the second finds it ended
        assert driver.abort([gone, 10**6]) == []
    driver.turn(max_steps=1)
    assert_every_block_is_free_or_used(driver)
    tiny.drain(driver)
    for request_id, prompt in zip(ids, prompts, strict=True):
        answer = collect(deltas[request_id])
        want = tiny.reference_answer(tuple(prompt), min(60, driver.door.max_model_len - len(prompt)))
        if request_id == gone:
            assert answer.finish_reason is FinishReason.ABORT
            assert len(answer.token_ids) < len(want)
            assert answer.token_ids == want[: len(answer.token_ids)]
        else:
            assert answer.finish_reason is FinishReason.LENGTH
            assert answer.token_ids == want
    tiny.assert_nothing_is_held(driver)


def test_an_abort_in_the_hosts_queue_ends_at_once_and_keeps_the_order():
    driver = tiny.driver(**tiny.SMALL)
    ids = tiny.submit(driver, [[i] for i in range(40)], tiny.greedy(3))
    driver.turn()
    wanted = [*ids[9::3], *ids[9::3], 10**6]
    ended = driver.abort(wanted)
    assert sorted(delta.request_id for delta in ended) == ids[9::3]
    assert all(d.finish_reason is FinishReason.ABORT and not d.token_ids for d in ended)
    assert driver.abort(wanted) == []
    answers = tiny.drain(driver)
    assert list(answers) == [i for i in ids if i not in ids[9::3]], "first come, first served"
    for i, request_id in enumerate(ids):
        if request_id in answers:
            assert answers[request_id].token_ids == tiny.reference_answer((i,), 3)
    tiny.assert_nothing_is_held(driver)


def test_an_abort_of_what_has_finished_but_was_not_read_comes_too_late():
    driver = tiny.driver(**tiny.SMALL)
    [request_id] = tiny.submit(driver, [[1, 2]], tiny.greedy(5))
    assert driver.turn(max_steps=8) == []
    assert int(driver.state.rows.phase[0]) == Phase.FINISHED
    assert driver.abort([request_id]) == []
    answer = tiny.drain(driver)[request_id]
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.token_ids == tiny.reference_answer((1, 2), 5)
    assert driver.abort([request_id]) == []
    assert not driver.has_work
    tiny.assert_nothing_is_held(driver)


def test_who_finds_no_room_in_the_host_pool_is_computed_again():
    """Three rows hold 15 blocks between them when the first wants the pool; the host has 11."""
    driver = tiny.driver(**tiny.SWAP)
    prompts = tiny.prompts([1, 38, 37, 39])
    ids = tiny.submit(driver, prompts, [tiny.greedy(99), *[tiny.greedy(50)] * 3])
    seen: set[Phase] = set()
    deltas: dict[int, list[Delta]] = {i: [] for i in ids}
    while driver.has_work:
        for delta in driver.turn(max_steps=1):
            deltas[delta.request_id].append(delta)
        rows = jax.device_get(driver.state.rows)
        seen |= {Phase(p) for p in rows.phase[gave_way(rows)].tolist()}
        assert_every_block_is_free_or_used(driver)
    assert seen == {Phase.WAITING, Phase.SWAPPED}
    for request_id, prompt, n in zip(ids, prompts, [99, 50, 50, 50], strict=True):
        assert collect(deltas[request_id]).token_ids == tiny.reference_answer(tuple(prompt), n)
    tiny.assert_nothing_is_held(driver)


def test_a_request_that_needs_the_whole_pool_gets_it_in_the_end():
    driver = tiny.driver(**tiny.SMALL)  # 128 tokens, all that the model can have
    prompts = [*tiny.prompts([1, 30, 20]), *tiny.prompts([127], seed=1), [5]]
    lengths = [127, 40, 60, 1, 127]
    answers = tiny.generate(driver, prompts, [tiny.greedy(n) for n in lengths])
    assert answers == [tiny.reference_answer(tuple(p), n) for p, n in zip(prompts, lengths, strict=True)]
    tiny.assert_nothing_is_held(driver)


def test_a_model_length_within_a_block_and_a_tile_is_kept_to_the_token():
    driver = tiny.driver(**tiny.SWAP)
    prompts = tiny.prompts([99, 98, 96, 64, 1, 33])
    answers = tiny.generate(driver, prompts, tiny.greedy(127))
    assert answers == [tiny.reference_answer(tuple(p), 100 - len(p)) for p in prompts]
    tiny.assert_nothing_is_held(driver)


def test_a_stop_token_may_be_the_first_the_last_allowed_or_at_a_blocks_edge():
    driver = tiny.driver(**tiny.SMALL)
    for prompt in ([3], *tiny.prompts([7, 8, 15])):
        free = tiny.reference_answer(tuple(prompt), 12)
        for place in (0, 1, 8 - len(prompt) % 8, 11):
            if place >= 12 or free[place] in free[:place]:
                continue
            params = SamplingParams(max_tokens=place + 1, temperature=0, stop_token_ids=(free[place],))
            [request_id] = tiny.submit(driver, [prompt], params)
            answer = tiny.drain(driver)[request_id]
            assert answer.token_ids == free[: place + 1]
            assert answer.finish_reason is FinishReason.STOP, "it is both the last and a stop token"
    tiny.assert_nothing_is_held(driver)


@pytest.mark.parametrize("options", [tiny.SMALL, tiny.SWAP, URGENT], ids=["recompute", "swap", "priority"])
def test_thousands_of_submits_and_aborts_leak_nothing(options):
    rng = random.Random(1)
    driver = tiny.driver(**options)
    prompts = [tuple(p) for p in tiny.prompts([1, 2, 8, 9, 20, 31, 45])]
    asked: dict[int, tuple[tuple[int, ...], int]] = {}
    alive: list[int] = []
    deltas: dict[int, list[Delta]] = collections.defaultdict(list)
    ended: collections.Counter[FinishReason] = collections.Counter()

    def note(new: list[Delta]) -> None:
        for delta in new:
            deltas[delta.request_id].append(delta)
            if delta.finish_reason:
                alive.remove(delta.request_id)
                ended[delta.finish_reason] += 1
                prompt, n = asked[delta.request_id]
                tokens = collect(deltas.pop(delta.request_id)).token_ids
                want = tiny.reference_answer(prompt, 40)[:n]
                assert tokens == (want[: len(tokens)] if delta.finish_reason == FinishReason.ABORT else want)

    for beat in range(400):
        for _ in range(rng.choice([0, 0, 1, 5, 12])):
            prompt, n = rng.choice(prompts), rng.choice([1, 2, 5, 40])
            request_id = len(asked)
            priority = rng.randrange(3) if options is URGENT else 0
            driver.add(tiny.request(driver, request_id, prompt, tiny.greedy(n), priority=priority))
            asked[request_id] = prompt, n
            alive.append(request_id)
        if rng.random() < 0.5 or len(alive) > 40:
            note(driver.abort(rng.sample(alive, rng.randint(0, len(alive)))))
        note(driver.turn(max_steps=rng.choice([1, 2, 8, 32])))
        assert_every_block_is_free_or_used(driver)
        if beat % 50 == 0:
            check_invariants(driver.state.tables)
    while driver.has_work:
        note(driver.turn())
        assert_every_block_is_free_or_used(driver)
    assert not alive
    assert not deltas
    assert len(asked) > 1000
    assert ended[FinishReason.ABORT] > 300
    assert ended[FinishReason.LENGTH] > 300
    assert driver.stats.num_preemptions > 0
    assert driver.stats.num_hit_tokens > 0
    tiny.assert_nothing_is_held(driver)


def add(driver: Driver, prompts: list[list[int]], priority: int, max_tokens: int) -> list[int]:
    ids = [(1 + (priority < 0)) * 10_000 + i for i, _ in enumerate(prompts)]
    for request_id, prompt in zip(ids, prompts, strict=True):
        driver.add(tiny.request(driver, request_id, prompt, tiny.greedy(max_tokens), priority=priority))
    return ids


def test_an_urgent_request_overtakes_those_who_wait_in_rows_too():
    """Four of twelve requests run and four wait in rows when three urgent ones come; one is aborted."""
    driver = tiny.driver(**tiny.SMALL, scheduling_policy="priority")
    prompts = [[i] for i in range(12)]
    usual = add(driver, prompts, 5, 9)
    deltas = [delta for _ in range(4) for delta in driver.turn(max_steps=1)]
    assert (driver.stats.num_running, driver.stats.num_waiting) == (4, 8)
    assert driver.abort(usual[7:8]) == []
    urgent = add(driver, [[20], [21], [22]], -1, 5)
    while driver.has_work:
        deltas += driver.turn(max_steps=1)
        assert_every_block_is_free_or_used(driver)
    ended = [delta.request_id for delta in deltas if delta.finish_reason]
    answers: dict[int, list[int]] = {i: [] for i in usual + urgent}
    for delta in deltas:
        answers[delta.request_id] += delta.token_ids
    assert ended[0] == usual[7]
    assert sorted(ended[1:8]) == sorted([*usual[:4], *urgent])
    # The one place that the urgent ones leave is the next in line's.
    assert ended[8:] == [*usual[4:7], *usual[8:]]
    assert answers.pop(usual[7]) == []
    for request_id, tokens in answers.items():
        prompt = [20 + request_id % 10] if request_id in urgent else [request_id % 1000]
        assert tokens == tiny.reference_answer(tuple(prompt), 5 if request_id in urgent else 9)
    tiny.assert_nothing_is_held(driver)


@pytest.mark.parametrize("options", [tiny.SMALL, tiny.SWAP], ids=["recompute", "swap"])
def test_who_was_preempted_makes_room_for_who_is_more_urgent(options):
    """A preempted request begins again behind the tokens that were reported: none is repeated or lost."""
    driver = tiny.driver(**options, scheduling_policy="priority")
    prompts = tiny.prompts([10, 20, 30, 12, 5, 6, 7, 8])
    usual = add(driver, prompts, 5, 60)
    deltas = driver.turn(max_steps=32) + driver.turn(max_steps=1)
    rows = jax.device_get(driver.state.rows)
    began = [arrival for arrival in rows.arrival[gave_way(rows)] if arrival in usual[:4]]
    assert began, "somebody who has told a part of its answer"
    urgent = add(driver, [[i] for i in range(8)], -1, 3)
    deltas += driver.turn(max_steps=1)
    assert not np.isin(began, driver.state.rows.arrival).any()
    while driver.has_work:
        deltas += driver.turn(max_steps=1)
        assert_every_block_is_free_or_used(driver)
    ended = [delta.request_id for delta in deltas if delta.finish_reason]
    assert set(ended[:8]) == set(urgent)
    for i, request_id in enumerate(usual + urgent):
        answer = collect([delta for delta in deltas if delta.request_id == request_id])
        prompt, length = (prompts[i], 60) if i < 8 else ([i - 8], 3)
        assert answer.token_ids == tiny.reference_answer(tuple(prompt), length)
    tiny.assert_nothing_is_held(driver)


@pytest.mark.parametrize("first", [2**31 - 6, 2**32 - 6, 2**40])
def test_requests_are_served_in_their_order_however_many_there_were_before(first):
    driver = tiny.driver(**tiny.SMALL)
    ids = [first + i for i in range(14)]
    for request_id in ids:
        driver.add(tiny.request(driver, request_id, [request_id % 90, 3], tiny.greedy(5)))
    deltas = [delta for _ in range(3) for delta in driver.turn(max_steps=1)]
    assert driver.abort([ids[5], ids[12]])[0].request_id == ids[12]  # one in a row, one in the queue
    while driver.has_work:
        deltas += driver.turn(max_steps=1)
    ended = [delta.request_id for delta in deltas if delta.finish_reason is FinishReason.LENGTH]
    in_order = [i for i in ids if i not in (ids[5], ids[12])]
    # Four run together; those that end in the same step are told in the order of their rows.
    for turn in range(0, 12, 4):
        assert set(ended[turn : turn + 4]) == set(in_order[turn : turn + 4])
    for request_id in ended:
        answer = collect([delta for delta in deltas if delta.request_id == request_id])
        assert answer.token_ids == tiny.reference_answer((request_id % 90, 3), 5)
    tiny.assert_nothing_is_held(driver)
