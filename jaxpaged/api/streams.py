"""Streams of answers for coroutines. The engine's own thread does the work; the event loop never waits."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from jaxpaged.api.outputs import RequestOutput, request_output
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.handle import Handle, Item, collect, or_raise
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.texts import texts
from jaxpaged.sampling_params import RequestOutputKind
from jaxpaged.text.vocabulary import Names

# Token ids of a prompt. Checking takes some 20 ns each: a longer prompt is checked in another thread, so that
# the event loop does not wait for it.
CHECKED_HERE = 10_000

type OnQueued = Callable[[list[Handle]], None]


async def deltas(
    engine: Engine, requests: Sequence[Request], on_queued: OnQueued = lambda handles: None
) -> AsyncGenerator[tuple[Handle, Delta]]:
    """Queue requests at once, and yield their deltas with text as they come, until all have ended.

    `on_queued` is called with the handles. Leaving the iteration early, or cancelling the task, aborts the
    requests; so does closing the event loop. Raises `EngineDeadError` if the engine stops, `TextError` if the
    tokenizer fails on an answer's tokens.
    """
    event_loop = asyncio.get_running_loop()
    items: asyncio.Queue[Item] = asyncio.Queue()

    def sink(item: Item) -> None:
        if event_loop.is_closed():  # nobody waits any more
            engine.abort(handles)
        else:
            event_loop.call_soon_threadsafe(items.put_nowait, item)

    handles = engine.submit_all(requests, sink)
    with_text = {handle.request_id: texts(engine.tokenizer, handle.request) for handle in handles}
    unfinished = {handle.request_id: handle for handle in handles}
    try:
        on_queued(handles)
        while unfinished:
            item = or_raise(await items.get())
            delta, handle = with_text[item.request_id](item), unfinished[item.request_id]
            if delta.finish_reason:
                del unfinished[item.request_id]
            yield handle, delta
    finally:
        engine.abort([*unfinished.values()])


async def outputs(
    engine: Engine, prompts: Sequence[Sequence[Request]], on_queued: OnQueued = lambda handles: None
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Queue the requests of several prompts at once, and yield outputs as they come.

    Each output has the index of its prompt before it. Each prompt's requests are those that `door.admit`
    returns. See `deltas` for `on_queued` and errors.
    """
    answers = [Answers(requests, engine) for requests in prompts]
    prompt_of = {}

    def queued(handles: list[Handle]) -> None:
        left = iter(handles)
        for i, each in enumerate(answers):
            each.handles = [next(left) for _ in each.requests]
            prompt_of.update({handle.request_id: i for handle in each.handles})
        on_queued(handles)

    requests = [request for each in prompts for request in each]
    async with aclosing(deltas(engine, requests, queued)) as stream:
        async for handle, delta in stream:
            i = prompt_of[handle.request_id]
            output = answers[i].output(delta)
            if output is not None:
                yield i, output


class Answers:
    """The answers to one prompt so far, and the outputs that the prompt's `output_kind` asks for."""

    def __init__(self, requests: Sequence[Request], engine: Engine) -> None:
        self.requests, self._tokenizer = requests, engine.tokenizer
        self.handles: list[Handle] = []
        self._kind = requests[0].params.output_kind
        self._prompt_token_ids: list[int] = requests[0].prompt_token_ids.tolist()
        self._so_far: dict[int, Delta] = {}
        # By answer, where outputs have what is new: the names of tokens depend on the ones before.
        self._names: dict[int, Names] = {}
        self._unfinished = len(requests)

    def output(self, delta: Delta) -> RequestOutput | None:
        """Return the output after one more delta; None if its kind has none yet."""
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
        return request_output(
            self.requests[0],
            None,
            answers,
            [handle.metrics for handle in self.handles],
            self._tokenizer,
            finished=not self._unfinished,
            prompt_token_ids=self._prompt_token_ids,
            names=self._names if self._kind is RequestOutputKind.DELTA else None,
        )
