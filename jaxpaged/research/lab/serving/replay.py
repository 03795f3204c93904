"""Requests that come when their time has come, to engines with several caches; and how long they wait."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.arithmetic import cdiv, next_power_of_two
from jaxpaged.checks import INT32_MAX, InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine.setup import WATERMARK
from jaxpaged.memory import eviction
from jaxpaged.models.constant import VOCAB_SIZE
from jaxpaged.research.lab import belady
from jaxpaged.research.lab.combination import Combination
from jaxpaged.research.lab.decoders import Decoder, blocks_in
from jaxpaged.research.lab.serving import loop
from jaxpaged.research.lab.serving.loop import FINISHED, FIRST_TOKEN, STARTED
from jaxpaged.research.lab.serving.roofline import Roofline
from jaxpaged.research.lab.threads import Programs, side_by_side
from jaxpaged.research.lab.traces import Trace
from jaxpaged.status import raise_if_error
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import Counter, EngineState, Phase, empty_rows

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Memory:
    """Blocks and requests at one moment."""

    time_s: float  # since the first request came
    num_held: int  # blocks
    num_cached: int  # free blocks whose content can be found
    num_empty: int  # free blocks without
    num_running: int  # requests
    num_waiting: int


@dataclass(frozen=True)
class Served:
    """Results of a trace's requests in an engine with one cache; times are the model's."""

    combination: Combination
    num_usable: int  # blocks of the cache
    num_counted: int  # requests after the warm-up: the last so many
    arrival_s: np.ndarray  # [requests] since the first
    output_lens: np.ndarray  # [requests] tokens that were answered
    moments_s: np.ndarray  # [3, requests] when each STARTED and so on; NaN for those refused
    hit_tokens: np.ndarray  # [requests] found in the prefix cache when it started
    counters: dict[Counter, int]  # counts over the whole run
    memory: Sequence[Memory]

    @property
    def is_refused(self) -> np.ndarray:
        """Prompts that with their answers need more blocks than there are."""
        return np.isnan(self.moments_s[FINISHED])

    @property
    def queue_s(self) -> np.ndarray:
        return self._counted(self.moments_s[STARTED] - self.arrival_s)

    @property
    def ttft_s(self) -> np.ndarray:
        """Seconds to the first token, for the counted requests that were not refused."""
        return self._counted(self.moments_s[FIRST_TOKEN] - self.arrival_s)

    @property
    def tpot_s(self) -> np.ndarray:
        """For each later token, of those that have some."""
        later = np.where(self.output_lens > 1, self.output_lens - 1, np.nan)
        return self._counted((self.moments_s[FINISHED] - self.moments_s[FIRST_TOKEN]) / later)

    def over_time(self, max_moments: int) -> list[Memory]:
        """Return the memory's use at up to `max_moments` moments at equal distances."""
        times = np.array([each.time_s for each in self.memory])
        at = np.linspace(times[0], times[-1], max_moments) if len(times) else times
        return [self.memory[i] for i in np.unique(np.searchsorted(times, at, side="right") - 1)]

    def _counted(self, values: np.ndarray) -> np.ndarray:
        values = values[len(values) - self.num_counted :]
        return values[~np.isnan(values)]

    def line(self) -> dict[str, Any]:
        """Return the results as a JSON object."""
        seconds = float(np.nanmax(self.moments_s, initial=0.0))
        return {
            **asdict(self.combination),
            "num_blocks": self.num_usable,
            "num_requests": self.num_counted,
            "num_warmup_requests": len(self.arrival_s) - self.num_counted,
            "num_refused_requests": int(self.is_refused.sum()),
            "num_preemptions": self.counters[Counter.NUM_PREEMPTIONS],
            "num_steps": self.counters[Counter.NUM_STEPS],
            "num_computed_prompt_tokens": self.counters[Counter.NUM_PROMPT_TOKENS],
            "num_hit_tokens": int(self.hit_tokens.sum()),
            "model_seconds": seconds,
            "num_output_tokens": int(self.output_lens[~self.is_refused].sum()),
            "most_held": max((each.num_held for each in self.memory), default=0) / self.num_usable,
            "queue_s": percentiles(self.queue_s),
            "ttft_s": percentiles(self.ttft_s),
            "tpot_s": percentiles(self.tpot_s),
        }


def percentiles(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {"mean": float(values.mean())} | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


@dataclass(frozen=True)
class Serving:
    """A trace served with several caches."""

    gpu: str  # a name in `roofline.GPUS`
    decoder: str  # a name in `roofline.DECODERS`
    config: EngineConfig  # how many requests run together, how many tokens are computed in one step
    num_requests: int
    caches: Sequence[Served]


def serve(
    trace: Trace,
    combinations: Sequence[Combination],
    peak: Roofline,
    config: EngineConfig,
    decoder: Decoder,
    *,
    warmup: float = 0.5,
    progress: Callable[[int], object] = lambda num_requests: None,
) -> Iterator[Served]:
    """Serve the trace with each cache, several at a time, and give the results in order.

    The engine is the package's own, all of its step; its model computes nothing, and a step takes as long as
    the roofline says. A request can be admitted in the first step that begins after it came. Of `config` only
    `max_num_seqs` and `max_num_batched_tokens` count; `warmup` and `progress` are as in `sweep.sweep`.
    Raises `InputError`, also for a policy that the engine does not have.
    """
    num_counted = trace.num_requests - int(trace.num_requests * warmup)
    belady.trace_anew(each.policy for each in combinations)
    server = _Server(trace, combinations, peak, config, decoder)
    serve_one = functools.partial(server.serve, num_counted=num_counted, progress=progress)
    yield from side_by_side(serve_one, combinations)


class _Server:
    """A trace on the device. Caches of one block size and policy share a program: their arrays are those of
    the largest.
    """

    def __init__(
        self,
        trace: Trace,
        combinations: Sequence[Combination],
        peak: Roofline,
        config: EngineConfig,
        decoder: Decoder,
    ) -> None:
        self.trace, self.peak, self.decoder, self.num_rows = trace, peak, decoder, config.num_rows
        self.step_config = StepConfig(
            max_num_seqs=config.max_num_seqs,
            num_tiles=config.num_prefill_tiles,
            tiles_per_pass=config.num_prefill_tiles,
            attention="xla",
        )
        self.output_lens = np.maximum(trace.output_lens, 1)
        self.total_lens = trace.input_lens + self.output_lens
        self.max_model_len = next_power_of_two(int(self.total_lens.max()))
        if self.max_model_len > INT32_MAX // self.num_rows:
            raise InputError(f"max_num_seqs={config.max_num_seqs} must be smaller, for prompts are so long")
        self.num_blocks: dict[tuple[int, bool], int] = {}  # by block size, and whether there is one table
        for each in combinations:
            num_blocks = next_power_of_two(1 + self.usable(each))
            if num_blocks * each.block_size > INT32_MAX:
                raise InputError(f"cache_tokens={each.size} must be smaller, or the trace shorter")
            kind = each.block_size, each.one_table
            self.num_blocks[kind] = max(num_blocks, self.num_blocks.get(kind, 0))
        if trace.content is None:  # nothing is shared: each prompt is an id of its own, again and again
            content, self.first_ids = np.arange(trace.num_requests), np.arange(trace.num_requests)
            self.tokens_per_id = self.max_model_len
        else:
            content, self.first_ids = trace.content, trace.content_starts
            self.tokens_per_id = trace.block_size
        self.content = jnp.asarray(content, jnp.int32)
        self.programs = Programs()

    def usable(self, combination: Combination) -> int:
        """Return the number of a cache's blocks: no more than all requests together could fill."""
        grouping, size = self.decoder.grouping(one_table=combination.one_table), combination.block_size
        enough = int(cdiv(self.total_lens, size).sum()) * grouping.num_groups
        if combination.cache_tokens is None:
            return enough
        return min(blocks_in(combination.cache_tokens, size, self.decoder, grouping), enough)

    def serve(self, combination: Combination, num_counted: int, progress: Callable[[int], object]) -> Served:
        usable, arrival_s = self.usable(combination), self.trace.arrival_s
        grouping = self.decoder.grouping(one_table=combination.one_table).of_step
        config = replace(self.step_config, grouping=grouping)
        state = loop.create(
            usable,
            policy=eviction.named(combination.policy),
            num_blocks=self.num_blocks[combination.block_size, combination.one_table],
            block_size=combination.block_size,
            num_rows=self.num_rows,
            max_model_len=self.max_model_len,
            grouping=grouping,
        )
        watermark = np.int32(WATERMARK * (usable + 1))
        # The engine's door refuses others; an answer's last token is never written to the cache.
        most_held = config.blocks_of(jnp.asarray(self.total_lens - 1, jnp.int32), combination.block_size)
        fits = np.asarray(most_held) <= usable
        progress(int(np.count_nonzero(~fits)))
        log = _Log(usable, arrival_s[fits], self.trace.num_requests, self.num_rows)
        coming = np.flatnonzero(fits)[::-1].tolist()  # the next one last
        while True:
            for row in np.flatnonzero(log.in_row == NOBODY).tolist():
                if coming and arrival_s[coming[-1]] <= log.clock_s:
                    log.in_row[row] = coming[-1]
                    state = self._submit(state, coming.pop(), row)
            if (log.in_row != NOBODY).any():
                until = arrival_s[coming[-1]] - log.clock_s if coming else np.inf
                state, report = self.programs.call(
                    (combination.policy, combination.block_size, combination.one_table),
                    loop.run,
                    state,
                    np.float32(until),
                    watermark,
                    self.peak,
                    self.decoder,
                    config=config,
                )
                progress(log.note(jax.device_get(report)))
            elif coming:
                log.clock_s = float(arrival_s[coming[-1]])
            else:
                return Served(
                    combination,
                    usable,
                    num_counted,
                    arrival_s,
                    self.output_lens,
                    log.moments_s,
                    log.hit_tokens,
                    dict(zip(Counter, log.counters.tolist(), strict=True)),
                    log.memory,
                )

    def _submit(self, state: EngineState, request: int, row: int) -> EngineState:
        fields = {
            "phase": Phase.WAITING,
            "arrival": 1 + request,
            "prompt_lens": self.trace.input_lens[request],
            "num_tokens": self.trace.input_lens[request],
            "max_num_tokens": self.total_lens[request],
        }
        line: Any = {name: np.array([value], np.int32) for name, value in fields.items()}
        return loop.submit(
            state,
            replace(empty_rows(1, 0, VOCAB_SIZE), **line),
            np.array([row], np.int32),
            self.content,
            np.int32(self.first_ids[request]),
            np.int32(self.tokens_per_id),
        )


NOBODY = -1


class _Log:
    """Log of an engine's reports on the host; `arrival_s`: arrival times of the requests that it takes."""

    def __init__(self, num_usable: int, arrival_s: np.ndarray, num_requests: int, num_rows: int) -> None:
        self.num_usable, self.arrival_s = num_usable, arrival_s
        self.clock_s = 0.0
        self.in_row = np.full(num_rows, NOBODY)
        self.moments_s = np.full((3, num_requests), np.nan)
        self.hit_tokens = np.zeros(num_requests, np.int64)
        self.counters = np.zeros(len(Counter), np.int32)
        self.memory: list[Memory] = []
        self.num_finished = 0

    def note(self, report: Any) -> int:
        """Read the report of the last steps, and return the number of requests that finished in them."""
        raise_if_error(int(report.status))
        rows = np.flatnonzero(self.in_row != NOBODY)
        requests = self.in_row[rows]
        now = self.clock_s + report.moments[:, rows].astype(np.float64)
        before = self.moments_s[:, requests]
        self.moments_s[:, requests] = np.where(np.isfinite(now) & np.isnan(before), now, before)
        self.hit_tokens[requests] = report.num_hit_tokens[rows]
        self.counters = report.counters
        self.clock_s += float(report.seconds)
        is_done = report.phase[rows] == Phase.FINISHED
        self.in_row[rows[is_done]] = NOBODY
        num_done = int(np.count_nonzero(is_done))
        self.num_finished += num_done
        num_running = int(np.count_nonzero(report.phase == Phase.RUNNING))
        num_come = int(np.searchsorted(self.arrival_s, self.clock_s, side="right"))
        num_free, num_cached = int(report.num_free), int(report.num_cached)
        self.memory.append(
            Memory(
                time_s=self.clock_s,
                num_held=self.num_usable - num_free,
                num_cached=num_cached,
                num_empty=num_free - num_cached,
                num_running=num_running,
                num_waiting=num_come - self.num_finished - num_running,
            )
        )
        return num_done
