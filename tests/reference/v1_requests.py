"""Requests, pools and managers for the tests of the V1 oracle."""

from collections.abc import Sequence
from typing import Any

from reference.invariants import check_block_pool
from reference.v1.block_pool import (
    BlockPool,
)
from reference.v1.kv_cache_manager import KVCacheManager
from reference.v1.kv_cache_utils import (
    KVCacheBlock,
    Request,
    get_request_block_hasher,
    sha256,
)
from reference.v1.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

PROFILES = ["classic", "split"]


def ids(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def free_ids(pool: BlockPool) -> list[int]:
    return ids(pool.free_block_queue.get_all_free_blocks())


def make_pool(num_blocks: int, free_profile: str = "classic", **options: Any) -> BlockPool:
    return BlockPool(num_blocks, True, hash_block_size=4, free_profile=free_profile, **options)


def make_manager(
    num_blocks: int, block_size: int = 4, window: int | None = None, **options: Any
) -> KVCacheManager:
    spec: AttentionSpec = FullAttentionSpec(block_size, 1, 1, "half")
    if window is not None:
        spec = SlidingWindowSpec(block_size, 1, 1, "half", window)
    config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, **{"max_model_len": 1000, **options})


def full(block_size: int = 4) -> AttentionSpec:
    return FullAttentionSpec(block_size, 1, 1, "half")


def window(tokens: int, block_size: int = 4) -> AttentionSpec:
    return SlidingWindowSpec(block_size, 1, 1, "half", tokens)


def chunked(tokens: int, block_size: int = 4) -> AttentionSpec:
    return ChunkedLocalAttentionSpec(block_size, 1, 1, "half", tokens)


def make_hybrid_manager(
    num_blocks: int,
    specs: Sequence[AttentionSpec],
    eagle_groups: Sequence[int] = (),
    retention_interval: int | None = None,
    **options: Any,
) -> KVCacheManager:
    groups = [KVCacheGroupSpec([str(i)], spec, i in eagle_groups) for i, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks, [], groups, retention_interval)
    return KVCacheManager(config, **{"max_model_len": 1000, **options})


def make_request(name: str, tokens: Sequence[int], block_size: int = 4, **options: Any) -> Request:
    return Request(name, tokens, block_hasher=get_request_block_hasher(block_size, sha256), **options)


def prefill(manager: KVCacheManager, request: Request) -> list[int] | None:
    """Look up, allocate and compute a whole prompt. Returns the new block ids, or None without room."""
    hit_blocks, num_hit_tokens, _ = manager.get_computed_blocks(request)
    num_new_tokens = request.num_tokens - num_hit_tokens
    new_blocks = manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hit_blocks)
    if new_blocks is None:
        return None
    request.num_computed_tokens = request.num_tokens
    return ids(new_blocks.blocks[0])


def decode(manager: KVCacheManager, request: Request, token: int) -> list[int] | None:
    request.append_output_token_ids(token)
    new_blocks = manager.allocate_slots(request, 1)
    if new_blocks is None:
        return None
    request.num_computed_tokens += 1
    return ids(new_blocks.blocks[0])


def check(manager: KVCacheManager) -> None:
    tables = [table for group in manager.single_type_managers for table in group.req_to_blocks.values()]
    check_block_pool(manager.block_pool, tables)
