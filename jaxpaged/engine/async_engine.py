"""The engine for asyncio: what a server awaits."""

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import numpy as np

from jaxpaged.engine.engine import Engine, Handle, Item, collect, or_raise
from jaxpaged.engine.outputs import RequestOutput, request_output
from jaxpaged.engine.request import Delta
from jaxpaged.engine.texts import texts
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams

# Checking a prompt takes some 20 ns a token: a longer one is checked in another thread, so that who else
# awaits something does not wait for it.
CHECKED_HERE = 10_000


class AsyncEngine:
    """Streams answers to coroutines. The engine's own thread does the work; the event loop never waits."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def generate(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[Delta]:
        """The answer's deltas as they come, the last with a reason; of several answers each has its `index`.

        Leaving the iteration early, or cancelling the task, aborts the request; an event loop that is closed
        does so, too. Raises `InputError` at once for a request that could never run, `EngineDeadError` if the
        engine stops.
        """
        async with aclosing(self._stream(prompt_token_ids, params, priority, cache_salt)) as stream:
            async for _, delta in stream:
                yield delta

    async def outputs(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The same as vLLM's outputs: by `params.output_kind` each has an answer so far, what is new of one,
        or there is but one output, with all answers.
        """
        kind = params.output_kind if isinstance(params, SamplingParams) else None
        so_far: dict[int, Delta] = {}
        async with aclosing(self._stream(prompt_token_ids, params, priority, cache_salt)) as stream:
            async for handles, delta in stream:
                before = [so_far[delta.index]] if delta.index in so_far else []
                so_far[delta.index] = collect([*before, delta])
                finished = len(so_far) == len(handles) and all(d.finish_reason for d in so_far.values())
                told = [delta if kind is RequestOutputKind.DELTA else so_far[delta.index]]
                if kind is RequestOutputKind.FINAL_ONLY:
                    told = [so_far[index] for index in sorted(so_far)] if finished else []
                if told:
                    metrics = [handle.metrics for handle in handles]
                    yield request_output(
                        handles[0].request, None, told, metrics, self.engine.tokenizer, finished=finished
                    )

    async def _stream(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
    ) -> AsyncGenerator[tuple[list[Handle], Delta]]:
        event_loop = asyncio.get_running_loop()
        items: asyncio.Queue[Item] = asyncio.Queue()

        def sink(item: Item) -> None:
            if event_loop.is_closed():  # nobody waits any more
                self.engine.abort(handles)
            else:
                event_loop.call_soon_threadsafe(items.put_nowait, item)

        admit = functools.partial(
            self.engine.door.admit, prompt_token_ids, params, priority=priority, cache_salt=cache_salt
        )
        is_long = hasattr(prompt_token_ids, "__len__") and len(prompt_token_ids) > CHECKED_HERE
        requests = await asyncio.to_thread(admit) if is_long else admit()
        handles = self.engine.submit_all(requests, sink)
        with_text = [texts(self.engine.tokenizer, request.params) for request in requests]
        unfinished = dict(enumerate(handles))
        try:
            while unfinished:
                item = or_raise(await items.get())
                delta = with_text[item.index](item)
                if delta.finish_reason:
                    del unfinished[delta.index]
                yield handles, delta
        finally:
            self.engine.abort([*unfinished.values()])
