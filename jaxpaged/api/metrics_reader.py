"""Metrics of an engine in Python, by vLLM's names: `LLM.get_metrics` returns them."""

import dataclasses

from jaxpaged.engine.engine import Engine


@dataclasses.dataclass
class Metric:
    """A metric's name, such as "vllm:num_requests_running", and its labels."""

    name: str
    labels: dict[str, str]


@dataclasses.dataclass
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclasses.dataclass
class Vector(Metric):
    """Counts in a fixed order: of accepted drafts, by their position in a step."""

    values: list[int]


@dataclasses.dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclasses.dataclass
class Histogram(Metric):
    """Histogram of observations by upper limits; only servers have histograms, and `/metrics` shows them."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(engine: Engine, model_name: str) -> list[Metric]:
    """Return an engine's gauges, counters and, where it drafts, accepted drafts by position, as of now."""
    stats, with_drafts = engine.stats, bool(engine.config.speculative_config)
    labels = {"model_name": model_name, "engine": "0"}
    metrics: list[Metric] = [Gauge(f"vllm:{name}", labels, value) for name, _, value in stats.gauges()]
    for name, _, count in stats.totals(with_drafts=with_drafts):
        metrics.append(Counter(f"vllm:{name}", labels, count))
    if with_drafts:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        metrics.append(Vector(name, labels, list(stats.num_accepted_at)))
    return metrics
