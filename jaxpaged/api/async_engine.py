"""The engine for asyncio: what a server awaits."""

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

import numpy as np

from jaxpaged.api.outputs import RequestOutput, request_output
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.handle import Handle, Item, collect, or_raise
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.texts import texts
from jaxpaged.lora import LoRARequest
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.text.vocabulary import Names

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
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[Delta]:
        """The answer's deltas as they come, the last with a reason; of several answers each has its `index`.

        Leaving the iteration early, or cancelling the task, aborts the request; an event loop that is closed
        does so, too. Raises `InputError` at once for a request that could never run, `EngineDeadError` if the
        engine stops, `TextError` if the tokenizer fails on the answer's tokens.
        """
        requests = await self._admit(prompt_token_ids, params, priority, cache_salt, lora_request)
        async with aclosing(self._stream(requests, lambda handles: None)) as stream:
            async for _, delta in stream:
                yield delta

    async def outputs(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The same as vLLM's outputs: by `params.output_kind` each has an answer so far, what is new of one,
        or there is but one output, with all answers.
        """
        requests = await self._admit(prompt_token_ids, params, priority, cache_salt, lora_request)
        async with aclosing(self.outputs_of([requests])) as outputs:
            async for _, output in outputs:
                yield output

    async def outputs_of(
        self,
        prompts: Sequence[Sequence[Request]],
        queued: Callable[[list[Handle]], None] = lambda handles: None,
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Outputs as they come, each with the place of its prompt, of which `door.admit` made the requests.

        All are queued at once; then `queued` is called, with their handles.
        """
        told = [Told(requests, self.engine) for requests in prompts]
        place = {}

        def started(handles: list[Handle]) -> None:
            left = iter(handles)
            for i, each in enumerate(told):
                each.handles = [next(left) for _ in each.requests]
                place.update({handle.request_id: i for handle in each.handles})
            queued(handles)

        requests = [request for each in prompts for request in each]
        async with aclosing(self._stream(requests, started)) as stream:
            async for handle, delta in stream:
                i = place[handle.request_id]
                output = told[i].output(delta)
                if output is not None:
                    yield i, output

    async def _admit(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        lora_request: LoRARequest | None,
    ) -> list[Request]:
        admit = functools.partial(
            self.engine.door.admit,
            prompt_token_ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            lora_request=lora_request,
        )
        is_long = self.engine.door.must_read(lora_request)
        is_long |= hasattr(prompt_token_ids, "__len__") and len(prompt_token_ids) > CHECKED_HERE
        return await asyncio.to_thread(admit) if is_long else admit()

    async def _stream(
        self, requests: Sequence[Request], started: Callable[[list[Handle]], None]
    ) -> AsyncGenerator[tuple[Handle, Delta]]:
        event_loop = asyncio.get_running_loop()
        items: asyncio.Queue[Item] = asyncio.Queue()

        def sink(item: Item) -> None:
            if event_loop.is_closed():  # nobody waits any more
                self.engine.abort(handles)
            else:
                event_loop.call_soon_threadsafe(items.put_nowait, item)

        handles = self.engine.submit_all(requests, sink)
        with_text = {handle.request_id: texts(self.engine.tokenizer, handle.request) for handle in handles}
        unfinished = {handle.request_id: handle for handle in handles}
        try:
            started(handles)
            while unfinished:
                item = or_raise(await items.get())
                delta, handle = with_text[item.request_id](item), unfinished[item.request_id]
                if delta.finish_reason:
                    del unfinished[item.request_id]
                yield handle, delta
        finally:
            self.engine.abort([*unfinished.values()])


class Told:
    """The answers to one prompt, as far as they have been told."""

    def __init__(self, requests: Sequence[Request], engine: Engine) -> None:
        self.requests, self._tokenizer = requests, engine.tokenizer
        self.handles: list[Handle] = []
        self._kind = requests[0].params.output_kind
        self._prompt_token_ids: list[int] = requests[0].prompt_token_ids.tolist()
        self._so_far: dict[int, Delta] = {}
        # Of each answer that is told part by part: what its tokens are called goes on.
        self._names: dict[int, Names] = {}
        self._unfinished = len(requests)

    def output(self, delta: Delta) -> RequestOutput | None:
        """Return what is to be told after one more delta, by the prompt's `output_kind`."""
        self._unfinished -= bool(delta.finish_reason)
        answers = [delta]
        if self._kind is not RequestOutputKind.DELTA:
            before = [self._so_far[delta.index]] if delta.index in self._so_far else []
            self._so_far[delta.index] = collect([*before, delta])
            answers = [self._so_far[delta.index]]
        if self._kind is RequestOutputKind.FINAL_ONLY:
            if self._unfinished:
                return None
            answers = [self._so_far[index] for index in sorted(self._so_far)]
        metrics = [handle.metrics for handle in self.handles]
        return request_output(
            self.requests[0],
            None,
            answers,
            metrics,
            self._tokenizer,
            finished=not self._unfinished,
            prompt_token_ids=self._prompt_token_ids,
            names=self._names if self._kind is RequestOutputKind.DELTA else None,
        )
