"""The driver: fills rows, dispatches runs of the loop, reads their reports. For one thread only.

The only object that holds a variable: the current `EngineState`, and who is in which row.
"""

import dataclasses
import functools
import heapq
import logging
import time
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from jaxpaged.config import EngineConfig
from jaxpaged.engine import loop, state
from jaxpaged.engine.loop import MAX_STEPS, Report
from jaxpaged.engine.plan import attention, cache_size, max_model_len, resolve_dtype, tiles_per_pass
from jaxpaged.engine.request import Delta, Door, Request
from jaxpaged.engine.scheduler import Limits
from jaxpaged.engine.state import Counter, EngineState, FinishReason, HostPool, Phase, Rows
from jaxpaged.engine.step import StepConfig
from jaxpaged.memory import policies
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import Llama, Weights
from jaxpaged.status import raise_if_error

logger = logging.getLogger("jaxpaged")

# Rows of the state for each row that can run: while all run, as many requests again wait on the device.
ROWS_PER_SEQ = 2
# Requests submitted in one dispatch.
SUBMIT_LINES = 8
# The share of blocks that stays free, as vLLM's, when a request is admitted beside running ones.
WATERMARK = 0.01
# A run should take about so long: short enough to stream, long enough for its dispatch to cost nothing.
SECONDS_PER_RUN = 0.1


@dataclasses.dataclass(frozen=True)
class Stats:
    """What the engine has done since it was made, and how it stands."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # computed in prompt tiles
    num_decode_tokens: int = 0  # computed one a row and step
    num_new_tokens: int = 0  # of answers
    num_preemptions: int = 0
    num_lookup_tokens: int = 0  # looked up in the prefix cache
    num_hit_tokens: int = 0  # found there
    num_running: int = 0
    num_waiting: int = 0  # on the device or on the host, preempted ones included
    num_blocks: int = 0  # of the pool, the null block left out
    num_free_blocks: int = 0
    num_cached_blocks: int = 0  # free ones whose content can still be found


@dataclasses.dataclass
class _Place:
    """A row that has a request."""

    request: Request
    num_seen: int  # tokens read so far
    waits: bool = True  # not aborted, and without an answer or a block when last heard of


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """An engine between two runs, as values of the host: what `jaxpaged.replay` writes to a file."""

    state: EngineState  # NumPy arrays; of K and V only shapes and types
    step_config: StepConfig
    vocab_size: int
    queue: Rows  # of those who have no row yet, a line each, in their order


class Driver:
    """Owns the model and the state. `turn` is one beat: dispatch the next run, read the one before."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, weights: Weights) -> None:
        self.config = config
        size = self.cache_size = cache_size(config, model_config)
        decode_attention, why = attention(config, model_config)
        logger.info("attention of decode steps: %s (%s)", decode_attention, why)
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            num_tiles=config.num_prefill_tiles,
            watermark_blocks=int(WATERMARK * size.num_blocks),
            sliding_window=model_config.sliding_window,
            reuse_answers=config.reuse_answers,
        )
        self.door = Door(config, model_config, max_model_len(config, model_config), size, limits)
        self.step_config = StepConfig(limits, tiles_per_pass(config), decode_attention)
        self.stats = Stats(num_blocks=size.num_blocks - 1, num_free_blocks=size.num_blocks - 1)
        self._graphdef, self._params = nnx.split(Llama(model_config, weights, resolve_dtype(config)))
        self._state = self._create_state()
        self._counters = jax.device_get(self._state.counters)
        self._queue: list[tuple[tuple[int, int], Request]] = []  # a heap of those without a row
        self._places: list[_Place | None] = [None] * self._num_rows
        self._unread: Report | None = None
        self._seconds_per_step = SECONDS_PER_RUN  # until it is known better
        self._last_read: float | None = None
        logger.info("cache: %s", size)
        self._compile()

    @property
    def _num_rows(self) -> int:
        return ROWS_PER_SEQ * self.config.max_num_seqs

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or self._unread is not None or any(self._places)

    def add(self, request: Request) -> None:
        """Queue a request that came through the door."""
        heapq.heappush(self._queue, (request.order, request))

    def abort(self, request_ids: Sequence[int]) -> list[Delta]:
        """End these requests; who has no row yet ends at once, of the others the next turns tell."""
        wanted = set(request_ids)
        gone = [request for _, request in self._queue if request.request_id in wanted]
        if gone:
            self._queue = [entry for entry in self._queue if entry[1].request_id not in wanted]
            heapq.heapify(self._queue)
        in_rows = [place for place in self._places if place and place.request.request_id in wanted]
        for place in in_rows:
            place.waits = False
        self._abort_rows(in_rows)
        return [
            Delta(r.request_id, [], [] if r.params.logprobs is not None else None, 0, FinishReason.ABORT)
            for r in gone
        ]

    def turn(self, max_steps: int | None = None) -> list[Delta]:
        """Dispatch the next run if there is anything to run, then read the report of the one before.

        So the device has work while the host reads. `max_steps` is at most `loop.MAX_STEPS`; without it as
        many as make a short while.
        """
        self._recall_less_urgent()
        self._fill_rows()
        if self._unread is None:
            self._last_read = None  # the device was idle: the next report does not tell a run's time
        dispatched = None
        if any(self._places):
            dispatched = self._run(max_steps or self._steps_of_a_short_while())
        deltas = [] if self._unread is None else self._read(self._unread)
        self._unread = dispatched if any(self._places) else None
        return deltas

    def reset_prefix_cache(self) -> bool:
        """Forget what can be found of former requests; False, and nothing changes, if any is unfinished."""
        if self.has_work:
            return False
        self._state = loop.reset_prefix_cache(self._state)
        return True

    def snapshot(self) -> Snapshot:
        """Waits for the run under way, and disturbs nothing."""
        requests = [request for _, request in sorted(self._queue)]
        queue = state.empty_rows(len(requests), self.door.max_model_len)
        for line, request in enumerate(requests):
            self.door.write(queue, line, request)
        values = jax.device_get(state.without_kv(self._state))
        return Snapshot(values, self.step_config, self.door.model_config.vocab_size, queue)

    def _abort_rows(self, places: Sequence[_Place]) -> None:
        if places:
            arrivals = np.full(self._num_rows, -1, np.int32)
            arrivals[: len(places)] = [place.request.request_id for place in places]
            self._state = loop.abort(self._state, arrivals)

    def _steps_of_a_short_while(self) -> int:
        return int(np.clip(SECONDS_PER_RUN / self._seconds_per_step, 1, MAX_STEPS))

    def _create_state(self) -> EngineState:
        config = self.config
        create = functools.partial(
            loop.create,
            self._graphdef,
            self._params,
            num_rows=self._num_rows,
            block_size=config.block_size,
            max_model_len=self.door.max_model_len,
            policy=policies.named(config.eviction_policy),
        )
        created = create(num_blocks=self.cache_size.num_blocks, prefix_caching=config.enable_prefix_caching)
        if config.preemption_mode != "swap":
            return created
        swapped = create(num_blocks=config.num_host_blocks, prefix_caching=False)
        on_host = jax.device_put(swapped.kv_cache, jax.memory.Space.Host)
        return dataclasses.replace(created, host=HostPool(swapped.tables, on_host))

    def _compile(self) -> None:
        """Compile the loop (or read it from JAX's cache on disk) by running none of its steps."""
        start = time.perf_counter()
        self._submit([])
        self._state = loop.abort(self._state, np.full(self._num_rows, -1, np.int32))
        jax.block_until_ready(self._run(max_steps=0))
        logger.info("compiled in %.1f s", time.perf_counter() - start)

    def _run(self, max_steps: int) -> Report:
        self._state, report = loop.run(
            self._graphdef,
            self._params,
            self._state,
            np.int32(max_steps),
            np.bool_(bool(self._queue)),
            config=self.step_config,
        )
        return report

    def _recall_less_urgent(self) -> None:
        """Take back who waits in a row, if someone more urgent has none.

        In the run whose report is unread it may have begun to run: then it begins again, to the same answer.
        """
        waiting = [row for row, place in enumerate(self._places) if place and place.waits]
        if not (self._queue and waiting):
            return
        waiting.sort(key=lambda row: self._request_in(row).order, reverse=True)
        if self._queue[0][0] > self._request_in(waiting[0]).order:
            return  # always so where the first to come is the first served
        num_free = self._places.count(None)
        urgent = heapq.nsmallest(num_free + len(waiting), self._queue)[num_free:]
        pairs = zip(waiting, urgent, strict=False)
        rows = [row for row, (order, _) in pairs if order < self._request_in(row).order]
        self._abort_rows([place for row in rows if (place := self._places[row])])
        for row in rows:
            self.add(self._request_in(row))
            self._places[row] = None

    def _request_in(self, row: int) -> Request:
        place = self._places[row]
        assert place is not None
        return place.request

    def _fill_rows(self) -> None:
        free_rows = [row for row, place in enumerate(self._places) if place is None]
        while self._queue and free_rows:
            batch: list[tuple[int, Request]] = []
            while self._queue and free_rows and len(batch) < SUBMIT_LINES:
                batch.append((free_rows.pop(0), heapq.heappop(self._queue)[1]))
            self._submit(batch)

    def _submit(self, batch: Sequence[tuple[int, Request]]) -> None:
        requests = state.empty_rows(SUBMIT_LINES, self.door.max_model_len)
        rows = np.full(SUBMIT_LINES, self._num_rows, np.int32)  # beyond all: none
        for line, (row, request) in enumerate(batch):
            rows[line] = row
            self._places[row] = _Place(request, num_seen=len(request.prompt_token_ids))
            self.door.write(requests, line, request)
        self._state = loop.submit(self._state, requests, rows)

    def _read(self, unread: Report) -> list[Delta]:
        report: Report = jax.device_get(unread)
        raise_if_error(int(report.status))
        deltas = []
        for row, place in enumerate(self._places):
            # A row filled after this run began is not in its report.
            if place is None or report.arrival[row] != place.request.request_id:
                continue
            num_new = int(report.num_tokens[row]) - place.num_seen
            reason = FinishReason(int(report.finish_reason[row]))
            if num_new or reason:
                place.num_seen += num_new
                deltas.append(_delta(report, row, place.request, num_new, reason))
            place.waits &= int(report.phase[row]) == Phase.WAITING and not num_new
            if reason:
                self._places[row] = None
        self._note(report)
        return deltas

    def _note(self, report: Report) -> None:
        """Bring the statistics up to date, and the time that a step takes."""
        done = dict(zip(Counter, (report.counters - self._counters).tolist(), strict=True))
        self._counters = report.counters
        now = time.perf_counter()
        num_steps = done[Counter.NUM_STEPS]
        if self._last_read is not None and num_steps:
            self._seconds_per_step = (now - self._last_read) / num_steps
        self._last_read = now if num_steps else None
        num_running = int(np.sum(report.phase == Phase.RUNNING))
        self.stats = dataclasses.replace(
            self.stats,
            **{c.name.lower(): getattr(self.stats, c.name.lower()) + more for c, more in done.items()},
            num_running=num_running,
            num_waiting=len(self._queue) + sum(p is not None for p in self._places) - num_running,
            num_free_blocks=int(report.num_free_blocks),
            num_cached_blocks=int(report.num_cached_blocks),
        )


def _delta(report: Report, row: int, request: Request, num_new: int, reason: FinishReason) -> Delta:
    """The row's newest `num_new` tokens: the report has its last MAX_STEPS, the oldest first."""
    end = min(int(report.num_tokens[row]), MAX_STEPS)
    new = slice(end - num_new, end)
    logprobs = report.new_logprobs[row, new].tolist() if request.params.logprobs is not None else None
    return Delta(
        request_id=request.request_id,
        token_ids=report.new_token_ids[row, new].tolist(),
        logprobs=logprobs,
        num_hit_tokens=int(report.num_hit_tokens[row]),
        finish_reason=reason,
    )
