"""Sends the load, and notes when what came back."""

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import httpx
import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.research.bench.workloads import BenchRequest

Level = dict[str, float]


@dataclasses.dataclass
class Answered:
    """One request as its client saw it; times in seconds since the run began."""

    sent_s: float
    due_s: float  # when it was to be sent: its times count from here, so that no delay of ours is hidden
    chunks_s: list[float] = dataclasses.field(default_factory=list)  # each with text, or with tokens
    ended_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None  # why it is not counted

    @property
    def ttft_s(self) -> float:
        return self.chunks_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.chunks_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean time a token after the first."""
        return (self.chunks_s[-1] - self.chunks_s[0]) / max(1, self.num_output_tokens - 1)


def measure(
    args: argparse.Namespace,
    levels: Sequence[Level],
    asked: Sequence[BenchRequest],
    warmups: Sequence[BenchRequest],
) -> list[tuple[Level, list[Answered]]]:
    """Measure each level and return its answers. Raises `InputError` if the server is not there."""
    return asyncio.run(_measure(args, levels, asked, warmups))


async def _measure(
    args: argparse.Namespace,
    levels: Sequence[Level],
    asked: Sequence[BenchRequest],
    warmups: Sequence[BenchRequest],
) -> list[tuple[Level, list[Answered]]]:
    key = args.api_key or os.environ.get("JAXPAGED_API_KEY")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=args.base_url,
        timeout=args.timeout,
        limits=limits,
        headers={"authorization": f"Bearer {key}"} if key else {},
    ) as http:
        model = args.model or await _first_model(http)
        client = _Client(http, model, args.temperature)
        await _closed_loop(client.ask, warmups, len(warmups) or 1)
        measured = []
        for level in levels:
            client.start()
            if "rate" in level:
                answers = await _open_loop(client.ask, asked, _due(asked, level["rate"], args.seed))
            else:
                answers = await _closed_loop(client.ask, asked, int(level["concurrency"]))
            measured.append((level, answers))
        return measured


async def _first_model(http: httpx.AsyncClient) -> str:
    try:
        reply = await http.get("/v1/models")
        reply.raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError) as error:
        raise InputError(f"--base-url {str(http.base_url)!r} does not list its models: {error}") from error


type Ask = Callable[[BenchRequest, float | None], Awaitable[Answered]]


async def _closed_loop(ask: Ask, asked: Sequence[BenchRequest], num_clients: int) -> list[Answered]:
    """Send requests from `num_clients` clients, each of which sends its next when its last is answered."""
    left, answers = iter(asked), []

    async def one() -> None:
        for each in left:
            answers.append(await ask(each, None))

    await asyncio.gather(*(one() for _ in range(num_clients)))
    return answers


async def _open_loop(ask: Ask, asked: Sequence[BenchRequest], due: Iterator[float]) -> list[Answered]:
    """Send each request at its time, whether or not earlier ones are answered."""
    tasks, began = [], time.perf_counter()
    for each, at in zip(asked, due, strict=False):
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        tasks.append(asyncio.ensure_future(ask(each, at)))
    return await asyncio.gather(*tasks)


def _due(asked: Sequence[BenchRequest], rate: float, seed: int) -> Iterator[float]:
    """Return the send times: the trace's clock, `rate` times as fast, or a Poisson process."""
    if asked and asked[0].at_s is not None:
        return ((each.at_s or 0.0) / rate for each in asked)
    gaps = np.random.default_rng((seed, 1)).exponential(1 / rate, len(asked))
    return itertools.accumulate(gaps.tolist())


class _Client:
    def __init__(self, http: httpx.AsyncClient, model: str, temperature: float) -> None:
        self._http, self._model, self._temperature = http, model, temperature
        self._began = time.perf_counter()

    def start(self) -> None:
        """Count time from now on."""
        self._began = time.perf_counter()

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def ask(self, asked: BenchRequest, due_s: float | None) -> Answered:
        """Send a request and return its answer. Never raises: an error is part of the answer."""
        now = self._now
        answered = Answered(now, now if due_s is None else due_s)
        body = {
            "model": self._model,
            "prompt": asked.prompt,
            "max_tokens": asked.max_tokens,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    answered.error = f"{reply.status_code}: {reply.text[:200]}"
                else:
                    await self._read(reply, answered)
        except (httpx.HTTPError, ValueError) as error:
            answered.error = f"{type(error).__name__}: {error}"
        answered.ended_s = self._now
        if answered.error is None and not answered.chunks_s:
            answered.error = "the stream had no tokens"
        return answered

    async def _read(self, reply: httpx.Response, answered: Answered) -> None:
        held = b""
        async for piece in reply.aiter_raw():
            now = self._now
            *lines, held = (held + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    _note(json.loads(data), now, answered)


def _note(chunk: dict[str, Any], now: float, answered: Answered) -> None:
    if chunk.get("error"):
        answered.error = str(chunk["error"])[:200]
    if chunk.get("choices"):
        answered.chunks_s.append(now)
    if usage := chunk.get("usage"):
        answered.num_prompt_tokens = usage["prompt_tokens"]
        answered.num_output_tokens = usage["completion_tokens"]
        answered.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
