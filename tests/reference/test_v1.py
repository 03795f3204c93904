"""The V1 oracle: the articles' examples, each rule by hand, and random walks through simulated memory."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference.invariants import check_block_pool
from reference.v1 import kv_cache_utils
from reference.v1.block_pool import (
    AllBlocksCleared,
    BlockHashToBlockMap,
    BlockPool,
    BlockRemoved,
    BlockStored,
)
from reference.v1.kv_cache_manager import (
    FullAttentionManager,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    SlidingWindowManager,
    SlidingWindowSpec,
)
from reference.v1.kv_cache_utils import (
    BlockHash,
    BlockHashListWithBlockSize,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    Request,
    get_block_hash,
    get_group_id,
    get_num_blocks,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    make_block_hash_with_group_id,
    sha256,
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
    spec = FullAttentionSpec(block_size, 1, 1, "half")
    if window is not None:
        spec = SlidingWindowSpec(block_size, 1, 1, "half", window)
    config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, **{"max_model_len": 1000, **options})


def make_request(name: str, tokens: Sequence[int], block_size: int = 4, **options: Any) -> Request:
    return Request(name, tokens, block_hasher=get_request_block_hasher(block_size, sha256), **options)


def prefill(manager: KVCacheManager, request: Request) -> list[int] | None:
    """Look up, allocate and compute a whole prompt. Returns the new block ids, or None without room."""
    hit_blocks, num_hit_tokens = manager.get_computed_blocks(request)
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
    check_block_pool(manager.block_pool, manager.single_type_managers[0].req_to_blocks.values())


# Blocks and hashes.


def test_block_hash_is_written_once() -> None:
    block = KVCacheBlock(3)
    key = make_block_hash_with_group_id(BlockHash(b"content"), 0)
    assert (block.ref_cnt, block.block_hash, block.is_null) == (0, None, False)
    block.block_hash = key
    with pytest.raises(AssertionError, match="The block already has a hash"):
        block.block_hash = key
    block.reset_hash()
    assert block.block_hash is None
    block.block_hash = key


def test_block_names_its_neighbours_by_id() -> None:
    blocks = [KVCacheBlock(i) for i in range(3)]
    FreeKVCacheBlockQueue(blocks)
    assert repr(blocks[1]) == (
        "KVCacheBlock(block_id=1, ref_cnt=0, _block_hash=None, prev_free_block=0, next_free_block=2)"
    )
    assert repr(KVCacheBlock(7)).endswith("prev_free_block=None, next_free_block=None)")


def test_key_packs_and_unpacks_hash_and_group() -> None:
    key = make_block_hash_with_group_id(BlockHash(b"abc"), 258)
    assert key == b"abc\x00\x00\x01\x02"
    assert (get_block_hash(key), get_group_id(key)) == (b"abc", 258)
    with pytest.raises(OverflowError):
        make_block_hash_with_group_id(BlockHash(b"abc"), -1)


def test_block_hash_depends_on_parent_tokens_and_extra_keys() -> None:
    parent = hash_block_tokens(sha256, None, [1, 2])
    variants = [
        hash_block_tokens(sha256, None, [3, 4]),
        hash_block_tokens(sha256, parent, [3, 4]),
        hash_block_tokens(sha256, parent, [4, 3]),
        hash_block_tokens(sha256, parent, [3, 4], ("salt",)),
    ]
    assert len(set(variants)) == 4
    assert hash_block_tokens(sha256, parent, (3, 4)) == variants[1]
    assert parent == sha256((kv_cache_utils.NONE_HASH, (1, 2), None))


def test_none_hash_comes_from_the_seed_or_from_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", kv_cache_utils.NONE_HASH)  # restored afterwards
    assert bytes(32) == kv_cache_utils.NONE_HASH
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    init_none_hash(sha256)
    assert sha256("17") == kv_cache_utils.NONE_HASH
    monkeypatch.delenv("PYTHONHASHSEED")
    init_none_hash(sha256)
    first = kv_cache_utils.NONE_HASH
    init_none_hash(sha256)
    assert len(first) == 32
    assert first != kv_cache_utils.NONE_HASH


def test_request_hashes_full_blocks_as_they_fill() -> None:
    request = make_request("r", range(9))
    assert len(request.block_hashes) == 2
    request.append_output_token_ids([9, 10])
    assert len(request.block_hashes) == 2
    request.append_output_token_ids(11)
    assert request.block_hashes == make_request("s", range(12)).block_hashes
    assert request.block_hashes[2] == hash_block_tokens(sha256, request.block_hashes[1], [8, 9, 10, 11])
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (12, 9, 3)
    assert request.output_token_ids == [9, 10, 11]
    assert Request("t", range(9)).block_hashes == []


def test_salt_and_lora_keep_requests_apart_from_the_first_block_on() -> None:
    lora = SimpleNamespace(lora_name="poet")
    variants: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora_request": lora},
        {"lora_request": lora, "cache_salt": "a"},
    ]
    requests = [make_request("r", range(8), **options) for options in variants]
    for index in range(2):
        assert len({request.block_hashes[index] for request in requests}) == 5
    salted = make_request("r", range(8), cache_salt="a").block_hashes
    assert salted[1] == hash_block_tokens(
        sha256, salted[0], range(4, 8)
    )  # the salt is in the first block only


def test_hashes_of_small_blocks_read_as_hashes_of_large_ones() -> None:
    small = [BlockHash(name) for name in (b"a", b"b", b"c", b"d", b"e")]
    large = BlockHashListWithBlockSize(small, hash_block_size=16, target_block_size=32)
    assert list(large) == [b"ab", b"cd"]
    assert (len(large), large[1], large[-2], large[1:]) == (2, b"cd", b"ab", [b"cd"])
    with pytest.raises(IndexError):
        large[2]
    with pytest.raises(AssertionError, match="target_block_size=24 must be a multiple of hash_block_size=16"):
        BlockHashListWithBlockSize(small, 16, 24)


def test_get_num_blocks() -> None:
    page_size = FullAttentionSpec(block_size=4, num_kv_heads=8, head_size=128, dtype="half").page_size_bytes
    assert page_size == 16_384
    assert get_num_blocks(None, num_layers=4, available_memory=65_536 * 7 + 65_535, page_size=page_size) == 7
    assert get_num_blocks(None, 4, -1, page_size) == 0


# The free queue.


def make_queue(num_blocks: int) -> tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]:
    blocks = [KVCacheBlock(i) for i in range(num_blocks)]
    return FreeKVCacheBlockQueue(blocks), blocks


def test_queue_begins_in_the_order_of_the_ids() -> None:
    queue, blocks = make_queue(3)
    assert queue.get_all_free_blocks() == blocks
    assert queue.num_free_blocks == 3
    assert queue.fake_free_list_head.next_free_block is blocks[0]
    assert queue.fake_free_list_tail.prev_free_block is blocks[2]
    assert ids([queue.popleft() for _ in range(3)]) == [0, 1, 2]
    assert queue.num_free_blocks == 0
    assert queue.fake_free_list_head.next_free_block is queue.fake_free_list_tail
    with pytest.raises(ValueError, match=r"^No free blocks available$"):
        queue.popleft()


def test_queue_of_no_blocks() -> None:
    queue, _ = make_queue(0)
    assert queue.get_all_free_blocks() == []
    queue.append(KVCacheBlock(5))
    assert queue.popleft().block_id == 5


def test_queue_popped_blocks_are_unlinked() -> None:
    queue, blocks = make_queue(4)
    assert queue.popleft_n(0) == []
    assert queue.popleft_n(3) == blocks[:3]
    assert all(block.prev_free_block is block.next_free_block is None for block in blocks[:3])
    with pytest.raises(AssertionError, match=r"n=2 must be at most self.num_free_blocks=1"):
        queue.popleft_n(2)
    assert ids(queue.get_all_free_blocks()) == [3]


def test_queue_remove_from_the_middle_and_the_ends() -> None:
    queue, blocks = make_queue(5)
    for index, rest in ((2, [0, 1, 3, 4]), (0, [1, 3, 4]), (4, [1, 3])):
        queue.remove(blocks[index])
        assert ids(queue.get_all_free_blocks()) == rest
        assert queue.num_free_blocks == len(rest)
    with pytest.raises(
        RuntimeError, match=r"remove\(\) called on an invalid block: KVCacheBlock\(block_id=2"
    ):
        queue.remove(blocks[2])
    assert queue.num_free_blocks == 2


def test_queue_append_and_prepend_keep_the_order_given() -> None:
    queue, blocks = make_queue(8)
    queue.popleft_n(8)
    queue.append(blocks[3])
    queue.append_n([blocks[5], blocks[1]])
    queue.append_n([])
    queue.prepend_n([blocks[7], blocks[0]])
    queue.prepend_n([])
    queue.prepend_n([blocks[2]])
    assert ids(queue.get_all_free_blocks()) == [2, 7, 0, 3, 5, 1]
    assert queue.num_free_blocks == 6


def test_queue_whose_links_are_broken_is_not_walked_for_ever() -> None:
    queue, blocks = make_queue(3)
    queue.prepend_n([blocks[2]])  # a block that is in the queue already: now it leads round and round
    with pytest.raises(AssertionError, match=r"self\.num_free_blocks=4 but the queue goes on"):
        queue.get_all_free_blocks()
    queue, blocks = make_queue(3)
    queue.append(blocks[0])  # and now past the others
    with pytest.raises(AssertionError, match=r"self\.num_free_blocks=4 must be len\(blocks\)=1"):
        queue.get_all_free_blocks()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["pop", "remove", "append", "prepend"]), st.integers(0, 9), st.integers(1, 3)
        )
    )
)
@settings(deadline=None)
def test_queue_is_a_list(operations: list[tuple[str, int, int]]) -> None:
    queue, blocks = make_queue(6)
    model, outside = list(blocks), []
    for name, index, count in operations:
        if name == "pop" and len(model) >= count:
            taken, model = model[:count], model[count:]
            assert queue.popleft_n(count) == taken
            outside += taken
        elif name == "remove" and model:
            block = model.pop(index % len(model))
            queue.remove(block)
            outside.append(block)
        elif name in ("append", "prepend"):
            group, outside = outside[:count], outside[count:]
            if name == "append":
                queue.append_n(group)
                model = model + group
            else:
                queue.prepend_n(group)
                model = group + model
        assert queue.get_all_free_blocks() == model
        assert queue.num_free_blocks == len(model)


# The map from hashes to blocks.


def test_map_holds_several_blocks_of_one_hash() -> None:
    cache = BlockHashToBlockMap()
    key, other = (make_block_hash_with_group_id(BlockHash(name), 0) for name in (b"k", b"o"))
    five, eight = KVCacheBlock(5), KVCacheBlock(8)
    assert cache.get_one_block(key) is None
    cache.insert(key, five)
    cache.insert(key, eight)
    assert cache.get_one_block(key) is five
    assert cache.get_all_blocks(key) == [five, eight]
    assert len(cache) == 1
    assert cache.pop(other, 5) is None
    assert cache.pop(key, 6) is None
    assert cache.pop(key, 5) is five
    assert cache.get_one_block(key) is eight
    assert cache.pop(key, 8) is eight
    assert cache.get_one_block(key) is None
    assert len(cache) == 0


def test_map_with_one_block_of_a_hash() -> None:
    cache = BlockHashToBlockMap()
    key = make_block_hash_with_group_id(BlockHash(b"k"), 0)
    five = KVCacheBlock(5)
    cache.insert(key, five)
    assert cache.pop(key, 6) is None
    assert cache.get_one_block(key) is five
    assert cache.pop(key, 5) is five
    assert len(cache) == 0


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
    assert pool.blocks[2].block_hash == make_block_hash_with_group_id(BlockHash(hashes[2] + hashes[3]), 0)


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


# The manager, full attention.


def test_manager_shares_a_prefix_in_use_and_one_that_is_free() -> None:
    """Three prompts of 3 common blocks of 16 tokens and a few of their own, in a pool of 10 blocks."""
    common = [token for token in range(3) for _ in range(16)]
    manager = make_manager(11, block_size=16)
    pool = manager.block_pool
    first = make_request("0", [*common, *[3] * 7], 16)
    assert manager.get_computed_blocks(first) == (manager.empty_kv_cache_blocks, 0)
    assert prefill(manager, first) == [1, 2, 3, 4]
    assert [pool.blocks[i].block_hash is not None for i in (1, 2, 3, 4)] == [True, True, True, False]

    second = make_request("1", [*common, *[3] * 5], 16)
    hit_blocks, num_hit_tokens = manager.get_computed_blocks(second)
    assert (hit_blocks.get_block_ids(), num_hit_tokens) == (([1, 2, 3],), 48)
    assert [pool.blocks[i].ref_cnt for i in (1, 2, 3)] == [1, 1, 1]  # looking takes nothing
    assert prefill(manager, second) == [5]
    assert [pool.blocks[i].ref_cnt for i in (1, 2, 3)] == [2, 2, 2]
    assert manager.get_block_ids("1") == ([1, 2, 3, 5],)
    assert manager.get_num_common_prefix_blocks("0") == [3]
    assert manager.usage == pytest.approx(0.5)

    manager.free(first)
    manager.free(second)
    # never used, then 4 and 5, then the prefix from its end
    assert free_ids(pool) == [6, 7, 8, 9, 10, 4, 5, 3, 2, 1]
    assert manager.get_block_ids("1") == ([],)

    third = make_request("2", [*common, *[3] * 6], 16)
    assert prefill(manager, third) == [6]
    assert free_ids(pool) == [7, 8, 9, 10, 4, 5]
    manager.free(third)
    assert prefill(manager, make_request("3", [99] * 160, 16)) == [7, 8, 9, 10, 4, 5, 6, 3, 2, 1]
    assert manager.get_computed_blocks(make_request("4", common, 16))[1] == 0
    check(manager)


def test_manager_split_profile_takes_the_partial_blocks_first() -> None:
    manager = make_manager(11, free_profile="split")
    request = make_request("0", range(15))
    prefill(manager, request)
    manager.free(request)
    assert free_ids(manager.block_pool) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
    check(manager)


def test_manager_reverse_order_keeps_the_prefix_longest() -> None:
    """Freed last block first, a prompt of 4 blocks loses its end to a newcomer and keeps its beginning."""
    manager = make_manager(5)
    first = make_request("A", range(16))
    prefill(manager, first)
    manager.free(first)
    assert free_ids(manager.block_pool) == [4, 3, 2, 1]
    newcomer = make_request("B", [99] * 8)
    assert prefill(manager, newcomer) == [4, 3]
    assert manager.get_computed_blocks(make_request("C", range(16)))[1] == 8
    check(manager)


def test_manager_leaves_at_least_one_token_to_compute() -> None:
    manager = make_manager(10)
    prefill(manager, make_request("A", range(8)))
    assert manager.get_computed_blocks(make_request("B", range(9)))[1] == 8
    assert manager.get_computed_blocks(make_request("B", range(8)))[1] == 4
    assert manager.get_computed_blocks(make_request("B", range(4)))[1] == 0


def test_manager_hit_ends_at_the_first_block_that_is_missing() -> None:
    manager = make_manager(10)
    request = make_request("A", range(13))
    prefill(manager, request)
    manager.evict_blocks({2})
    assert manager.get_computed_blocks(make_request("B", range(13)))[0].get_block_ids() == ([1],)


def test_manager_does_not_hit_without_caching_or_when_the_request_says_so() -> None:
    manager = make_manager(10)
    prefill(manager, make_request("A", range(8)))
    skipping = make_request("B", range(9), skip_reading_prefix_cache=True)
    assert manager.get_computed_blocks(skipping)[1] == 0
    assert manager.get_computed_blocks(make_request("C", range(9), cache_salt="x"))[1] == 0
    manager = make_manager(10, enable_caching=False)
    prefill(manager, make_request("A", range(8)))
    assert manager.get_computed_blocks(make_request("B", range(9)))[1] == 0
    assert len(manager.block_pool.cached_block_hash_to_block) == 0


def test_manager_caches_a_block_when_decoding_fills_it() -> None:
    manager = make_manager(10)
    request = make_request("A", range(6))
    assert prefill(manager, request) == [1, 2]
    assert [decode(manager, request, token) for token in (6, 7, 8)] == [[], [], [3]]
    assert manager.get_computed_blocks(make_request("B", range(12)))[0].get_block_ids() == ([1, 2],)
    assert manager.get_blocks("A").get_unhashed_block_ids() == [3]
    check(manager)


def test_manager_chunks_of_a_prompt_cache_what_they_compute() -> None:
    manager = make_manager(10)
    request = make_request("A", range(12))
    for num_computed, num_new, num_cached in ((0, 5, 4), (5, 2, 4), (7, 5, 8)):
        request.num_computed_tokens = num_computed
        manager.allocate_slots(request, num_new)
        assert manager.get_computed_blocks(make_request("B", range(12)))[1] == num_cached
    check(manager)


def test_manager_drafts_and_lookahead_get_room_and_are_not_cached() -> None:
    manager = make_manager(10)
    request = make_request("A", range(6))
    blocks = manager.allocate_slots(request, 6 + 3, num_lookahead_tokens=4)  # 3 drafts
    assert blocks is not None
    assert blocks.get_block_ids() == ([1, 2, 3, 4],)
    assert blocks.get_unhashed_block_ids() == [2, 3, 4]
    request.num_computed_tokens = 6
    assert decode(manager, request, 6) == []
    limited = make_manager(10, max_model_len=8)
    blocks = limited.allocate_slots(make_request("A", range(6)), 6, num_lookahead_tokens=100)
    assert blocks is not None
    assert blocks.get_block_ids() == ([1, 2],)


def test_manager_delayed_caching() -> None:
    manager = make_manager(10)
    request = make_request("A", range(8))
    manager.allocate_slots(request, 8, delay_cache_blocks=True)
    assert manager.get_computed_blocks(make_request("B", range(9)))[1] == 0
    manager.cache_blocks(request, 8)
    assert manager.get_computed_blocks(make_request("B", range(9)))[1] == 8
    check(manager)


def test_manager_returns_none_and_takes_nothing_when_blocks_do_not_suffice() -> None:
    manager = make_manager(5)
    assert prefill(manager, make_request("A", range(12))) == [1, 2, 3]
    request = make_request("B", [9] * 8)
    assert manager.allocate_slots(request, 8) is None
    assert free_ids(manager.block_pool) == [4]
    assert manager.get_num_common_prefix_blocks("A") == [3]
    assert manager.allocate_slots(request, 4) is not None
    check(manager)


def test_manager_counts_free_hits_as_blocks_needed() -> None:
    """Four blocks, all free; two are hit. A prompt of 5 blocks needs 3 more, and only 2 are left."""
    manager = make_manager(5)
    first = make_request("A", range(8))
    prefill(manager, first)
    manager.free(first)
    assert prefill(manager, make_request("B", range(20))) is None
    assert manager.block_pool.get_num_free_blocks() == 4
    assert prefill(manager, make_request("C", range(16))) == [3, 4]
    check(manager)


def test_manager_refuses() -> None:
    manager = make_manager(5)
    with pytest.raises(ValueError, match="num_new_tokens must be greater than 0"):
        manager.allocate_slots(make_request("A", range(8)), 0)
    with pytest.raises(AssertionError, match="hash_block_size=8 must be block_size=4"):
        make_manager(5, hash_block_size=8)
    with pytest.raises(NotImplementedError, match="num_groups=0 must be 1"):
        KVCacheManager(KVCacheConfig(5, [], []), max_model_len=10)
    prefill(manager, make_request("A", range(8)))
    hit_blocks, num_hit_tokens = manager.get_computed_blocks(make_request("B", range(9)))
    request = make_request("C", range(9))
    prefill(manager, request)
    with pytest.raises(AssertionError, match="only a new request can have new computed blocks"):
        manager.allocate_slots(request, 1, num_hit_tokens, hit_blocks)
    uncached = make_manager(5, enable_caching=False)
    with pytest.raises(AssertionError, match="should be empty when prefix caching is disabled"):
        uncached.allocate_slots(make_request("D", range(9)), 1, num_hit_tokens, hit_blocks)


def test_manager_free_of_an_unknown_request_is_no_error() -> None:
    manager = make_manager(5)
    manager.free(make_request("A", range(8)))
    assert manager.reset_prefix_cache()


def test_manager_preempted_request_finds_its_own_blocks_again() -> None:
    manager = make_manager(6)
    request = make_request("A", range(10))
    prefill(manager, request)
    manager.free(request)
    request.num_computed_tokens = 0
    assert manager.get_computed_blocks(request)[0].get_block_ids() == ([1, 2],)
    assert prefill(manager, request) == [4]
    check(manager)


def test_manager_reset_and_events() -> None:
    manager = make_manager(6, enable_kv_cache_events=True)
    request = make_request("A", range(4))
    prefill(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert [type(event) for event in manager.take_events()] == [BlockStored, AllBlocksCleared]


def test_blocks_add_and_list_their_ids() -> None:
    manager = make_manager(6)
    request = make_request("A", range(6))
    prefill(manager, request)
    blocks = manager.get_blocks("A")
    empty = blocks.new_empty()
    assert (blocks + blocks).get_block_ids() == ([1, 2, 1, 2],)
    assert (empty.get_block_ids(), empty.get_block_ids(allow_none=True)) == (([],), None)
    assert blocks.get_block_ids(allow_none=True) == ([1, 2],)


# The manager, sliding window.


def test_window_skips_the_tokens_before_it() -> None:
    manager = make_manager(10, window=4).single_type_managers[0]
    assert isinstance(manager, SlidingWindowManager)
    # With 7 tokens computed, the next one (number 7) attends to 4, 5, 6 and 7.
    assert [manager.get_num_skipped_tokens(n) for n in (0, 3, 4, 7)] == [0, 0, 1, 4]
    full = make_manager(10).single_type_managers[0]
    assert isinstance(full, FullAttentionManager)
    assert full.get_num_skipped_tokens(100) == 0


def test_window_replaces_skipped_blocks_by_null_blocks_and_frees_them_last_first() -> None:
    manager = make_manager(12, block_size=2, window=4)
    prefill(manager, make_request("A", range(12), 2))
    tables = {}
    for num_computed_tokens in (0, 4, 5, 6, 7, 11):
        manager.remove_skipped_blocks("A", num_computed_tokens)
        tables[num_computed_tokens] = manager.get_block_ids("A")[0]
    assert tables == {
        0: [1, 2, 3, 4, 5, 6],
        4: [1, 2, 3, 4, 5, 6],  # token 0 is out, token 1, in the same block, is not
        5: [0, 2, 3, 4, 5, 6],
        6: [0, 2, 3, 4, 5, 6],
        7: [0, 0, 3, 4, 5, 6],
        11: [0, 0, 0, 0, 5, 6],
    }
    assert free_ids(manager.block_pool) == [7, 8, 9, 10, 11, 1, 2, 4, 3]
    check(manager)


def test_window_frees_as_it_decodes() -> None:
    manager = make_manager(5, block_size=2, window=4)
    request = make_request("A", range(5), 2)
    assert prefill(manager, request) == [1, 2, 3]
    for token in range(5, 40):
        assert decode(manager, request, token) is not None
        assert sum(block_id > 0 for block_id in manager.get_block_ids("A")[0]) <= 3
        check(manager)
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 4


@pytest.mark.parametrize(
    ("cached", "hit"),
    [
        ([], []),
        ([0], [1]),
        ([0, 1], [1, 2]),
        ([0, 2], [1]),  # a run from the beginning may be shorter than the window
        ([1], []),
        ([1, 2], [0, 2, 3]),
        ([0, 1, 2], [0, 2, 3]),
        ([0, 1, 3], [1, 2]),
        ([0, 1, 3, 4], [0, 0, 0, 4, 5]),
        ([1, 2, 4], [0, 2, 3]),
    ],
)
def test_window_hit_is_the_last_run_that_fills_the_window(cached: list[int], hit: list[int]) -> None:
    """A window of 4 tokens reads 3 before the next one: 2 blocks of 2 tokens."""
    manager = make_manager(12, block_size=2, window=4)
    pool = manager.block_pool
    request = make_request("A", range(11), 2)
    blocks = pool.get_new_blocks(5)
    pool.cache_full_blocks(request, blocks, 0, 5, 2, 0)
    pool.evict_blocks({block.block_id for i, block in enumerate(blocks) if i not in cached})
    found, num_tokens = manager.get_computed_blocks(request)
    assert ids(found.blocks[0]) == hit
    assert num_tokens == 2 * len(hit)


def test_window_of_one_token_still_wants_one_block() -> None:
    manager = make_manager(12, block_size=2, window=1)
    prefill(manager, make_request("A", range(6), 2))
    assert manager.get_computed_blocks(make_request("B", range(6), 2))[0].get_block_ids() == ([0, 2],)


def test_window_hit_is_held_from_the_window_on() -> None:
    manager = make_manager(12, block_size=2, window=4)
    prefill(manager, make_request("A", range(8), 2))
    request = make_request("B", range(9), 2)
    assert prefill(manager, request) == [5]
    assert manager.get_block_ids("B") == ([0, 0, 3, 4, 5],)
    assert [manager.block_pool.blocks[i].ref_cnt for i in (0, 1, 2, 3, 4)] == [0, 1, 1, 2, 2]
    assert manager.get_num_common_prefix_blocks("B") == [0]
    manager.free(request)
    check(manager)


# Random walks.


class V1Walk(RuleBasedStateMachine):
    """Every operation on simulated memory: each request must read back what it would have computed itself.

    memory[block_id] holds what block_size tokens leave in the cache; like real K and V it depends on the
    salt and on all tokens before. A new block is wiped, so a block evicted, shared or freed wrongly shows.
    """

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(2, 14),
        window=st.sampled_from([None, None, 1, 3, 6]),
        free_profile=st.sampled_from(PROFILES),
        enable_caching=st.sampled_from([True, True, True, False]),
    )
    def build(
        self, block_size: int, num_blocks: int, window: int | None, free_profile: str, enable_caching: bool
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.manager = make_manager(
            num_blocks, block_size, window, free_profile=free_profile, enable_caching=enable_caching
        )
        self.memory: dict[int, list[object]] = {}
        self.requests: list[Request] = []
        self.num_requests = 0

    def table(self, request: Request) -> list[int]:
        return self.manager.get_block_ids(request.request_id)[0]

    def content(self, request: Request, position: int) -> object:
        return (request.cache_salt, tuple(request.all_token_ids[: position + 1]))

    def compute(self, request: Request, new_ids: list[int], num_tokens: int) -> None:
        for block_id in new_ids:
            self.memory[block_id] = [None] * self.block_size
        first = request.num_computed_tokens
        for position in range(first, first + num_tokens):
            block_id = self.table(request)[position // self.block_size]
            assert block_id != 0
            self.memory[block_id][position % self.block_size] = self.content(request, position)
        request.num_computed_tokens += num_tokens

    @rule(
        length=st.integers(1, 20),
        own=st.lists(st.integers(0, 1), max_size=2),
        salt=st.sampled_from([None, None, "a"]),
        whole=st.booleans(),
    )
    def admit(self, length: int, own: list[int], salt: str | None, whole: bool) -> None:
        tokens = [*([0, 1, 1, 0, 2] * 4)[:length], *own]
        request = make_request(str(self.num_requests), tokens, self.block_size, cache_salt=salt)
        self.num_requests += 1
        hit_blocks, num_hit_tokens = self.manager.get_computed_blocks(request)
        assert num_hit_tokens < request.num_tokens
        num_new_tokens = request.num_tokens - num_hit_tokens if whole else 1
        blocks = self.manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hit_blocks)
        if blocks is None:
            assert self.table(request) == []
            return
        request.num_computed_tokens = num_hit_tokens
        self.compute(request, ids(blocks.blocks[0]), num_new_tokens)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(0, 2))
    def grow(self, data: st.DataObject, token: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(token)
        num_tokens = data.draw(st.integers(1, request.num_tokens - request.num_computed_tokens))
        blocks = self.manager.allocate_slots(request, num_tokens, num_lookahead_tokens=token)
        if blocks is not None:
            self.compute(request, ids(blocks.blocks[0]), num_tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.manager.free(request)

    @rule(block_id=st.integers(0, 13))
    def evict(self, block_id: int) -> None:
        if block_id < len(self.manager.block_pool.blocks):
            self.manager.evict_blocks({block_id})

    @rule()
    def reset(self) -> None:
        in_use = any(block_id for request in self.requests for block_id in self.table(request))
        assert self.manager.reset_prefix_cache() == (not in_use)

    @invariant()
    def conserves_blocks(self) -> None:
        if hasattr(self, "manager"):
            check(self.manager)

    @invariant()
    def reads_back_what_it_would_compute(self) -> None:
        if not hasattr(self, "manager"):
            return
        for request in self.requests:
            num_computed = request.num_computed_tokens
            # What the next token attends to.
            first = 0 if self.window is None else max(num_computed - (self.window - 1), 0)
            for position in range(first, num_computed):
                block_id = self.table(request)[position // self.block_size]
                content = self.memory[block_id][position % self.block_size]
                assert content == self.content(request, position)


TestV1Walk = V1Walk.TestCase
TestV1Walk.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
