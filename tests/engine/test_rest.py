"""Pauses, sleep and new weights of an engine with a thread: vLLM's names and meanings."""

import asyncio
import time

import jax
import pytest

import jaxpaged
from jaxpaged.api.async_llm import AsyncLLM
from jaxpaged.checks import InputError
from jaxpaged.engine.handle import EngineDeadError
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.weights import random_weights
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.step.state import FinishReason
from tests import tiny
from tests.engine.limits import limited
from tests.tiny_gguf import write_gguf

NEW = random_weights(tiny.CONFIG, NAMES, seed=7)
PARAMS = SamplingParams(max_tokens=50, temperature=1, seed=3, ignore_eos=True)
PROMPTS = tiny.prompts([9, 20])


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = write_gguf(tmp_path_factory.mktemp("rest") / "tiny.gguf")
    return jaxpaged.LLM(path, **tiny.DEFAULTS | tiny.SMALL)


@pytest.fixture
def engine(llm):
    """Give the engine its first weights, awake."""
    llm.wake_up()
    llm.resume_generation()
    llm.update_weights(tiny.weights())
    return llm.engine


def answers(engine, prompts=PROMPTS, params=PARAMS):
    return [handle.result().token_ids for handle in [engine.submit(prompt, params) for prompt in prompts]]


def slowly(hold, future):
    """Let the engine make a step now and then, until a call has returned."""
    while not future.done():
        hold.allow(1)
        time.sleep(0.003)
    future.result()
    hold.off()


def tokens_of(llm, prompt, params=PARAMS):
    [output] = llm.generate(prompt, params, use_tqdm=False)
    return [answer.token_ids for answer in output.outputs]


@limited
def test_kept_requests_go_on_where_they_were(engine, brake):
    want = answers(engine)
    hold = brake(engine)
    handles = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    hold.allow(5)
    first = next(iter(handles[0]))
    paused = tiny.start(engine.pause, "keep")
    slowly(hold, paused)
    assert engine.is_paused
    late = engine.submit(PROMPTS[0], PARAMS)
    assert first.token_ids == want[0][: len(first.token_ids)]
    assert not any(handle.metrics.finished_time for handle in [*handles, late])
    engine.resume()
    assert [handle.result().token_ids for handle in handles] == want
    assert late.result().token_ids == want[0]


@limited
def test_aborted_requests_keep_their_tokens_and_can_go_on(llm, engine, brake):
    want = answers(engine)
    hold = brake(engine)
    handles = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    hold.allow(8)
    tiny.until(lambda: all(handle.metrics.first_token_time for handle in handles))
    paused = tiny.start(engine.pause)
    slowly(hold, paused)
    parts = [handle.result() for handle in handles]
    assert [part.finish_reason for part in parts] == [FinishReason.ABORT] * 2
    assert all(0 < len(part.token_ids) < 50 for part in parts)
    waiting = engine.submit(PROMPTS[0], PARAMS)
    engine.abort([waiting])
    assert waiting.result().finish_reason is FinishReason.ABORT  # at once, while nothing runs
    llm.resume_generation()
    for prompt, part, whole in zip(PROMPTS, parts, want, strict=True):
        begun = {"prompt_token_ids": prompt, "continue_from": part.token_ids}
        assert part.token_ids + tokens_of(llm, begun)[0] == whole


@limited
def test_waiting_ends_what_is_in_flight_and_holds_the_rest(engine, brake):
    want = answers(engine)
    hold = brake(engine)
    handle = engine.submit(PROMPTS[0], PARAMS)
    paused = tiny.start(engine.pause, "wait")
    late = engine.submit(PROMPTS[1], PARAMS)
    slowly(hold, paused)
    assert handle.result().token_ids == want[0]
    assert engine.is_paused
    assert late.metrics.first_token_time is None
    engine.resume()
    assert late.result().token_ids == want[1]


@limited
def test_waiting_ends_what_was_kept(llm, engine, brake):
    """Only what came during the pause goes on waiting, and is ended by a pause that aborts."""
    want = answers(engine)
    hold = brake(engine)
    kept = engine.submit(PROMPTS[0], PARAMS)
    hold.allow(5)
    tiny.until(lambda: kept.metrics.first_token_time)
    slowly(hold, tiny.start(engine.pause, "keep"))
    late = engine.submit(PROMPTS[1], PARAMS)
    assert not kept.metrics.finished_time
    llm.sleep(1, "keep")
    with pytest.raises(InputError, match="are away"):
        engine.pause("wait")
    llm.wake_up(["weights", "kv_cache"])
    slowly(hold, tiny.start(engine.pause, "keep"))
    later = engine.submit(PROMPTS[1], PARAMS)
    engine.pause("wait")
    assert kept.metrics.finished_time
    assert [handle.result().token_ids for handle in (kept, late)] == want
    assert engine.is_paused
    assert later.metrics.first_token_time is None
    engine.pause("abort")
    assert later.result().finish_reason is FinishReason.ABORT


@limited
@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_gives_memory_back_and_compiles_nothing(llm, engine, level):
    """Kept requests are computed anew. Level 2 reads the files again, unless an update brings all weights."""
    want = answers(engine)
    driver = tiny.driver_of(engine)
    cache, weights = (
        jax.tree.leaves(driver.state.kv_cache),
        sum(x.nbytes for x in jax.tree.leaves(llm.weights)),
    )
    llm.pause_generation("keep")
    handle = engine.submit(PROMPTS[0], PARAMS)
    before = driver.device.params
    llm.sleep(level, "keep")
    assert llm.is_sleeping
    assert [array.is_deleted() for array in cache] == [level > 0] * len(cache)
    gone = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(driver.device.params)]
    assert gone == [level > 0] * len(gone)
    del before
    if level:
        with pytest.raises(InputError, match=r"wake_up\(tags=\['weights'\]\)"):
            llm.resume_generation()
        with pytest.raises(InputError, match="the weights are away"):
            llm.update_weights({"model.norm.weight": NEW["model.norm.weight"]})
        with pytest.raises(InputError, match="are away"):
            llm.export_blocks(PROMPTS[0])
        llm.wake_up(tags=["weights"])
        assert llm.is_sleeping
        assert sum(x.nbytes for x in jax.tree.leaves(llm.weights)) == weights
    llm.wake_up(["kv_cache"] if level else ["scheduling"])
    assert not llm.is_sleeping
    assert not llm.is_paused
    assert handle.result().token_ids == want[0]
    assert answers(engine) == want
    assert tiny.driver_of(engine).stats.num_free_blocks == engine.stats.num_blocks


@limited
def test_all_weights_may_come_while_none_are_there(llm, engine):
    llm.update_weights(NEW)
    want = answers(engine)
    llm.sleep(level=2)
    llm.update_weights(NEW)
    llm.wake_up(tags=["kv_cache"])
    assert not llm.is_sleeping
    assert answers(engine) == want


@limited
def test_the_caches_memory_is_released_alone(llm, engine):
    with pytest.raises(InputError, match="is_paused=False must be True"):
        llm.release_kv_cache_memory()
    want = answers(engine)
    llm.pause_generation("wait")
    llm.release_kv_cache_memory()
    with pytest.raises(InputError, match="the kv_cache are away"):
        llm.release_kv_cache_memory()
    llm.update_weights(NEW)  # while the cache's memory is free
    llm.wake_up(tags=["kv_cache"])
    assert answers(engine) != want


def test_mistakes_are_said(llm, engine):
    for call, message in (
        (lambda: llm.pause_generation("now"), "mode='now' must be one of abort, wait, keep"),
        (lambda: llm.sleep(3), "level=3 must be 0, 1 or 2"),
        (lambda: llm.wake_up(["cache"]), r"tags=\['cache'\] must be None or a list of 'weights'"),
        (lambda: llm.update_weights([("norm.weight",)]), "must be a pair of a name and an array"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    assert not llm.is_paused


def test_answers_go_on_each_from_its_own_tokens(llm, engine):
    """Positions of seeds, penalties and the shortest length are those of the whole answer."""
    params = SamplingParams(
        n=3,
        seed=5,
        max_tokens=12,
        min_tokens=8,
        temperature=1,
        presence_penalty=1,
        stop_token_ids=[3],
        logprobs=1,
    )
    [whole] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    begun = [answer.token_ids[:n] for answer, n in zip(whole.outputs, (5, 0, 7), strict=True)]
    asked = {"prompt_token_ids": PROMPTS[0], "continue_from": begun}
    [rest] = llm.generate(asked, params, use_tqdm=False)
    for first, answer, old in zip(begun, rest.outputs, whole.outputs, strict=True):
        assert first + answer.token_ids == old.token_ids
        assert answer.logprobs == old.logprobs[len(first) :]
        assert answer.finish_reason == old.finish_reason
    [two] = llm.generate(asked | {"continue_from": [None, begun[1], begun[2]]}, params, use_tqdm=False)
    assert [answer.index for answer in two.outputs] == [1, 2]
    assert [answer.token_ids for answer in two.outputs] == [answer.token_ids for answer in rest.outputs[1:]]
    for wrong, message in (
        ([1, 2], "must be a list of 3, token ids or None for each answer"),
        ([None] * 3, "must be tokens for one answer at least"),
        ([[97], [], []], "token=97 must be a token id"),
        ([[1] * 12, [], []], "has 12 tokens, must have less than the answer's 12"),
        ([[1] * 8 + [3], [], []], "must have no token that ends the answer: 3 is one"),
    ):
        with pytest.raises(InputError, match=message):
            llm.generate(asked | {"continue_from": wrong}, params, use_tqdm=False)
    with pytest.raises(InputError, match="must be left out here"):
        llm.beam_search(asked, BeamSearchParams(beam_width=2, max_tokens=2))


@limited
def test_a_closed_engine_ends_who_waits_for_a_pause(own, brake):
    brake(own)
    own.submit(PROMPTS[0], PARAMS)
    paused = tiny.start(own.pause, "wait")
    own.close()
    with pytest.raises(EngineDeadError):
        paused.result(20)
    with pytest.raises(EngineDeadError):
        own.pause("wait")


def test_the_same_calls_await(llm, engine):
    async def calls():
        model = AsyncLLM.of(llm)
        await model.pause_generation(mode="keep")
        assert await model.is_paused()
        await model.sleep(level=1)
        assert await model.is_sleeping()
        await model.wake_up()
        version = await model.update_weights(NEW, version=llm.weight_version + 3)
        assert version == model.weight_version == llm.weight_version
        params = SamplingParams(max_tokens=3, temperature=0)
        outputs = [each async for each in model.generate({"prompt_token_ids": PROMPTS[0]}, params, "a")]
        await model.pause_generation()
        await model.release_kv_cache_memory()
        await model.wake_up()
        return version, outputs[-1]

    version, output = asyncio.run(calls())
    [answer] = output.outputs
    assert answer.weight_versions == [version] * 3
