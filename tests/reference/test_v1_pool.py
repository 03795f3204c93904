"""The V1 oracle: the block pool."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from reference.invariants import check_block_pool
from reference.v1.block_pool import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
)
from reference.v1.kv_cache_utils import (
    make_block_hash_with_group_id,
)
from tests.reference.v1_requests import PROFILES, free_ids, ids, make_pool, make_request

# The pool.


def test_pool_begins_with_the_null_block_taken() -> None:
    pool = make_pool(5)
    assert pool.null_block is pool.blocks[0]
    assert pool.null_block.is_null
    assert free_ids(pool) == [1, 2, 3, 4]
    assert pool.get_num_free_blocks() == 4
    assert pool.get_usage() == 0.0


def test_pool_takes_from_the_head_and_frees_to_the_tail() -> None:
    pool = make_pool(6)
    first = pool.get_new_blocks(3)
    assert ids(first) == [1, 2, 3]
    assert [block.ref_cnt for block in first] == [1, 1, 1]
    assert pool.get_usage() == pytest.approx(3 / 5)
    pool.free_blocks(reversed(first))
    assert free_ids(pool) == [4, 5, 3, 2, 1]
    assert ids(pool.get_new_blocks(3)) == [4, 5, 3]


def test_pool_that_has_too_few_blocks_gives_none() -> None:
    pool = make_pool(4)
    with pytest.raises(ValueError, match=r"^Cannot get 4 free blocks from the pool$"):
        pool.get_new_blocks(4)
    assert pool.get_num_free_blocks() == 3
    assert pool.get_new_blocks(0) == []


def test_pool_of_the_null_block_alone() -> None:
    pool = make_pool(1)
    assert pool.get_usage() == 0
    assert pool.get_num_free_blocks() == 0
    assert pool.reset_prefix_cache()


def test_pool_constructor_refuses() -> None:
    with pytest.raises(ValueError, match="free_profile='lifo' must be 'classic' or 'split'"):
        make_pool(4, "lifo")
    with pytest.raises(AssertionError, match="num_gpu_blocks=0 must be at least 1"):
        make_pool(0)


def test_pool_frees_a_shared_block_with_its_last_user() -> None:
    pool = make_pool(4)
    blocks = pool.get_new_blocks(2)
    pool.touch(blocks)
    pool.free_blocks(blocks)
    assert free_ids(pool) == [3]
    pool.free_blocks([blocks[1], blocks[0]])
    assert free_ids(pool) == [3, 2, 1]


def test_pool_touch_takes_a_hit_out_of_the_middle_of_the_queue() -> None:
    """The article's walk: block 5 is freed, keeps its hash, is hit again, and cannot be evicted meanwhile."""
    pool = make_pool(8)
    request = make_request("A", range(8))
    blocks = pool.get_new_blocks(5)
    pool.cache_full_blocks(request, blocks[3:5], 0, 2, 4, 0)
    pool.free_blocks(blocks)
    assert free_ids(pool) == [6, 7, 1, 2, 3, 4, 5]
    hit = pool.get_cached_block(request.block_hashes[0], [0])
    assert hit == [pool.blocks[4]]
    pool.touch(hit)
    assert pool.blocks[4].ref_cnt == 1
    assert free_ids(pool) == [6, 7, 1, 2, 3, 5]
    pool.get_new_blocks(6)
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [pool.blocks[4]]
    assert pool.get_cached_block(request.block_hashes[1], [0]) is None


def test_pool_evicts_content_only_when_the_block_is_taken() -> None:
    pool = make_pool(3)
    request = make_request("A", range(4))
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, blocks, 0, 1, 4, 0)
    key = make_block_hash_with_group_id(request.block_hashes[0], 0)
    assert blocks[0].block_hash == key
    pool.free_blocks(blocks)
    assert pool.get_cached_block(request.block_hashes[0], [0]) == blocks
    assert ids(pool.get_new_blocks(1)) == [2]
    assert pool.get_cached_block(request.block_hashes[0], [0]) == blocks
    assert ids(pool.get_new_blocks(1)) == [1]
    assert blocks[0].block_hash is None
    assert pool.get_cached_block(request.block_hashes[0], [0]) is None
    assert len(pool.cached_block_hash_to_block) == 0


def test_pool_two_requests_compute_the_same_block() -> None:
    """The article's blocks 5 and 8: same tokens, same hash, two blocks; each is evicted on its own."""
    pool = make_pool(4)
    request = make_request("A", range(4))
    first, second = pool.get_new_blocks(1), pool.get_new_blocks(1)
    pool.cache_full_blocks(request, first, 0, 1, 4, 0)
    pool.cache_full_blocks(request, second, 0, 1, 4, 0)
    assert pool.get_cached_block(request.block_hashes[0], [0]) == first
    assert len(pool.cached_block_hash_to_block) == 1
    pool.evict_blocks({1})
    assert pool.get_cached_block(request.block_hashes[0], [0]) == second
    pool.evict_blocks({2})
    assert pool.get_cached_block(request.block_hashes[0], [0]) is None


def test_pool_caches_the_blocks_asked_for_and_passes_over_null_blocks() -> None:
    pool = make_pool(6)
    request = make_request("A", range(16))
    blocks = [pool.null_block, *pool.get_new_blocks(3)]
    pool.cache_full_blocks(request, blocks, 0, 0, 4, 0)
    assert len(pool.cached_block_hash_to_block) == 0
    pool.cache_full_blocks(request, blocks, 0, 3, 4, 0)
    assert [block.block_hash is not None for block in blocks] == [False, True, True, False]
    assert pool.get_cached_block(request.block_hashes[2], [0]) == [blocks[2]]
    pool.cache_full_blocks(request, blocks, 3, 2, 4, 0)
    with pytest.raises(AssertionError, match="The block already has a hash"):
        pool.cache_full_blocks(request, blocks, 1, 4, 4, 0)
    with pytest.raises(AssertionError, match=r"len\(block_hashes\)=4 must be at least num_full_blocks=5"):
        pool.cache_full_blocks(request, blocks, 3, 5, 4, 0)


def test_pool_hit_needs_every_group() -> None:
    pool = make_pool(4)
    request = make_request("A", range(4))
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks[:1], 0, 1, 4, kv_cache_group_id=0)
    assert pool.get_cached_block(request.block_hashes[0], [0, 1]) is None
    pool.cache_full_blocks(request, blocks[1:], 0, 1, 4, kv_cache_group_id=1)
    assert pool.get_cached_block(request.block_hashes[0], [1, 0]) == [blocks[1], blocks[0]]


def test_pool_block_size_may_be_a_multiple_of_the_hash_block_size() -> None:
    pool = make_pool(4)
    request = make_request("A", range(20))
    pool.cache_full_blocks(request, pool.get_new_blocks(2), 0, 2, block_size=8, kv_cache_group_id=0)
    hashes = request.block_hashes
    assert pool.blocks[2].block_hash == make_block_hash_with_group_id(hashes[3], 0)


@pytest.mark.parametrize(
    ("free_profile", "order"), [("classic", [5, 4, 3, 2, 1]), ("split", [4, 2, 5, 3, 1])]
)
def test_pool_free_profiles(free_profile: str, order: list[int]) -> None:
    """Freed as 4, 3, 2, 1; of these 1 and 3 are cached."""
    pool = make_pool(6, free_profile)
    request = make_request("A", range(8))
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(request, [blocks[0], blocks[2]], 0, 2, 4, 0)
    pool.free_blocks(reversed(blocks))
    assert free_ids(pool) == order


def test_pool_split_profile_without_caching_is_a_stack() -> None:
    pool = BlockPool(5, enable_caching=False, hash_block_size=4, free_profile="split")
    blocks = pool.get_new_blocks(2)
    pool.free_blocks(reversed(blocks))
    assert free_ids(pool) == [2, 1, 3, 4]


@pytest.mark.parametrize("free_profile", PROFILES)
def test_pool_leaves_the_null_block_alone(free_profile: str) -> None:
    pool = make_pool(3, free_profile)
    for _ in range(2):
        pool.touch([pool.null_block])
    for _ in range(3):
        pool.free_blocks([pool.null_block, pool.null_block])
    assert pool.null_block.ref_cnt == 0
    assert free_ids(pool) == [1, 2]


@pytest.mark.parametrize("free_profile", PROFILES)
def test_pool_block_freed_twice_in_one_call_enters_the_queue_once(free_profile: str) -> None:
    pool = make_pool(3, free_profile)
    blocks = pool.get_new_blocks(1)
    pool.touch(blocks)
    pool.free_blocks([blocks[0], blocks[0]])
    assert sorted(free_ids(pool)) == [1, 2]


def test_invariants_report_a_block_freed_too_often() -> None:
    pool = make_pool(3)
    blocks = pool.get_new_blocks(1)
    check_block_pool(pool, [blocks])
    pool.free_blocks(blocks)
    check_block_pool(pool, [])
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="ref_cnt=-1"):
        check_block_pool(pool, [])


def test_pool_evicts_by_id_and_leaves_the_block_to_its_users() -> None:
    pool = make_pool(4)
    request = make_request("A", range(8))
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 2, 4, 0)
    pool.evict_blocks({2, 3})
    assert pool.get_cached_block(request.block_hashes[1], [0]) is None
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [blocks[0]]
    assert [block.ref_cnt for block in blocks] == [1, 1]
    with pytest.raises(AssertionError, match=r"block_id=4 must be less than len\(self.blocks\)=4"):
        pool.evict_blocks({4})


def test_pool_reset_waits_for_all_users() -> None:
    pool = make_pool(4)
    request = make_request("A", range(8))
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 2, 4, 0)
    pool.free_blocks(blocks[:1])
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(request.block_hashes[0], [0]) is not None
    pool.free_blocks(blocks[1:])
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(request.block_hashes[0], [0]) is None
    assert [block.block_hash for block in pool.blocks] == [None] * 4
    assert free_ids(pool) == [3, 1, 2]


def test_pool_without_caching_keeps_the_order() -> None:
    pool = BlockPool(4, enable_caching=False, hash_block_size=4)
    blocks = pool.get_new_blocks(3)
    pool.free_blocks(reversed(blocks))
    assert ids(pool.get_new_blocks(2)) == [3, 2]


def test_pool_records_events_only_when_asked() -> None:
    pool = make_pool(3, enable_kv_cache_events=True)
    lora = SimpleNamespace(lora_name="poet")
    request = make_request("A", range(8), lora_request=lora)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 1, 4, 0)
    pool.cache_full_blocks(request, blocks, 1, 2, 4, 0)
    pool.free_blocks(blocks)
    pool.get_new_blocks(1)
    pool.free_blocks(blocks[:1])
    pool.reset_prefix_cache()
    hashes = request.block_hashes
    assert pool.take_events() == [
        BlockStored([hashes[0]], None, [0, 1, 2, 3], 4, "poet"),
        BlockStored([hashes[1]], hashes[0], [4, 5, 6, 7], 4, "poet"),
        BlockRemoved([hashes[0]]),
        AllBlocksCleared(),
    ]
    assert pool.take_events() == []
    quiet = make_pool(3)
    quiet.cache_full_blocks(request, quiet.get_new_blocks(1), 0, 1, 4, 0)
    assert quiet.take_events() == []


def test_pool_tells_the_metrics_collector() -> None:
    class Collector:
        def __init__(self) -> None:
            self.calls: list[tuple[str, int]] = []

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *blocks: self.calls.append((name, *ids(blocks)))  # type: ignore[arg-type]

    collector = Collector()
    pool = make_pool(3, metrics_collector=collector)
    blocks = pool.get_new_blocks(1)
    pool.touch([*blocks, pool.null_block])
    pool.free_blocks(blocks * 2)
    pool.reset_prefix_cache()
    assert collector.calls == [
        ("on_block_evicted", 1),
        ("on_block_allocated", 1),
        ("on_block_accessed", 1),
        ("reset",),
    ]
