"""Streams of an engine for coroutines: side by side, given up, refused, and ended."""

import asyncio
import functools
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from jaxpaged.api.async_engine import AsyncEngine
from jaxpaged.checks import InputError
from jaxpaged.engine.handle import EngineDeadError
from jaxpaged.engine.request import Delta
from jaxpaged.step.state import FinishReason
from tests import tiny
from tests.engine.limits import LONG, limited

# asyncio


def in_event_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a coroutine as a test under the time limit."""

    @limited
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def gather(engine: AsyncEngine, prompt: list[int], max_tokens: int) -> list[int]:
    tokens = []
    async for delta in engine.generate(prompt, tiny.greedy(max_tokens)):
        tokens += delta.token_ids
    assert delta.finish_reason is FinishReason.LENGTH
    return tokens


@in_event_loop
async def test_coroutines_stream_side_by_side(engine):
    prompts = tiny.prompts([1, 30, 9, 50, 4, 77, 20])
    answers = await asyncio.gather(*(gather(AsyncEngine(engine), p, 40) for p in prompts))
    assert answers == [tiny.reference_answer(tuple(p), 40) for p in prompts]


@in_event_loop
async def test_a_cancelled_task_aborts_its_request(engine, brake):
    hold = brake(engine)
    hold.allow(2)
    before = engine.stats.num_new_tokens
    started = asyncio.Event()

    async def read() -> None:
        async for _ in AsyncEngine(engine).generate([1, 2], tiny.greedy(LONG)):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    hold.off()
    assert await gather(AsyncEngine(engine), [3], 2) == tiny.reference_answer((3,), 2)
    tiny.until(lambda: engine.is_idle)
    assert engine.stats.num_new_tokens - before <= 3 + 2


@pytest.mark.parametrize("by", ["aclose", "break"])
@in_event_loop
async def test_leaving_the_iteration_aborts_the_request(engine, brake, monkeypatch, by):
    aborted = []
    abort = engine._worker.abort
    monkeypatch.setattr(engine._worker, "abort", lambda ids: (abort(ids), aborted.extend(ids)))
    hold = brake(engine)
    hold.allow(2)
    before = engine.stats.num_new_tokens
    stream = AsyncEngine(engine).generate([1, 2], tiny.greedy(LONG))
    async for delta in stream:
        assert delta.token_ids
        break
    if by == "aclose":
        await stream.aclose()
    del stream
    gc.collect()
    while not aborted:  # the event loop closes what is forgotten, in a task of its own
        await asyncio.sleep(0.001)
    hold.off()
    tiny.until(lambda: engine.is_idle)
    assert engine.stats.num_new_tokens - before <= 3


@in_event_loop
async def test_a_bad_request_is_refused_at_once(engine):
    with pytest.raises(InputError, match="the prompt must have at least one token"):
        await anext(AsyncEngine(engine).generate([], tiny.greedy(1)))


@limited
def test_an_event_loop_that_is_gone_disturbs_nobody(engine, brake, caplog):
    hold = brake(engine)
    hold.allow(2)

    async def leave() -> AsyncIterator[Delta]:
        stream = AsyncEngine(engine).generate([1, 2], tiny.greedy(LONG))
        await anext(stream)
        return stream

    event_loop = asyncio.new_event_loop()
    stream = event_loop.run_until_complete(leave())
    event_loop.close()
    hold.off()
    assert len(engine.submit([1], tiny.greedy(50)).result().token_ids) == 50
    assert not caplog.records
    del stream


@in_event_loop
async def test_a_dead_engine_ends_every_stream(own, brake):
    brake(own).allow(2)
    started = AsyncEngine(own).generate([1, 2], tiny.greedy(LONG))
    await anext(started)
    own.close()
    with pytest.raises(EngineDeadError):
        async for _ in started:
            pass
    with pytest.raises(EngineDeadError):
        await anext(AsyncEngine(own).generate([1], tiny.greedy(1)))
