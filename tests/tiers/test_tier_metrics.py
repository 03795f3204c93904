"""Metrics of tiers, as Prometheus reads them."""

from jaxpaged.serve.page import tier_fields
from jaxpaged.serve.tier_metrics import tier_families
from jaxpaged.tiers.host import HostStore
from jaxpaged.tiers.tiers import TierCounts
from tests.tiers.test_stores import block, key_of


def test_counts_have_vllms_names_and_units():
    store = HostStore(100)
    for number, size in ((1, 20), (2, 30)):
        store.put(key_of(number), block(number, size))
    store.keep([key_of(2)], 60)
    host, disk = TierCounts(9, 3, 100, 200, store=store), TierCounts(9, 2, 50, 70, 1.5)
    found = {
        (sample.name, *list(sample.labels.values())[2:]): sample.value
        for family in tier_families({"host": host, "disk": disk}, 16, ("model", "0"))
        for sample in family.samples
    }
    assert found == {
        ("vllm:external_prefix_cache_queries_total",): 144,
        ("vllm:external_prefix_cache_hits_total",): 80,
        ("vllm:kv_offload_total_bytes_total", "GPU_to_CPU"): 200,
        ("vllm:kv_offload_total_bytes_total", "CPU_to_GPU"): 100,
        ("vllm:kv_offload_tiering_block_queries_total", "host"): 9,
        ("vllm:kv_offload_tiering_block_queries_total", "disk"): 9,
        ("vllm:kv_offload_tiering_block_hits_total", "host"): 3,
        ("vllm:kv_offload_tiering_block_hits_total", "disk"): 2,
        ("vllm:kv_offload_tiering_read_bytes_total", "host"): 100,
        ("vllm:kv_offload_tiering_read_bytes_total", "disk"): 50,
        ("vllm:kv_offload_tiering_write_bytes_total", "host"): 200,
        ("vllm:kv_offload_tiering_write_bytes_total", "disk"): 70,
        ("vllm:kv_offload_tiering_read_time_total", "host"): 0,
        ("vllm:kv_offload_tiering_read_time_total", "disk"): 1.5,
        ("jaxpaged:kv_offload_stored_bytes", "host"): 50,
        ("jaxpaged:kv_offload_kept_bytes", "host"): 30,
    }
    assert tier_fields(host, 16) == {"fetched_tokens": 48, "bytes": 50, "kept_bytes": 30}
    assert tier_fields(disk, 16) == {"fetched_tokens": 32, "bytes": None, "kept_bytes": None}
    assert not [*tier_families({}, 16, ("model", "0"))]
