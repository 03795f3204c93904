"""Prometheus metrics under vLLM's names, so that dashboards made for vLLM work here.

Tokens are counted as they come, whatever becomes of their requests. Requests and answers are counted when
they end: `request_success` counts each answer by its reason. All other numbers of requests and answers leave
out those that were aborted. Numbers of the engine are read when a client asks.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxpaged.api.outputs import CompletionOutput, RequestOutput
from jaxpaged.engine.engine import Engine
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serve.metric_families import LABELS, single
from jaxpaged.serve.tier_metrics import tier_families

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
RECENT_S, RECENT_PARTS = 300.0, 60
REQUEST_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


@dataclasses.dataclass
class AnswerTimes:
    first: float
    last: float
    num_tokens: int


@dataclasses.dataclass
class Times:
    """Times at which a request's tokens came, in seconds since the epoch."""

    arrived: float
    num_answers: int
    scheduled: float | None = None
    first_token: float | None = None
    answers: dict[tuple[int, int], AnswerTimes] = dataclasses.field(default_factory=dict)


class Metrics:
    """A registry of one server's own."""

    def __init__(self, model_name: str, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._labels = model_name, "0"
        self._engine = engine
        self._seen = engine.stats
        self._kept: deque[tuple[float, dict[str, list[int]]]] = deque(maxlen=RECENT_PARTS + 1)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.registry.register(_EngineCollector(engine, self._labels))

        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a token.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Those of them found in the cache.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.refused = Counter(
            "jaxpaged:requests_refused",
            "Requests refused because the queue was full.",
            LABELS,
            registry=self.registry,
        ).labels(*self._labels)
        self._success = Counter(
            "vllm:request_success",
            "Answers that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*self._labels, reason)
        self.ttft = self._histogram("time_to_first_token_seconds", "From a request to its token.", TTFT_S)
        self.itl = self._histogram(
            "inter_token_latency_seconds",
            "Between tokens; of tokens that come together, their share of the time.",
            TOKEN_S,
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "An answer's mean time a token after its first.", TOKEN_S
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "From a request to its end.", REQUEST_S)
        self._queue = self._histogram("request_queue_time_seconds", "From a request to its run.", REQUEST_S)
        self._inference = self._histogram(
            "request_inference_time_seconds", "From its run to its end.", REQUEST_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From its run to its first token.", REQUEST_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From its first token to its last.", REQUEST_S
        )
        self._prompt_lens = self._histogram("request_prompt_tokens", "Tokens of a prompt.", REQUEST_TOKENS)
        self._answer_lens = self._histogram(
            "request_generation_tokens", "Tokens of an answer.", REQUEST_TOKENS
        )
        self._n = self._histogram("request_params_n", "Answers asked for.", (1, 2, 5, 10, 20))
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens.", REQUEST_TOKENS)
        self._iteration = self._histogram(
            "iteration_tokens_total",
            "Tokens of a step: the mean of the steps between two looks, for each of them.",
            ITERATION_TOKENS,
        )

    def note(self, times: Times, prompt: int, output: RequestOutput, answer: CompletionOutput) -> int:
        """Count the new tokens of an answer. Return the prompt's tokens that came from the cache, if this
        answer is the first to report them; else 0.
        """
        new = len(answer.token_ids)
        if not new:
            return 0
        now = time.time()
        key = prompt, answer.index
        self.generation_tokens.inc(new)
        if times.first_token is None:
            times.first_token = now
        if output.metrics is not None and times.scheduled is None:
            times.scheduled = output.metrics.first_scheduled_time
        if key in times.answers:
            answer_times = times.answers[key]
            each = max(now - answer_times.last, 0.0) / new
            for _ in range(new):
                self.itl.observe(each)
            answer_times.last, answer_times.num_tokens = now, answer_times.num_tokens + new
            return 0
        times.answers[key] = AnswerTimes(now, now, new)
        self.ttft.observe(max(now - times.arrived, 0.0))
        if answer.index:
            return 0
        self.prompt_tokens.inc(len(output.prompt_token_ids))
        self.cached_tokens.inc(output.num_cached_tokens)
        return output.num_cached_tokens

    def note_end(
        self,
        times: Times,
        prompt: int,
        output: RequestOutput,
        answer: CompletionOutput,
        params: SamplingParams,
    ) -> None:
        """Count an answer that has ended, and with the first of a prompt's answers the prompt."""
        self._success.labels(*self._labels, answer.finish_reason).inc()
        answer_times = times.answers.get((prompt, answer.index))
        if answer_times is None or answer.finish_reason in ("abort", "error"):
            return
        began = None if output.metrics is None else output.metrics.first_scheduled_time
        began = answer_times.first if began is None else min(began, answer_times.first)
        self.e2e.observe(max(answer_times.last - times.arrived, 0.0))
        self._queue.observe(max(began - times.arrived, 0.0))
        self._prefill.observe(answer_times.first - began)
        self._inference.observe(answer_times.last - began)
        self._decode.observe(answer_times.last - answer_times.first)
        self._answer_lens.observe(answer_times.num_tokens)
        if answer_times.num_tokens > 1:
            self._tpot.observe((answer_times.last - answer_times.first) / (answer_times.num_tokens - 1))
        if not answer.index:
            self._prompt_lens.observe(len(output.prompt_token_ids))
            self._n.observe(params.n)
            if params.max_tokens is not None:
                self._max_tokens.observe(params.max_tokens)

    def note_gone(self, num_answers: int) -> None:
        """Count answers whose client has disconnected, or whose engine has died."""
        self._success.labels(*self._labels, "abort").inc(num_answers)

    def sample(self) -> None:
        """Count the engine's steps since the last look."""
        seen, self._seen = self._seen, self._engine.stats
        steps = self._seen.num_steps - seen.num_steps
        new = self._seen.num_new_tokens - seen.num_new_tokens
        tokens = self._seen.num_prompt_tokens - seen.num_prompt_tokens + new
        for _ in range(steps):
            self._iteration.observe(tokens / steps)

    def keep(self) -> None:
        """Record the latencies so far, from time to time, so that `recent` has those since."""
        now = time.monotonic()
        if not self._kept or now - self._kept[-1][0] >= RECENT_S / RECENT_PARTS:
            self._kept.append((now, self._latencies()))

    def recent(self) -> dict[str, Any]:
        """Return, for each latency, how often each bucket was met in the last minutes, and the buckets' upper
        bounds.
        """
        now, newest = time.monotonic(), self._latencies()
        begin = next((kept for then, kept in self._kept if now - then <= RECENT_S), newest)
        return {
            name: {
                "bounds": bounds,
                "counts": [n - b for n, b in zip(newest[name], begin[name], strict=True)],
            }
            for name, bounds in (("ttft", TTFT_S), ("itl", TOKEN_S), ("e2e", REQUEST_S))
        }

    def _latencies(self) -> dict[str, list[int]]:
        """Return the counts of each latency by bucket, not cumulative.

        The last bucket has what lies beyond all bounds.
        """
        made = {}
        for name, histogram in (("ttft", self.ttft), ("itl", self.itl), ("e2e", self.e2e)):
            [metric] = histogram.collect()
            sums = [int(sample.value) for sample in metric.samples if sample.name.endswith("_bucket")]
            made[name] = [n - before for n, before in zip(sums, [0, *sums], strict=False)]
        return made

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self.sample()
        return generate_latest(self.registry)

    def _counter(self, name: str, help_: str) -> Counter:
        return Counter(f"vllm:{name}", help_, LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, help_: str, buckets: Iterable[float]) -> Histogram:
        made = Histogram(f"vllm:{name}", help_, LABELS, buckets=tuple(buckets), registry=self.registry)
        return made.labels(*self._labels)


class _EngineCollector(Collector):
    """The engine's own statistics, read when somebody asks."""

    def __init__(self, engine: Engine, labels: tuple[str, str]) -> None:
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterator[Metric]:
        stats, config, size = self._engine.stats, self._engine.config, self._engine.cache_size
        for name, help_, value in stats.gauges():
            yield single(GaugeMetricFamily, f"vllm:{name}", help_, value, self._labels)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The cache's fixed sizes.",
            labels=("block_size", "num_gpu_blocks", "enable_prefix_caching", "engine"),
        )
        sizes = str(size.block_size), str(size.num_blocks), str(config.enable_prefix_caching), "0"
        info.add_metric(sizes, 1)
        yield info
        for name, help_, count in stats.totals(with_drafts=bool(config.speculative_config)):
            yield single(CounterMetricFamily, f"vllm:{name}", help_, count, self._labels)
        if config.speculative_config:
            yield self._by_place(stats.num_accepted_at)
        yield from tier_families(stats.tiers, size.block_size, self._labels)

    def _by_place(self, counts: tuple[int, ...]) -> Metric:
        name, help_ = "spec_decode_num_accepted_tokens_per_pos", "Drafts that were right, by place in a step."
        family = CounterMetricFamily(f"vllm:{name}", help_, labels=(*LABELS, "position"))
        for place, value in enumerate(counts):
            family.add_metric((*self._labels, str(place)), value)
        return family
