"""AsyncLLM, as who knows vLLM's would use it."""

import asyncio
import functools
import time

import pytest

import jaxpaged
from jaxpaged import InputError, RequestOutputKind, SamplingParams
from tests import tiny
from tests.serve.conftest import soon


def in_event_loop(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


async def gather(llm, prompt, params, request_id):
    return [output async for output in llm.generate(prompt, params, request_id)]


def underway(llm):
    """Return the handles of unfinished requests, by their ids."""
    return llm._handles


def test_it_is_public():
    assert jaxpaged.AsyncLLM.__name__ == "AsyncLLM"


@pytest.mark.parametrize("kind", RequestOutputKind)
@in_event_loop
async def test_outputs_are_those_of_llm_by_their_kind(llm, kind):
    params = SamplingParams(max_tokens=9, n=2, seed=3, logprobs=1, output_kind=kind)
    [want] = llm.llm.generate(["ab c"], params, use_tqdm=False)
    outputs = await gather(llm, "ab c", params, "mine")
    assert {output.request_id for output in outputs} == {"mine"}
    assert {output.prompt for output in outputs} == {"ab c"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1
    for answer in want.outputs:
        its = [a for output in outputs for a in output.outputs if a.index == answer.index]
        if kind is RequestOutputKind.DELTA:
            assert "".join(a.text for a in its) == answer.text
            assert [e for a in its for e in a.logprobs] == answer.logprobs
        else:
            assert its[-1] == answer
    metrics = outputs[-1].metrics
    times = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    ]
    assert times == sorted(times)


@in_event_loop
async def test_an_abort_ends_the_stream_with_its_reason(llm, brake):
    hold = brake(llm.engine)
    hold.allow(2)
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    asking = [asyncio.create_task(gather(llm, [5, i], params, f"r{i}")) for i in range(3)]
    while len(underway(llm)) < 3:
        await asyncio.sleep(0)
    with pytest.raises(InputError, match="request_id='r1' must be a string that no request under way has"):
        await gather(llm, [5], params, "r1")
    await llm.abort(["r0", "stranger"])
    await llm.abort("r1")
    again = asyncio.create_task(gather(llm, [7], params, "r1"))  # while the first one's stream goes on
    await asyncio.sleep(0)
    await llm.abort("r1")
    asking.append(asyncio.create_task(gather(llm, [8], SamplingParams(max_tokens=2), "r1")))
    hold.off()
    assert (await again)[-1].outputs[0].finish_reason == "abort"
    reasons = [(await each)[-1].outputs[0].finish_reason for each in asking]
    assert reasons[:3] == ["abort", "abort", "length"]
    assert reasons[3] != "abort"
    assert not underway(llm)
    soon(lambda: llm.engine.is_idle)


@in_event_loop
async def test_what_is_left_early_is_given_up_and_mistakes_are_told_at_once(llm):
    with pytest.raises(InputError, match="must have at least one token"):
        await gather(llm, [], None, "a")
    stream = llm.generate([5, 6], SamplingParams(max_tokens=100, ignore_eos=True), "a")
    await anext(stream)
    await stream.aclose()
    assert not underway(llm)
    await llm.check_health()
    long = "ab " * 3000
    with pytest.raises(InputError, match="characters"):
        await gather(llm, long, None, "b")


def test_occupancy_tells_who_holds_which_blocks(llm, brake):
    engine = llm.engine
    soon(engine.reset_prefix_cache)
    hold = brake(engine)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    shared = tiny.prompts([24])[0]
    first = engine.submit([*shared, 1, 2], params)
    hold.allow(3)
    next(iter(first))
    second = engine.submit([*shared, 3, 4], params)
    while not second._items:
        hold.allow(1)
        time.sleep(0.01)
    told = []
    asking = tiny.start(lambda: told.append(engine.occupancy()))
    while not asking.done():
        hold.allow(1)
        time.sleep(0.01)
    [seen] = told
    assert [request.request_id for request in seen.requests] == [first.request_id, second.request_id]
    one, other = (set(request.block_ids.tolist()) for request in seen.requests)
    assert len(one & other) == 3
    assert {int(i) for i in seen.holders.nonzero()[0]} == one | other
    assert all(seen.holders[i] == 2 for i in one & other)
    assert all(seen.has_content[i] for i in one & other)
    for request in seen.requests:
        assert request.phase.name == "RUNNING"
        assert request.prompt_len == 26
        assert len(request.block_ids) == -(-request.num_computed // 8)
    hold.off()
    first.result()
    second.result()
    soon(lambda: engine.is_idle)
    assert not engine.occupancy().holders.any()
