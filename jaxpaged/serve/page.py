"""The live page at /, and the events that feed it. While nobody looks, nothing is read for it."""

import asyncio
import base64
import functools
import hashlib
import re
import time
from collections.abc import AsyncGenerator
from importlib import resources
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxpaged.engine.occupancy import Occupancy
from jaxpaged.engine.stats import Stats
from jaxpaged.serve.replies import ApiError, EventStream, event
from jaxpaged.serve.service import Service, service_of
from jaxpaged.step.state import Phase
from jaxpaged.tiers.tiers import TierCounts

router = APIRouter()

TICK_S = 0.5
MOST_WATCHERS = 32
MOST_CELLS = 2048  # cells of the map; with more blocks, each cell stands for several
# What a cell of the map says; from HELD on it is the colour of the sequence that holds the block.
FREE, CACHED, SHARED, HELD = 0, 1, 2, 3
NUM_COLOURS = 12
FIRST_CHAR = 48  # "0"


@router.get("/")
async def page() -> Response:
    """Answer with a single page, which loads nothing from other hosts."""
    text, headers = _page()
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


@functools.cache
def _page() -> tuple[str, dict[str, str]]:
    """Return the page's text, and headers that allow its own script and style by their digests, and nothing
    else.
    """
    text = (resources.files("jaxpaged.serve") / "page.html").read_text(encoding="utf-8")
    allowed = {
        f"{tag}-src": " ".join(f"'sha256-{_digest(part)}'" for part in re.findall(pattern, text, re.DOTALL))
        for tag, pattern in (("script", r"<script>(.*?)</script>"), ("style", r"<style>(.*?)</style>"))
    }
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    } | allowed
    return text, {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }


@router.get("/page/events")
async def events(request: Request) -> Response:
    """Answer with server-sent events, two a second: the engine's state."""
    service = service_of(request)
    state = request.app.state
    watch = getattr(state, "watch", None)
    if watch is None:
        watch = state.watch = Watch(service)
    if watch.num_watchers >= MOST_WATCHERS:
        raise ApiError(429, f"{watch.num_watchers} pages are open already", headers={"retry-after": "60"})
    return EventStream(
        watch.events(),
        max_unread_bytes=service.options.max_unread_bytes,
        slow=lambda: None,
        closed=lambda: None,
    )


class Watch:
    """Observer of the engine: one look per tick for all readers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.num_watchers = 0
        self._newest: dict[str, Any] = {}
        self._came = asyncio.Condition()
        self._looking: asyncio.Task[None] | None = None
        self._before: tuple[float, Stats] = time.monotonic(), service.llm.engine.stats

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield events for one reader: always the newest, until the server stops."""
        self.num_watchers += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            while not self._service.is_stopping.is_set():
                async with self._came:
                    await self._came.wait()
                yield event(self._newest)
        finally:
            self.num_watchers -= 1
            if not self.num_watchers and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def _look(self) -> None:
        while True:
            newest = await self._state()
            async with self._came:
                self._newest = newest
                self._came.notify_all()
            await asyncio.sleep(TICK_S)

    async def _state(self) -> dict[str, Any]:
        service, engine = self._service, self._service.llm.engine
        occupancy = None if engine.stopped else await asyncio.to_thread(engine.occupancy)
        now, stats = time.monotonic(), engine.stats
        then, before = self._before
        self._before = now, stats
        seconds = max(now - then, 1e-3)
        return {
            "time": time.time(),
            "model": service.model_names[0],
            "stopped": None if engine.stopped is None else str(engine.stopped),
            "open": service.num_open,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "max_num_seqs": engine.config.max_num_seqs * engine.config.data_parallel_size,
            "preemptions": stats.num_preemptions,
            "new_tokens": stats.num_new_tokens,
            "tokens_per_s": (stats.num_new_tokens - before.num_new_tokens) / seconds,
            "prompt_tokens_per_s": (stats.num_prompt_tokens - before.num_prompt_tokens) / seconds,
            "hit_tokens": stats.num_hit_tokens,
            "lookup_tokens": stats.num_lookup_tokens,
            "tiers": {
                name: tier_fields(tier, engine.config.block_size) for name, tier in stats.tiers.items()
            },
            "pins": {"tokens": service.pins.num_tokens, "max_tokens": service.pins.max_tokens},
            "drafts": {"drafted": stats.num_draft_tokens, "accepted": stats.num_accepted_tokens}
            if engine.config.speculative_config
            else None,
            "block_size": engine.config.block_size,
            "latency": service.metrics.recent(),
        } | ({} if occupancy is None else occupancy_fields(occupancy))


def occupancy_fields(occupancy: Occupancy) -> dict[str, Any]:
    """Return the map of blocks and the requests in the form that the page reads."""
    holders, content = occupancy.holders[1:], occupancy.has_content[1:]  # all but the null block
    cells = np.where(holders > 1, SHARED, np.where(content & (holders == 0), CACHED, FREE))
    requests = []
    for request in occupancy.requests:
        colour = request.request_id % NUM_COLOURS
        places = request.block_ids - 1
        cells[places[holders[places] == 1]] = HELD + colour
        requests.append(
            {
                "id": request.request_id,
                "phase": Phase(request.phase).name.lower(),
                "prompt": request.prompt_len,
                "computed": request.num_computed,
                "tokens": request.num_tokens,
                "most": request.max_num_tokens,
                "blocks": len(places),
                "colour": colour,
            }
        )
    counts = {
        "free": int(np.count_nonzero((holders == 0) & ~content)),
        "cached": int(np.count_nonzero((holders == 0) & content)),
        "held": int(np.count_nonzero(holders == 1)),
        "shared": int(np.count_nonzero(holders > 1)),
    }
    each = -(-len(cells) // MOST_CELLS)  # blocks a cell
    cells = np.maximum.reduceat(cells, np.arange(0, len(cells), each))
    return {
        "blocks": counts,
        "blocks_per_cell": each,
        "map": (cells + FIRST_CHAR).astype(np.uint8).tobytes().decode("ascii"),
        "requests": requests,
        "queued": occupancy.num_queued,
    }


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def tier_fields(counts: TierCounts, block_size: int) -> dict[str, int | None]:
    """Return the fields of a tier on the page: tokens fetched from it, its bytes and its kept bytes; None
    where unknown.
    """
    fetched = counts.num_hits * block_size
    return {"fetched_tokens": fetched, "bytes": counts.num_bytes, "kept_bytes": counts.kept_bytes}
