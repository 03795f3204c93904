"""Metrics of the tiers below the device, under vLLM's names."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxpaged.serve.metric_families import LABELS, single
from jaxpaged.tiers.tiers import HOST, TierCounts


def tier_families(
    tiers: Mapping[str, TierCounts], block_size: int, labels: tuple[str, str]
) -> Iterator[Metric]:
    """Yield the counters of all tiers; none if there are no tiers.

    labels: the model's name, and the engine's number.
    """
    if not tiers:
        return
    host = tiers[HOST]
    for name, help_, blocks in (
        ("external_prefix_cache_queries", "Tokens looked up in tiers below the device.", host.num_queries),
        ("external_prefix_cache_hits", "Tokens fetched.", sum(tier.num_hits for tier in tiers.values())),
    ):
        yield single(CounterMetricFamily, f"vllm:{name}", help_, blocks * block_size, labels)
    moved = CounterMetricFamily(
        "vllm:kv_offload_total_bytes",
        "Bytes of K and V moved between the device and host memory.",
        labels=(*LABELS, "transfer_type"),
    )
    moved.add_metric((*labels, "GPU_to_CPU"), host.written_bytes)
    moved.add_metric((*labels, "CPU_to_GPU"), host.read_bytes)
    yield moved
    for name, help_, field in (
        ("block_queries", "Blocks looked for in a tier.", "num_queries"),
        ("block_hits", "Blocks fetched from a tier.", "num_hits"),
        ("read_bytes", "Bytes of K and V read from a tier.", "read_bytes"),
        ("write_bytes", "Bytes of K and V given to a tier.", "written_bytes"),
        ("read_time", "Seconds of reads from a tier below host memory.", "read_seconds"),
    ):
        family = CounterMetricFamily(f"vllm:kv_offload_tiering_{name}", help_, labels=(*LABELS, "tier"))
        for tier, stats in tiers.items():
            family.add_metric((*labels, tier), getattr(stats, field))
        yield family
    for name, help_, field in (
        ("stored_bytes", "Bytes that a tier has.", "num_bytes"),
        ("kept_bytes", "Bytes among them that requests have it keep (kv_cache_ttl).", "kept_bytes"),
    ):
        gauge = GaugeMetricFamily(f"jaxpaged:kv_offload_{name}", help_, labels=(*LABELS, "tier"))
        for tier, stats in tiers.items():
            if (value := getattr(stats, field)) is not None:
                gauge.add_metric((*labels, tier), value)
        yield gauge
