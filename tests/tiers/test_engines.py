"""Engines with tiers: the answers of engines without, and hits in lock-step with the oracle."""

import dataclasses
import functools
import gc
import re
import threading
import time

import numpy as np
import pytest

from jaxpaged.api.outputs import request_output
from jaxpaged.checks import InputError
from jaxpaged.contracts.block_stores import BlockKey
from jaxpaged.engine.driver import Driver
from jaxpaged.handover import programs, staging
from jaxpaged.memory.cache_specs import FULL
from jaxpaged.models.config import LayerKind
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.step import loop
from jaxpaged.tiers.host import HostStore
from jaxpaged.tiers.rule import Rule
from jaxpaged.tiers.tiers import Promotion
from reference.tiers import Store, TieredCache
from tests import tiny
from tests.outsiders.block_store import Kept
from tests.tiers.test_stores import Clock

SCORED = SamplingParams(max_tokens=4, temperature=0, logprobs=2)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)
BLOCK_BYTES = 2 * 2 * 2 * 8 * 8 * 4  # K and V, layers, heads, tokens, numbers, bytes
GIB = 2**30


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Let pieces have five blocks, so that a prompt has several."""
    monkeypatch.setattr(staging, "PIECE_BYTES", 5 * BLOCK_BYTES)


class Always(Rule):
    """Rule that always fetches: the tiny model computes faster than anything is copied."""

    seconds_to_wait = 60.0

    def wait(self, compute_seconds):
        return self.seconds_to_wait

    def pays(self, compute_seconds, num_bytes, bytes_below):
        return True


def tiered(num_kept=1000, **options):
    """Make a driver with room for so many blocks in host memory."""
    driver = tiny.driver(kv_offloading_size=num_kept * BLOCK_BYTES / GIB, **options)
    driver.offloading.rule = Always()
    return driver


def ask(driver, prompt, params=ONE_TOKEN, **options):
    """Return an answer's tokens and scores, the prompt tokens that were hit, and those fetched by tier."""
    [request] = tiny.numbered([tiny.request(driver, 1, prompt, params, **options)])
    driver.add(request)
    deltas = []
    while driver.has_work:
        deltas += driver.turn()
    if driver.offloading is not None:
        driver.offloading.finish()
    fetched = next((delta.num_fetched_tokens for delta in deltas if delta.num_fetched_tokens), {})
    answer = [(delta.token_ids, delta.scores) for delta in deltas if delta.token_ids]
    return answer, deltas[-1].num_hit_tokens, fetched


def tokens(answer):
    return [token for ids, _ in answer for token in ids]


def whole(answer):
    return tokens(answer), [score for _, scores in answer for score in scores]


@pytest.fixture(scope="module")
def cold():
    """Answer as an engine does that has never seen a prompt."""
    driver = tiny.driver()

    def answer(prompt):
        driver.reset_prefix_cache()
        [found] = tiny.generate(driver, [prompt], SCORED)
        return found

    return answer


@pytest.mark.slow
@pytest.mark.parametrize("has_below", [False, True])
def test_hits_are_in_lock_step_with_the_oracle(has_below):
    """Conversations that do not fit, in a pool of 64 blocks, 80 in host memory and perhaps more below."""
    below = Kept()
    driver = tiered(80, kv_offloading_backend=below if has_below else "host")
    stores = [Store(80), *([Store(10_000)] if has_below else [])]
    plain = TieredCache(65, 8, stores)
    rng, talks = np.random.default_rng(1), [[] for _ in range(20)]
    seen = np.zeros(3, int)
    for _ in range(120):
        which = int(rng.integers(20))
        talk = talks[which]
        if len(talk) > 90:
            talk.clear()
        talk += rng.integers(0, 3, int(rng.integers(1, 30))).tolist()
        salt = "salt" if which == 5 else None
        want = plain.serve(talk, salt, int(which == 5))
        _, num_hit_tokens, fetched = ask(driver, talk, cache_salt=salt)
        name = "below"
        mine = (num_hit_tokens - sum(fetched.values()), fetched.get("host", 0), fetched.get(name, 0))
        assert mine == tuple(8 * blocks for blocks in want)
        assert len(driver.offloading.tiers.host) == len(stores[0].entries)
        seen += want
    assert seen[0] > 20
    assert seen[1 + has_below] > 20
    tiny.assert_nothing_is_held(driver)
    driver.close()


def test_answers_have_the_bits_of_cold_ones_and_what_is_apart_stays_apart(cold):
    driver, prompts = tiered(), tiny.prompts([70, 90, 60, 97, 101, 103, 99, 105], seed=3)
    whole = SamplingParams(max_tokens=4, temperature=0)
    first = [ask(driver, prompt, SCORED) for prompt in prompts]
    again = [ask(driver, prompt, SCORED) for prompt in prompts]
    for prompt, old, new in zip(prompts, first, again, strict=True):
        assert tokens(new[0]) == cold(prompt)
        assert [score for _, scores in new[0] for score in scores] == [
            score for _, scores in old[0] for score in scores
        ]
    assert [fetched for *_, fetched in again[:3]] == [{"host": 64}, {"host": 88}, {"host": 56}]
    # Another salt finds nothing, and then its own.
    assert ask(driver, prompts[0], whole, cache_salt="x")[1] == 0
    for prompt in prompts[3:]:
        ask(driver, prompt)
    assert ask(driver, prompts[0], whole, cache_salt="x")[1:] == (64, {"host": 64})
    # A request that wants scores of its prompt computes all of it.
    told = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    assert ask(driver, prompts[1], told)[1:] == (0, {})
    # Forgetting forgets all tiers.
    assert driver.reset_prefix_cache()
    assert len(driver.offloading.tiers.host) == 0
    assert ask(driver, prompts[0], whole)[1:] == (0, {})


def test_a_prompt_is_kept_for_as_long_as_it_asks():
    """Room for 40 blocks, of which 20 may be kept, and prompts of 12 blocks that push others out."""
    driver, clock = tiered(40), Clock()
    driver.offloading.tiers.host = HostStore(40 * BLOCK_BYTES, clock)
    kept, too_much, *others = tiny.prompts([70, 120, *[100] * 8], seed=13)

    def hits(prompt, **options):
        for other in others:
            ask(driver, other)
        return ask(driver, prompt, **options)[1]

    assert hits(kept) == hits(kept) == 0
    assert hits(kept, kv_cache_ttl=10) == 0
    assert hits(kept) == 64
    assert hits(too_much, kv_cache_ttl=2592000) == 0
    assert hits(too_much) == 12 * 8  # as much as there was room for beside the other
    clock.now += 10
    assert hits(kept) == 0
    assert hits(too_much, kv_cache_ttl=0) == 12 * 8
    assert hits(too_much) == 0
    assert driver.offloading.tiers.host.kept_bytes == 0
    search = BeamSearchParams(beam_width=2, max_tokens=2)
    for request in tiny.numbered(driver.door.admit_search(kept, search, kv_cache_ttl=10)):
        driver.add(request)
    tiny.drain(driver)
    driver.offloading.finish()
    assert driver.offloading.tiers.host.kept_bytes == 8 * BLOCK_BYTES
    for wrong in (-1, 2592001, float("inf"), float("nan"), 10**100, True):
        rule = re.escape(f"kv_cache_ttl={wrong} must be a number from 0 to 2592000, in seconds")
        with pytest.raises(InputError, match=rule):
            driver.door.admit(kept, ONE_TOKEN, kv_cache_ttl=wrong)
    with pytest.raises(InputError, match="kv_cache_ttl=5 must be None without kv_offloading_size"):
        tiny.driver().door.admit(kept, ONE_TOKEN, kv_cache_ttl=5)


def test_the_output_of_a_request_tells_what_was_fetched():
    """A request with two answers, of which the first one's prompt is fetched."""
    prompt, params = tiny.prompts([70], seed=9)[0], SamplingParams(n=2, max_tokens=2, detokenize=False)
    with tiny.engine(kv_offloading_size=0.01) as engine:
        driver = tiny.driver_of(engine)
        driver.offloading.rule = Always()
        for want in ({}, {"host": 64}):
            handles = engine.submit_all(engine.door.admit(prompt, params))
            answers = [handle.result() for handle in handles]
            metrics = [handle.metrics for handle in handles]
            told = request_output(handles[0].request, None, answers, metrics, None, finished=True)
            assert told.metrics.num_fetched_tokens == want
            assert told.num_cached_tokens == sum(want.values())
            for each in tiny.prompts([100] * 6, seed=10):
                engine.submit(each, ONE_TOKEN).result()


def test_new_weights_find_nothing_of_old_ones():
    driver, prompt = tiered(), tiny.prompts([70])[0]
    other = {name: array[::-1].copy() for name, array in tiny.weights().items() if "embed" in name}
    ask(driver, prompt)
    assert len(driver.offloading.tiers.host) == 8
    driver.lifecycle.update_weights(driver.lifecycle.read_names(list(other.items())))
    driver.exchange.export_blocks(np.array(prompt, np.int32), None)  # which looks at the new weights first
    assert ask(driver, prompt)[1:] == (0, {})
    assert len(driver.offloading.tiers.host) == 8, "the old ones are gone"
    driver.lifecycle.sleep(1)
    driver.lifecycle.wake_up(["weights", "kv_cache"])
    assert ask(driver, prompt)[1:] == (64, {"host": 64})


class Slow(Kept):
    """Store whose reads wait for a signal, or fail."""

    seconds = 0.0
    fails = False

    def get(self, key):
        time.sleep(self.seconds)
        if self.fails:
            raise OSError("the store is gone")
        return super().get(key)


@pytest.mark.slow
def test_a_store_that_is_slow_or_fails_costs_hits_alone(cold):
    store = Slow()
    driver = tiered(4, kv_offloading_backend=store)
    first, *others = tiny.prompts([70, *[100] * 5], seed=5)
    ask(driver, first, SCORED)
    for other in others:
        ask(driver, other)
    for store.seconds, store.fails in ((0.2, False), (0.0, True)):
        driver.offloading.rule.seconds_to_wait = 0.05
        began = time.monotonic()
        answer, num_hits, fetched = ask(driver, first, SCORED)
        assert time.monotonic() - began < 2
        assert tokens(answer) == cold(first)
        assert "below" not in fetched or store.seconds
        assert num_hits < 64
        for other in others:
            ask(driver, other)
        time.sleep(0.3)
    # A request that is given up while it waits leaves nothing behind, and those of its prompt wait with it.
    store.seconds, store.fails = 0.5, False
    params = SamplingParams(n=2, max_tokens=2)
    requests = tiny.numbered(driver.door.admit(first, params))
    driver.offloading.rule.seconds_to_wait = 60.0
    for request in requests:
        driver.add(request)
    assert driver.offloading.has_work
    assert not driver.queue
    gone = driver.abort([requests[0].request_id])
    assert [delta.request_id for delta in gone] == [requests[0].request_id]
    driver.abort([requests[1].request_id])
    assert not driver.has_work
    # Nor does the first of a prompt whose blocks come for the others alone.
    store.seconds = 0.0
    requests = tiny.numbered(driver.door.admit(first, params))
    for request in requests:
        driver.add(request)
    assert not driver.queue
    driver.abort([requests[0].request_id])
    tiny.drain(driver)
    driver.offloading.finish()
    gc.collect()
    alive = gc.get_objects()
    last = [each.promoted for each in alive if isinstance(each, Promotion)]  # of the thread that reads
    sets = [each for each in alive if type(each) is set and each and not any(each is its for its in last)]
    assert not [each for each in sets if all(isinstance(key, BlockKey) for key in each)]


def test_a_directory_is_found_after_a_restart_and_by_another_engine(cold, tmp_path):
    options = {"kv_offloading_backend": f"disk:{tmp_path / 'kept'}"}
    driver, prompts = tiered(4, **options), tiny.prompts([70, 90], seed=7)
    for prompt in prompts:
        ask(driver, prompt)
    other = tiered(**options)
    driver.close()
    ended = tiered(**options)
    for again in (other, ended):
        again.offloading.tiers.below.flush()
        for prompt in prompts:
            answer, num_hits, fetched = ask(again, prompt, SCORED)
            assert tokens(answer) == cold(prompt)
            assert fetched == {"disk": num_hits} != {"disk": 0}
        counts = again.stats.tiers["disk"]
        assert (counts.num_hits, counts.read_bytes) == (8 + 11, 19 * BLOCK_BYTES)
    # Forgetting forgets the files of this model, for all.
    assert other.reset_prefix_cache()
    other.offloading.tiers.below.flush()
    assert ask(other, prompts[0])[1:] == (0, {})
    for each in (other, ended):
        each.close()


@pytest.mark.slow
def test_conversations_that_return_from_a_directory_beside_others_are_their_own(cold, tmp_path):
    """Long prompts come back at once with short ones, and go on: as reported of other engines, which told one
    the blocks of another, or tried a file that is torn or gone again and again.
    """
    driver = tiered(40, kv_offloading_backend=f"disk:{tmp_path / 'kept'}")
    prompts, short = tiny.prompts([90, 101, 97, 85, 103, 99], seed=31), tiny.prompts([9, 12, 20, 7], seed=32)
    for turn in range(3):
        asked = [each for pair in zip(prompts, [*short, *short], strict=False) for each in pair]
        assert tiny.generate(driver, asked, SCORED) == [cold(prompt) for prompt in asked]
        driver.offloading.finish()
        driver.offloading.tiers.below.flush()
        prompts = [[*prompt, *cold(prompt), 5 + turn] for prompt in prompts]
        torn, gone, *_ = sorted((tmp_path / "kept").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)
        torn.write_bytes(torn.read_bytes()[:100])
        gone.unlink()
    counts = driver.stats.tiers["disk"]
    assert counts.num_hits >= 10
    driver.close()


@pytest.mark.slow
def test_groups_of_layers_are_fetched_as_they_were_computed():
    """Layers that read all beside a window: each group brings what the next token reads."""
    config = tiny.mixed(LayerKind(), LayerKind(sliding_window=11))
    load = functools.partial(tiny.load, config=config)
    sizes = {"num_blocks": 1 + 4 * 24}
    driver = tiny.driver(load, config, kv_offloading_size=0.1, **sizes)
    driver.offloading.rule = Always()
    talks = tiny.prompts([100] * 14, seed=11)
    first = [ask(driver, talk[:60], SCORED) for talk in talks]
    again = [ask(driver, talk[:60], SCORED) for talk in talks]
    longer = [ask(driver, talk, SCORED) for talk in talks]
    assert [whole(new[0]) for new in again] == [whole(old[0]) for old in first]
    assert [fetched for *_, fetched in longer[:2]] == [{"host": 56}] * 2
    plain = tiny.driver(load, config, **sizes)
    assert [whole(new[0]) for new in longer] == [whole(ask(plain, talk, SCORED)[0]) for talk in talks]
    tiny.assert_nothing_is_held(driver)


class Never(Rule):
    """Rule that never fetches, and remembers of what size."""

    asked: tuple = ()

    def pays(self, compute_seconds, num_bytes, bytes_below):
        self.asked += ((num_bytes // BLOCK_BYTES, bytes_below // BLOCK_BYTES),)
        return False


@pytest.mark.parametrize("has_below", [False, True])
def test_nothing_is_fetched_where_the_rule_refuses(has_below):
    """Eight blocks, in pieces of five, in host memory or below it."""
    driver = tiered(4, kv_offloading_backend=Kept()) if has_below else tiered()
    [prompt, *others] = tiny.prompts([70, *[100] * 6], seed=5)
    for each in (prompt, *others):
        ask(driver, each)
    driver.offloading.rule = Never()
    assert ask(driver, prompt)[1:] == (0, {})
    assert driver.offloading.rule.asked == ((10, 8 if has_below else 0),)


class Gate:
    """Gate before all copies to the device."""

    def __init__(self, monkeypatch):
        self.may_pass, self.num_begun = threading.Event(), 0
        copied = staging.Target.gathered

        def gathered(target, blocks):
            self.num_begun += 1
            assert self.may_pass.wait(60)
            return copied(target, blocks)

        monkeypatch.setattr(staging.Target, "gathered", gathered)


@pytest.mark.parametrize("comes", [True, False])
def test_rows_run_while_blocks_come_and_nobody_waits_longer_than_for_computing(cold, monkeypatch, comes):
    """A row that decodes, and a prompt whose copies to the device wait for the test, or come too late."""
    driver, [first, *others] = tiered(), tiny.prompts([70, *[100] * 6, 20], seed=15)
    for prompt in (first, *others[:-1]):
        ask(driver, prompt)
    gate = Gate(monkeypatch)
    driver.offloading.rule.seconds_to_wait = 60.0 if comes else 0.0
    two = driver.door.admit(first, SamplingParams(n=2, max_tokens=4, top_k=1))
    running, *waiting = tiny.numbered([tiny.request(driver, 1, others[-1], tiny.greedy(100)), *two])
    driver.add(running)
    for _ in range(3):
        driver.turn(max_steps=1)
    for request in waiting:
        driver.add(request)
    told = {request.request_id: [] for request in (running, *waiting)}
    for _ in range(8):
        for delta in driver.turn(max_steps=1):
            told[delta.request_id].append(delta)
    assert len(told[running.request_id]) > 4
    assert driver.offloading.is_fetching == comes
    assert not (comes and driver.offloading.must_read_first)  # its blocks are not computed while it waits
    assert not any(told[request.request_id] for request in waiting) or not comes
    gate.may_pass.set()
    while driver.has_work:
        for delta in driver.turn():
            told[delta.request_id].append(delta)
    its = told[waiting[0].request_id]
    assert its[0].num_fetched_tokens == ({"host": 64} if comes else None)
    assert its[0].num_hit_tokens == (64 if comes else 0)
    for request in waiting:
        assert [token for delta in told[request.request_id] for token in delta.token_ids] == cold(first)
    tiny.assert_nothing_is_held(driver)
    driver.close()
    assert gate.num_begun == 2 if comes else gate.num_begun <= 1  # what is late is not copied any more


def test_new_weights_take_no_block_of_old_ones_that_is_on_its_way(monkeypatch):
    """The prompt waits for its blocks when the weights change; a row decodes beside it."""
    driver, [first, *others] = tiered(), tiny.prompts([70, *[100] * 6, 20], seed=15)
    for prompt in (first, *others[:-1]):
        ask(driver, prompt)
    gate = Gate(monkeypatch)
    running, waiting = tiny.numbered([tiny.request(driver, 1, p, SCORED) for p in (others[-1], first)])
    driver.add(running)
    driver.turn(max_steps=1)
    driver.add(waiting)
    deltas = [delta for _ in range(4) for delta in driver.turn(max_steps=1)]
    assert driver.offloading.is_fetching
    other = {name: array[::-1].copy() for name, array in tiny.weights().items() if "_proj" in name}
    deltas += driver.lifecycle.update_weights(driver.lifecycle.read_names(list(other.items())))
    gate.may_pass.set()
    while driver.has_work:
        deltas += driver.turn()
    its = [(d.token_ids, d.scores) for d in deltas if d.request_id == waiting.request_id and d.token_ids]
    assert driver.reset_prefix_cache()
    answer, num_hits, fetched = ask(driver, first, SCORED)
    assert (num_hits, fetched) == (0, {})
    assert whole(its) == whole(answer)
    tiny.assert_nothing_is_held(driver)
    driver.close()


@pytest.mark.slow
def test_nothing_that_moves_blocks_copies_the_cache_and_the_loop_knows_nothing_of_it(monkeypatch):
    """The programs between two runs need memory for a piece, and none that grows with the cache."""
    monkeypatch.setattr(Driver, "compile", lambda self: None)
    texts = []
    for driver in (tiny.driver(), tiered()):
        its = driver.device.graphdef, driver.device.params, driver.state, loop.limits(1), np.bool_(False)
        texts.append(loop.run.lower(*its, config=driver.step_config).as_text())
    assert texts[0] == texts[1]

    def temp_bytes(num_blocks):
        state = tiered(num_blocks=num_blocks).state
        specs, line = (FULL,), staging.Line.of(state, np.zeros(64, np.int32), 0)
        sizes = dataclasses.replace(staging.PieceSizes.of(state), of_class=(5,))
        places, arrays = sizes.places([]), staging.Target(state, sizes).gathered([])
        its = state.tables.pool, state.kv_cache, *line.arguments
        present = np.zeros((1, state.tables.max_blocks_per_seq), bool)
        lowered = (
            programs.arrive_blocks.lower(*its, present, places, arrays),
            programs.depart_blocks.lower(*its, places, specs=specs),
        )
        cache_bytes = sum(array.nbytes for array in state.kv_cache.blocks.values())
        return [each.compile().memory_analysis().temp_size_in_bytes for each in lowered], cache_bytes

    (small, small_cache), (large, large_cache) = temp_bytes(65), temp_bytes(1025)
    for its, more in zip(small, large, strict=True):
        assert more - its < (large_cache - small_cache) / 8


@pytest.mark.slow
def test_answers_are_found_where_prompts_may_find_them():
    """A conversation whose second prompt has the first answer in it; and one of two, of a single run each."""
    driver = tiered(reuse_answers=True)
    [prompt, forked, *others] = tiny.prompts([40, 40, *[100] * 6], seed=17)
    answer, *_ = ask(driver, prompt, tiny.greedy(30))
    two = driver.door.admit(forked, SamplingParams(n=2, max_tokens=26, ignore_eos=True))
    for request in tiny.numbered(two):
        driver.add(request)
    ends = []
    while driver.has_work:
        ends += driver.turn(max_steps=32)
    assert len(ends) == 2
    assert ends[0].token_ids != ends[1].token_ids
    # 69 and 65 tokens have K and V: all but the answer's last.
    for talk in ([*prompt, *tokens(answer)], *([*forked, *end.token_ids] for end in ends)):
        for other in others:
            ask(driver, other)
        assert ask(driver, [*talk, 1, 2, 3])[1:] == (64, {"host": 64})
    assert not driver.offloading._answers
