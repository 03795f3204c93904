"""The engine for asyncio: what a server awaits."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from jaxpaged.config import SamplingParams
from jaxpaged.engine.engine import Engine, Item, or_raise
from jaxpaged.engine.request import Delta


class AsyncEngine:
    """Streams answers to coroutines. The engine's own thread does the work; the event loop never waits."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: int = 0,
    ) -> AsyncIterator[Delta]:
        """The answer's deltas as they come, the last with a reason.

        Leaving the iteration early, or cancelling the task, aborts the request. Raises `InputError` at once
        for a request that could never run, `EngineDeadError` if the engine stops.
        """
        event_loop = asyncio.get_running_loop()
        items: asyncio.Queue[Item] = asyncio.Queue()

        def sink(item: Item) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed: nobody waits
                event_loop.call_soon_threadsafe(items.put_nowait, item)

        handle = self.engine.submit(prompt_token_ids, params, priority=priority, salt=salt, sink=sink)
        finished = False
        try:
            while not finished:
                delta = or_raise(await items.get())
                finished = bool(delta.finish_reason)
                yield delta
        finally:
            if not finished:
                handle.abort()
