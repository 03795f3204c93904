"""AsyncEngine: streams over an engine alone. Deprecated: `AsyncLLM` does the same, and reads prompts."""

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Unpack

import numpy as np

from jaxpaged.api import streams
from jaxpaged.api.outputs import RequestOutput
from jaxpaged.engine.door import RequestOptions
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.request import Delta, Request
from jaxpaged.sampling_params import SamplingParams


class AsyncEngine:
    """Streams of an engine's answers for coroutines."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def generate(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of a prompt's answers as they come; each has the `index` of its answer.

        Options are those of `Door.admit`. Raises `InputError` at once for a request that could never run; for
        other errors see `streams.deltas`.
        """
        requests = await self._admit(prompt_token_ids, params, options)
        async with aclosing(streams.deltas(self.engine, requests)) as stream:
            async for _, delta in stream:
                yield delta

    async def outputs(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Yield vLLM's outputs as they come, by `params.output_kind`; otherwise as `generate`."""
        requests = await self._admit(prompt_token_ids, params, options)
        async with aclosing(streams.outputs(self.engine, [requests])) as outputs:
            async for _, output in outputs:
                yield output

    async def _admit(
        self, prompt_token_ids: Sequence[int] | np.ndarray, params: SamplingParams, options: RequestOptions
    ) -> list[Request]:
        """Check a request; in another thread where that takes long."""
        door = self.engine.door
        is_long = door.must_read(options.get("lora_request"))
        is_long |= door.must_compile(params)
        is_long |= hasattr(prompt_token_ids, "__len__") and len(prompt_token_ids) > streams.CHECKED_HERE
        admit = functools.partial(door.admit, prompt_token_ids, params, **options)
        return await asyncio.to_thread(admit) if is_long else admit()
