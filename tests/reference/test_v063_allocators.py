"""The allocators of the 0.6.3 oracle: walk-throughs and edges."""

import itertools

import pytest

from reference.v063.allocator import NaiveBlockAllocator
from reference.v063.block import Block, NoFreeBlocksError, blocks_up_to
from reference.v063.evictor import Evictable, LRUEvictor
from reference.v063.prefix_caching import PrefixCachingBlockAllocator

BOTH = pytest.mark.parametrize("allocator_of", [NaiveBlockAllocator, PrefixCachingBlockAllocator])
FOUR = [1, 2, 3, 4]
FIVE_TO_EIGHT = [5, 6, 7, 8]


def naive(num_blocks, block_size=4, first_id=0):
    return NaiveBlockAllocator(range(first_id, first_id + num_blocks), block_size)


def caching(num_blocks, block_size=4, first_id=0):
    return PrefixCachingBlockAllocator(range(first_id, first_id + num_blocks), block_size)


def ids(blocks):
    return [block.block_id for block in blocks]


def full_blocks(allocator, *chunks):
    blocks = []
    for chunk in chunks:
        blocks.append(allocator.allocate_immutable_block(blocks[-1] if blocks else None, chunk))
    return blocks


def part_block(allocator, prev_block, token_ids):
    block = allocator.allocate_mutable_block(prev_block)
    allocator.append_token_ids(block, token_ids)
    return block


def counts(allocator):
    return list(allocator.ref_counts.values())


# Blocks.


def test_blocks_of_a_sequence_first_to_last_however_long():
    block = None
    for _ in range(3000):
        block = Block(block, [], 1)
    blocks = blocks_up_to(block)
    assert (len(blocks), blocks[-1], blocks[0].prev_block) == (3000, block, None)
    assert all(after.prev_block is before for before, after in itertools.pairwise(blocks))


def test_block_refuses_more_tokens_than_fit():
    block = Block(None, [1, 2, 3], 4)
    assert not block.is_full
    with pytest.raises(AssertionError, match="must be at most"):
        block.write([4, 5])
    block.write([4])
    assert block.is_full


def test_content_hash_chains_full_blocks():
    first = Block(None, FOUR, 4)
    second = Block(first, FOUR, 4)
    assert first.content_hash == hash((True, None, *FOUR))
    assert second.content_hash == hash((False, first.content_hash, *FOUR))
    part = Block(None, [1, 2, 3], 4)
    after = Block(part, FOUR, 4)
    assert (part.content_hash, after.content_hash) == (None, None)
    part.write([4])
    assert (part.content_hash, after.content_hash) == (first.content_hash, second.content_hash)


# The naive allocator.


def test_naive_ids_come_lowest_first_and_return_to_the_head():
    allocator = naive(4)
    blocks = [allocator.allocate_mutable_block(None) for _ in range(4)]
    assert ids(blocks) == [0, 1, 2, 3]
    for i in (1, 3):
        allocator.free(blocks[i])
        assert blocks[i].block_id is None
    assert allocator.num_free_blocks == 2
    assert [allocator.allocate_mutable_block(None).block_id for _ in range(2)] == [3, 1]
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_mutable_block(None)
    assert issubclass(NoFreeBlocksError, ValueError)


def test_naive_fork_shares_ids_and_counts():
    allocator = naive(4)
    [first] = full_blocks(allocator, FOUR)
    last = part_block(allocator, first, [5])
    forked = allocator.fork(last)
    assert ids(forked) == [0, 1]
    assert [block.token_ids for block in forked] == [FOUR, [5]]
    assert (forked[0].prev_block, forked[1].prev_block) == (None, forked[0])
    assert counts(allocator) == [2, 2, 0, 0]
    for block in (first, last):
        allocator.free(block)
    assert counts(allocator) == [1, 1, 0, 0]
    with pytest.raises(AssertionError, match="freed"):
        allocator.fork(last)


@BOTH
def test_copy_on_write_drops_then_takes_then_notes(allocator_of):
    allocator = allocator_of(range(4), 4)
    block = part_block(allocator, None, [1])
    [forked] = allocator.fork(block)
    allocator.free(allocator.allocate_mutable_block(None))  # id 1 returns to the head
    allocator.append_token_ids(forked, [2])
    assert (block.block_id, forked.block_id, counts(allocator)) == (0, 1, [1, 1, 0, 0])
    allocator.append_token_ids(block, [3])  # the last holder writes in place
    assert block.block_id == 0
    assert [allocator.take_copies() for _ in range(2)] == [[(0, 1)], []]
    assert (block.token_ids, forked.token_ids) == ([1, 3], [1, 2])


@BOTH
def test_copy_on_write_without_a_free_block(allocator_of):
    allocator = allocator_of(range(1), 4)
    block = allocator.allocate_mutable_block(None)
    [forked] = allocator.fork(block)
    with pytest.raises(NoFreeBlocksError):
        allocator.append_token_ids(forked, [1])
    # The reference was dropped before a new id was asked for, and nothing was noted.
    assert (block.block_id, forked.block_id, counts(allocator)) == (0, None, [1])
    assert allocator.take_copies() == []


def test_naive_swap_out_and_in():
    device, host = naive(4), naive(4, first_id=4)
    blocks = full_blocks(device, FOUR)
    blocks.append(part_block(device, blocks[0], [5]))
    device.swap_out(blocks)
    assert ids(blocks) == [None, None]
    assert list(device.free_ids) == [1, 0, 2, 3]  # the last one freed stands first
    host.swap_in(blocks)
    assert ids(blocks) == [4, 5]
    assert [block.token_ids for block in blocks] == [FOUR, [5]]
    host.swap_out(blocks)
    device.swap_in(blocks)
    assert ids(blocks) == [1, 0]
    assert list(host.free_ids) == [5, 4, 6, 7]


def test_naive_full_blocks_touched_counts_objects_not_ids():
    allocator = naive(6)
    blocks = full_blocks(allocator, FOUR, FOUR, FOUR)
    part = part_block(allocator, blocks[-1], [0])
    assert allocator.num_full_blocks_touched([*blocks, part, blocks[0]]) == 3
    assert allocator.num_full_blocks_touched(blocks + allocator.fork(part)) == 6
    assert allocator.hit_rate == -1


# Eviction.


def evictor_of(*entries):
    evictor = LRUEvictor()
    evictor.table = {i: Evictable(100 + i, num_tokens, time) for i, num_tokens, time in entries}
    return evictor


@pytest.mark.parametrize(
    ("entries", "order"),
    [
        # The oldest, of these the deepest, of these the first.
        ([(1, 4, 0.0), (2, 12, 0.0), (3, 12, 0.0), (4, 99, 2.0)], [2, 3, 1, 4]),
        # An older block behind a younger one is not found.
        ([(0, 4, 1.0), (1, 4, 2.0), (2, 8, 0.0)], [0, 2, 1]),
    ],
)
def test_lru_evictor_oldest_then_deepest_then_first(entries, order):
    evictor = evictor_of(*entries)
    assert [evictor.evict() for _ in order] == [(i, 100 + i) for i in order]


# Prefix caching.


def test_blocks_that_become_full_alike_share_an_id():
    allocator = caching(4)
    blocks = [part_block(allocator, None, [1, 2, 3]) for _ in range(3)]
    assert ids(blocks) == [0, 1, 2]
    for block in blocks:
        allocator.append_token_ids(block, [4])
    assert (ids(blocks), counts(allocator), list(allocator.free_ids)) == ([0, 0, 0], [3, 0, 0, 0], [2, 1, 3])
    with pytest.raises(AssertionError, match="immutable"):
        allocator.append_token_ids(blocks[0], [5])


def test_an_immutable_block_must_be_full():
    with pytest.raises(AssertionError, match="must be full"):
        caching(4).allocate_immutable_block(None, [1])


def test_a_block_that_becomes_full_after_a_copy_returns_the_copy():
    allocator = caching(4)
    block = part_block(allocator, None, [1, 2, 3])
    [forked] = allocator.fork(block)
    allocator.append_token_ids(forked, [4])  # id 1, full and findable
    allocator.append_token_ids(block, [4])  # alone on id 0; its twin is id 1
    assert (ids([block, forked]), counts(allocator)) == ([1, 1], [0, 2, 0, 0])
    assert allocator.take_copies() == [(0, 1)]


def test_freed_full_blocks_stay_findable_until_evicted():
    allocator = caching(3)
    for block in full_blocks(allocator, FOUR, FIVE_TO_EIGHT):
        allocator.free(block)
    assert (allocator.num_free_blocks, list(allocator.evictor.table)) == (3, [0, 1])
    assert ids(full_blocks(allocator, FOUR)) == [0]
    assert (counts(allocator), list(allocator.evictor.table)) == ([1, 0, 0], [1])
    # The one free id goes first, then the evictor's.
    assert [allocator.allocate_mutable_block(None).block_id for _ in range(2)] == [2, 1]
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_mutable_block(None)
    assert list(allocator.cached_ids.values()) == [0]


def test_eviction_of_the_least_recent_and_its_hash():
    allocator = caching(3, block_size=1)
    for token_id, now in ((7, 3.0), (8, 1.0), (9, 2.0)):
        [block] = full_blocks(allocator, [token_id])
        allocator.mark_blocks_as_accessed([block.block_id], now)
        allocator.free(block)
    # Each allocation took a free id rather than evict one.
    assert list(allocator.evictor.table) == [0, 1, 2]
    allocator.mark_blocks_as_accessed([0], 0.5)
    assert allocator.allocate_mutable_block(None).block_id == 0
    assert sorted(allocator.cached_ids.values()) == [1, 2]
    # 7 is forgotten: found no more, it evicts the next, which is 8.
    assert [full_blocks(allocator, [token_id])[0].block_id for token_id in (7, 9)] == [1, 2]


def test_deeper_blocks_of_a_sequence_go_first():
    allocator = caching(3, block_size=1)
    for block in full_blocks(allocator, [1], [2], [3]):
        allocator.free(block)
    assert [allocator.allocate_mutable_block(None).block_id for _ in range(3)] == [2, 1, 0]


def test_a_block_that_is_not_full_returns_to_the_free_queue():
    allocator = caching(3)
    block = part_block(allocator, None, [1, 2, 3])
    [forked] = allocator.fork(block)
    allocator.free(block)
    assert list(allocator.free_ids) == [1, 2]
    allocator.free(forked)
    assert (list(allocator.free_ids), allocator.evictor.table) == ([0, 1, 2], {})
    with pytest.raises(KeyError):
        allocator.mark_blocks_as_accessed([0], 1.0)


def test_blocks_are_computed_once_marked_or_in_the_evictor():
    allocator = caching(5, block_size=1)
    full_blocks(allocator, [1], [2], [3])
    computed = [[allocator.is_computed(i) for i in allocator.block_ids]]
    allocator.mark_blocks_as_computed()
    [fresh] = full_blocks(allocator, [9])
    computed.append([allocator.is_computed(i) for i in allocator.block_ids])
    allocator.free(fresh)
    computed.append([allocator.is_computed(i) for i in allocator.block_ids])
    assert computed == [[False] * 5, [True] * 3 + [False] * 2, [True] * 4 + [False]]


def test_a_mark_counts_for_what_became_full_before_it_only():
    allocator = caching(1, block_size=2)
    [block] = full_blocks(allocator, [1, 2])
    allocator.mark_blocks_as_computed()
    allocator.free(block)
    allocator.allocate_mutable_block(None)  # evicts the block: id 0 is empty now
    allocator.mark_blocks_as_computed()
    assert not allocator.is_computed(0)


def test_prefix_caching_full_blocks_touched():
    device, host = caching(4), caching(4, first_id=4)
    blocks = full_blocks(device, FOUR, FIVE_TO_EIGHT)
    touched = [host.num_full_blocks_touched(blocks)]  # not found
    twins = full_blocks(host, FOUR, FIVE_TO_EIGHT)
    touched.append(host.num_full_blocks_touched(blocks))  # found and in use
    host.free(twins[1])
    part = part_block(device, blocks[-1], [9])
    touched.append(host.num_full_blocks_touched([*blocks, part]))  # found, but counted as free till now
    assert touched == [2, 0, 1]


def test_prefix_caching_swap_finds_what_is_there():
    device, host = caching(4), caching(4, first_id=4)
    blocks = full_blocks(device, FOUR, FIVE_TO_EIGHT)
    for source, target, expected in ((device, host, [4, 5]), (host, device, [0, 1])):  # 0 and 1 still cached
        source.swap_out(blocks)
        target.swap_in(blocks)
        assert ids(blocks) == expected
    assert (counts(device), device.evictor.table) == ([1, 1, 0, 0], {})
