"""The V1 oracle: blocks, hashes, the free queue and the map from hashes to blocks."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.v1 import kv_cache_utils
from reference.v1.block_pool import (
    BlockHashToBlockMap,
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
    hash_block_tokens,
    init_none_hash,
    make_block_hash_with_group_id,
    sha256,
)
from reference.v1.specs import FullAttentionSpec
from tests.reference.v1_requests import ids, make_request

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
    assert list(large) == [b"b", b"d"]
    assert (len(large), large[1], large[-2], large[1:]) == (2, b"d", b"b", [b"d"])
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
