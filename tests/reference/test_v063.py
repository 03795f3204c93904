"""The 0.6.3 oracle: walk-throughs, edges, and random histories over a memory simulated beside it."""

import copy
import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference.v063.block_manager import BlockSpaceManagerV2, SelfAttnBlockSpaceManager
from reference.v063.block_table import BlockTable
from reference.v063.common import (
    BlockList,
    BlockPool,
    CacheMetricData,
    CopyOnWriteTracker,
    RefCounter,
    get_all_blocks_recursively,
)
from reference.v063.cpu_gpu_block_allocator import CpuGpuBlockAllocator, NullBlock
from reference.v063.evictor import LRUEvictor, make_evictor
from reference.v063.interfaces import AllocStatus, BlockAllocator, Device
from reference.v063.naive_block import NaiveBlock, NaiveBlockAllocator
from reference.v063.prefix_caching_block import (
    NEVER_ACCESSED,
    ComputedBlocksTracker,
    LastAccessBlocksTracker,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
)
from reference.v063.sequence import Sequence, SequenceGroup, SequenceStatus

ALLOCATOR_TYPES = ["naive", "prefix_caching"]
NoFreeBlocksError = BlockAllocator.NoFreeBlocksError


def naive(num_blocks, block_size=4, **kwargs):
    return NaiveBlockAllocator(NaiveBlock, num_blocks, block_size, **kwargs)


def caching(num_blocks, block_size=4, **kwargs):
    return PrefixCachingBlockAllocator(num_blocks, block_size, **kwargs)


def ids(blocks):
    return [block.block_id for block in blocks]


def count(allocator, block_id):
    return allocator._refcounter.get(block_id)


# Reference counts and copies to make.


def test_ref_counter_counts_and_refuses():
    counter = RefCounter([3, 5])
    assert [counter.incr(3), counter.incr(3), counter.get(3), counter.get(5)] == [1, 2, 2, 0]
    assert [counter.decr(3), counter.decr(3)] == [1, 0]
    for refused in (counter.decr, counter.get, counter.incr):
        with pytest.raises(AssertionError, match="block_id"):
            refused(3 if refused == counter.decr else 4)


def test_readonly_ref_counter_follows_and_refuses():
    counter = RefCounter([0])
    view = counter.as_readonly()
    counter.incr(0)
    assert view.get(0) == 1
    with pytest.raises(ValueError, match="a read-only counter cannot incr"):
        view.incr(0)
    with pytest.raises(ValueError, match="a read-only counter cannot decr"):
        view.decr(0)
    assert counter.get(0) == 1


def test_cow_tracker_lets_only_a_sole_holder_append():
    allocator = naive(2)
    tracker = CopyOnWriteTracker(allocator.refcounter.as_readonly())
    block = allocator.allocate_mutable_block(None)
    assert tracker.is_appendable(block)
    allocator.fork(block)
    assert not tracker.is_appendable(block)
    block.block_id = None
    assert tracker.is_appendable(block)


def test_cow_tracker_gives_each_pair_once_in_order():
    tracker = CopyOnWriteTracker(RefCounter([0]))
    tracker.record_cow(4, 2)
    tracker.record_cow(1, 3)
    assert tracker.clear_cows() == [(4, 2), (1, 3)]
    assert tracker.clear_cows() == []
    with pytest.raises(AssertionError):
        tracker.record_cow(None, 1)


# Block objects.


def test_block_pool_hands_out_in_order_and_reuses_the_last_first():
    allocator = naive(1)
    pool = BlockPool(4, NaiveBlock, allocator, 3)
    a, b = (pool.init_block(None, [], 4, block_id) for block_id in (7, 8))
    assert [a.pool_id, b.pool_id] == [0, 1]
    pool.free_block(a)
    again = pool.init_block(b, [1, 2], 4, 9)
    assert again is a
    assert (again.block_id, again.token_ids, again.prev_block) == (9, [1, 2], b)


def test_block_pool_doubles_when_it_is_empty():
    pool = BlockPool(4, NaiveBlock, naive(1), 2)
    blocks = [pool.init_block(None, [], 4, None) for _ in range(2)]
    assert len(pool._pool) == 2
    blocks += [pool.init_block(None, [], 4, None) for _ in range(3)]
    assert len(pool._pool) == 8
    assert [block.pool_id for block in blocks] == [0, 1, 2, 3, 4]
    assert list(pool._free_ids) == [5, 6, 7]
    with pytest.raises(AssertionError, match="size 0"):
        BlockPool(4, NaiveBlock, naive(1), 0).init_block(None, [], 4, None)


@pytest.mark.parametrize("allocator_type", ALLOCATOR_TYPES)
def test_block_objects_of_a_swapped_sequence_go_home(allocator_type):
    # The GPU's pool has more objects than the host's: in the wrong pool the numbers would name nothing.
    allocator = CpuGpuBlockAllocator.create(allocator_type, num_gpu_blocks=8, num_cpu_blocks=2, block_size=4)
    pools = [allocator._allocators[device]._block_pool for device in (Device.GPU, Device.CPU)]
    table = BlockTable(4, allocator)
    table.allocate(list(range(8)))
    for _ in range(6):
        allocator.allocate_mutable_block(None, Device.GPU)
    allocator.swap(table.blocks, Device.GPU, Device.CPU)
    table.free()
    assert [sorted(pool._free_ids) for pool in pools] == [[0, 1, *range(8, 32)], list(range(8))]


def test_blocks_of_a_sequence_first_to_last_however_long():
    block = None
    for _ in range(3000):
        block = NaiveBlock(block, [], 1, naive(1))
    blocks = get_all_blocks_recursively(block)
    assert len(blocks) == 3000
    assert blocks[-1] is block
    assert blocks[0].prev_block is None
    assert all(b.prev_block is a for a, b in itertools.pairwise(blocks))


def test_block_list_keeps_ids_in_step():
    allocator = naive(6)
    a, b = (allocator.allocate_mutable_block(None) for _ in range(2))
    blocks = BlockList([a, b])
    allocator.fork(a)
    blocks.append_token_ids(0, [1])  # shared: moves to id 2
    assert (blocks.ids(), len(blocks), blocks[0]) == ([2, 1], 2, a)
    c = allocator.allocate_mutable_block(None)
    blocks.append(c)
    blocks[1] = c
    assert (blocks.ids(), blocks.list()) == ([2, 3, 3], [a, c, c])
    allocator.free(b)
    with pytest.raises(AssertionError):
        blocks.append(b)
    blocks.reset()
    assert (blocks.ids(), blocks.list()) == ([], [])


def test_cache_metric_over_whole_and_broken_groups():
    metric = CacheMetricData(block_size=4)
    assert metric.get_hit_rate() == 0.0
    hits = [True, False, True, True, False, False, False, True, True, True]
    for n, hit in enumerate(hits, start=1):
        metric.query(hit)
        assert metric.get_hit_rate() == pytest.approx(sum(hits[:n]) / n)
    assert (metric.num_completed_blocks, metric.num_incompleted_block_queries) == (2, 2)


# The naive allocator.


def test_naive_ids_come_lowest_first_and_return_to_the_head():
    allocator = naive(4)
    blocks = [allocator.allocate_mutable_block(None) for _ in range(4)]
    assert ids(blocks) == [0, 1, 2, 3]
    for i in (1, 3):
        allocator.free(blocks[i])
        assert blocks[i].block_id is None
    assert allocator.get_num_free_blocks() == 2
    assert [allocator.allocate_mutable_block(None).block_id for _ in range(2)] == [3, 1]


def test_naive_out_of_blocks():
    allocator = naive(2)
    for _ in range(2):
        allocator.allocate_immutable_block(None, [1, 2, 3, 4])
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_mutable_block(None)
    assert issubclass(NoFreeBlocksError, ValueError)


def test_naive_blocks_at_once_lose_their_ids_if_they_do_not_suffice():
    allocator = naive(2)
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_immutable_blocks(None, [[1, 2, 3, 4]] * 3)
    assert allocator.get_num_free_blocks() == 0


def test_naive_own_ids_in_the_order_given():
    allocator = naive(3, block_ids=[12, 10, 11])
    assert ids(allocator.allocate_immutable_blocks(None, [[1, 2, 3, 4]] * 3)) == [12, 10, 11]
    assert allocator.all_block_ids == {10, 11, 12}
    assert [allocator.get_physical_block_id(block_id) for block_id in (10, 11, 12)] == [0, 1, 2]
    assert allocator.get_num_total_blocks() == 3
    with pytest.raises(AssertionError, match="num_blocks=3"):
        naive(3, block_ids=[1, 1, 2])


def test_naive_fork_shares_ids_and_counts():
    allocator = naive(4)
    first = allocator.allocate_immutable_block(None, [1, 2, 3, 4])
    last = allocator.allocate_mutable_block(first)
    last.append_token_ids([5])
    forked = allocator.fork(last)
    assert ids(forked) == [0, 1]
    assert [block.token_ids for block in forked] == [[1, 2, 3, 4], [5]]
    assert (forked[0].prev_block, forked[1].prev_block) == (None, forked[0])
    assert [count(allocator, i) for i in range(4)] == [2, 2, 0, 0]
    for block in (first, last):
        allocator.free(block)
    assert [count(allocator, i) for i in range(4)] == [1, 1, 0, 0]
    assert allocator.get_num_free_blocks() == 2
    with pytest.raises(AssertionError, match="freed"):
        allocator.fork(last)


@pytest.mark.parametrize("allocator_of", [naive, caching])
def test_copy_on_write_drops_then_takes_then_records(allocator_of):
    allocator = allocator_of(4)
    block = allocator.allocate_mutable_block(None)
    block.append_token_ids([1])
    (forked,) = allocator.fork(block)
    spare = allocator.allocate_mutable_block(None)
    allocator.free(spare)  # id 1 returns to the head

    forked.append_token_ids([2])
    assert (block.block_id, forked.block_id) == (0, 1)
    assert [count(allocator, i) for i in range(3)] == [1, 1, 0]
    block.append_token_ids([3])  # the last holder writes in place
    assert block.block_id == 0
    assert allocator.clear_copy_on_writes() == [(0, 1)]
    assert allocator.clear_copy_on_writes() == []
    assert (block.token_ids, forked.token_ids) == ([1, 3], [1, 2])


@pytest.mark.parametrize("allocator_of", [naive, caching])
def test_copy_on_write_without_a_free_block(allocator_of):
    allocator = allocator_of(1)
    block = allocator.allocate_mutable_block(None)
    (forked,) = allocator.fork(block)
    with pytest.raises(NoFreeBlocksError):
        forked.append_token_ids([1])
    # The reference was dropped before a new id was asked for, and nothing was recorded.
    assert (block.block_id, forked.block_id, count(allocator, 0)) == (0, None, 1)
    assert allocator.clear_copy_on_writes() == []


def test_naive_swap_out_and_in():
    device, host = naive(4), naive(4, block_ids=range(4, 8))
    full = device.allocate_immutable_block(None, [1, 2, 3, 4])
    part = device.allocate_mutable_block(full)
    part.append_token_ids([5])
    blocks = [full, part]
    device.swap_out(blocks)
    assert ids(blocks) == [None, None]
    assert list(device._free_block_indices) == [1, 0, 2, 3]  # the last one freed stands first
    host.swap_in(blocks)
    assert ids(blocks) == [4, 5]
    assert [block.token_ids for block in blocks] == [[1, 2, 3, 4], [5]]
    host.swap_out(blocks)
    device.swap_in(blocks)
    assert ids(blocks) == [1, 0]
    assert list(host._free_block_indices) == [5, 4, 6, 7]


def test_naive_full_blocks_touched_counts_objects_not_ids():
    allocator = naive(6)
    blocks = allocator.allocate_immutable_blocks(None, [[1, 2, 3, 4]] * 3)
    assert allocator.get_num_full_blocks_touched(blocks) == 3
    part = allocator.allocate_mutable_block(blocks[-1])
    part.append_token_ids([0])
    assert allocator.get_num_full_blocks_touched([*blocks, part, blocks[0]]) == 3
    forked = allocator.fork(part)
    assert allocator.get_num_full_blocks_touched(blocks + forked) == 6
    part.append_token_ids([0] * 3)
    assert allocator.get_num_full_blocks_touched([*blocks, part]) == 4


def test_naive_knows_no_prefix_cache():
    allocator = naive(2)
    block = allocator.allocate_immutable_block(None, [1, 2, 3, 4])
    allocator.mark_blocks_as_accessed([0], 1.0)
    allocator.mark_blocks_as_computed([0])
    assert allocator.get_computed_block_ids([], [0, 1], True) == []
    assert allocator.get_common_computed_block_ids([[0], [0]]) == []
    assert allocator.get_prefix_cache_hit_rate() == -1
    assert block.content_hash is None
    with pytest.raises(NotImplementedError):
        allocator.promote_to_immutable_block(block)
    for name in ("computed", "last_accessed", "num_tokens_total"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(block, name)


def test_block_refuses_more_tokens_than_fit():
    block = NaiveBlock(None, [1, 2, 3], 4, naive(1))
    assert (block.num_empty_slots, block.is_full, block.mutable) == (1, False, True)
    with pytest.raises(AssertionError, match="must be at most"):
        block.append_token_ids([4, 5])
    block.append_token_ids([4])
    assert (block.num_empty_slots, block.is_full, block.mutable) == (0, True, False)


# Eviction.


def test_lru_evictor_oldest_then_deepest_then_first():
    evictor = make_evictor_with([(1, 4, 0.0), (2, 12, 0.0), (3, 12, 0.0), (4, 99, 2.0)])
    assert [evictor.evict()[0] for _ in range(4)] == [2, 3, 1, 4]
    with pytest.raises(ValueError, match="there is no block to evict"):
        evictor.evict()


def make_evictor_with(entries):
    evictor = LRUEvictor()
    for block_id, num_hashed_tokens, last_accessed in entries:
        evictor.add(block_id, 100 + block_id, num_hashed_tokens, last_accessed)
    return evictor


def test_lru_evictor_searches_in_the_order_of_adding():
    # An older block behind a younger one is not found; one behind an equally old one is.
    evictor = make_evictor_with([(0, 4, 1.0), (1, 4, 2.0), (2, 8, 0.0)])
    assert evictor.evict() == (0, 100)
    evictor.update(1, 0.0)
    assert (1 in evictor, evictor.num_blocks) == (True, 2)
    evictor.remove(1)
    assert evictor.evict() == (2, 102)
    with pytest.raises(ValueError, match="not in the evictor"):
        evictor.remove(2)
    with pytest.raises(ValueError, match="eviction_policy=None"):
        make_evictor(None)


# Prefix caching.


def test_content_hash_chains():
    allocator = caching(8)
    first, second, third = allocator.allocate_immutable_blocks(None, [[1, 2, 3, 4]] * 3)
    expected = PrefixCachingBlock.hash_block_tokens(True, None, [1, 2, 3, 4])
    assert first.content_hash == expected
    assert second.content_hash == PrefixCachingBlock.hash_block_tokens(False, expected, [1, 2, 3, 4])
    assert (first.num_tokens_total, second.num_tokens_total) == (4, 8)
    assert ids([first, second, third]) == [0, 1, 2]  # same tokens, another history
    with pytest.raises(AssertionError):
        PrefixCachingBlock.hash_block_tokens(True, expected, [1])


def test_no_hash_while_a_block_or_one_before_it_is_not_full():
    allocator = caching(8)
    first = allocator.allocate_mutable_block(None)
    first.append_token_ids([1, 2, 3])
    second = allocator.allocate_mutable_block(first)
    second.append_token_ids([5, 6, 7, 8])
    assert (first.content_hash, second.content_hash) == (None, None)
    first.append_token_ids([4])
    assert first.content_hash is not None
    assert second.content_hash is not None  # asked for again, it can now be formed


def test_same_prompt_shares_ids_of_full_blocks():
    allocator = CpuGpuBlockAllocator.create("prefix_caching", 8, 0, 4)
    tables = [BlockTable(4, allocator) for _ in range(3)]
    tables[0].allocate([1, 2, 3, 4, 5, 6, 7, 8, 9])
    tables[1].allocate([1, 2, 3, 4, 5, 6, 7, 8, 9])
    tables[2].allocate([1, 2, 3, 4, 6, 6, 7, 8])
    assert [table.physical_block_ids for table in tables] == [[0, 1, 2], [0, 1, 3], [0, 4]]
    gpu = allocator._allocators[Device.GPU]
    assert [count(gpu, i) for i in range(6)] == [3, 2, 1, 1, 1, 0]
    # The second sequence fills its last block like the first one, which has filled its own: they become one.
    tables[0].append_token_ids([10, 11, 12])
    tables[1].append_token_ids([10, 11, 12])
    assert tables[1].physical_block_ids == [0, 1, 2]
    assert gpu._hashless_allocator._free_block_indices[0] == 3
    # Of the 6 full blocks in the three prompts, 3 were found: 0 and 1 of the second, 0 of the third.
    assert allocator.get_prefix_cache_hit_rate(Device.GPU) == pytest.approx(3 / 6)
    assert allocator.get_prefix_cache_hit_rate(Device.CPU) == 0.0


def test_promotion_twice():
    allocator = caching(4)
    blocks = [allocator.allocate_mutable_block(None) for _ in range(3)]
    for block in blocks:
        block.append_token_ids([1, 2, 3])
    assert ids(blocks) == [0, 1, 2]
    for block in blocks:
        block.append_token_ids([4])
    assert ids(blocks) == [0, 0, 0]
    assert [count(allocator, i) for i in range(4)] == [3, 0, 0, 0]
    assert list(allocator._hashless_allocator._free_block_indices) == [2, 1, 3]
    assert [block.computed for block in blocks] == [False, True, True]
    with pytest.raises(AssertionError, match="immutable"):
        blocks[0].append_token_ids([5])


def test_promotion_after_copy_on_write_returns_the_copy():
    allocator = caching(4)
    block = allocator.allocate_mutable_block(None)
    block.append_token_ids([1, 2, 3])
    (forked,) = allocator.fork(block)
    forked.append_token_ids([4])  # id 1, full and findable
    block.append_token_ids([4])  # alone on id 0; its twin is id 1
    assert (block.block_id, forked.block_id) == (1, 1)
    assert allocator.clear_copy_on_writes() == [(0, 1)]
    assert [count(allocator, i) for i in range(4)] == [0, 2, 0, 0]


def test_freed_full_blocks_stay_findable_until_evicted():
    allocator = caching(3)
    a, b = allocator.allocate_immutable_blocks(None, [[1, 2, 3, 4], [5, 6, 7, 8]])
    allocator.mark_blocks_as_accessed([0, 1], 5.0)
    for block in (a, b):
        allocator.free(block)
    assert (allocator.get_num_free_blocks(), allocator.evictor.num_blocks) == (3, 2)
    found = allocator.allocate_immutable_block(None, [1, 2, 3, 4])
    assert (found.block_id, found.computed, count(allocator, 0)) == (0, True, 1)
    assert 0 not in allocator.evictor
    # The one free id goes first, then the evictor's.
    assert [allocator.allocate_mutable_block(None).block_id for _ in range(2)] == [2, 1]
    with pytest.raises(NoFreeBlocksError):
        allocator.allocate_mutable_block(None)
    assert list(allocator._cached_blocks.values()) == [0]


def test_eviction_of_the_least_recent_and_its_hash():
    allocator = caching(3, block_size=1)
    for token_id, now in ((7, 3.0), (8, 1.0), (9, 2.0)):
        block = allocator.allocate_immutable_block(None, [token_id])
        allocator.mark_blocks_as_accessed([block.block_id], now)
        allocator.free(block)
    # Each allocation took a free id rather than evict one.
    assert list(allocator.evictor.free_table) == [0, 1, 2]
    allocator.evictor.update(0, 0.5)
    assert allocator.allocate_mutable_block(None).block_id == 0
    assert sorted(allocator._cached_blocks.values()) == [1, 2]
    # 7 is forgotten: found no more, it evicts the next, which is 8.
    assert allocator.allocate_immutable_block(None, [7]).block_id == 1
    assert allocator.allocate_immutable_block(None, [9]).block_id == 2


def test_deeper_blocks_of_a_sequence_go_first():
    allocator = caching(3, block_size=1)
    blocks = allocator.allocate_immutable_blocks(None, [[1], [2], [3]])
    for block in blocks:
        allocator.free(block)
    assert [allocator.allocate_mutable_block(None).block_id for _ in range(3)] == [2, 1, 0]


def test_a_block_that_is_not_full_returns_to_the_free_queue():
    allocator = caching(3)
    block = allocator.allocate_mutable_block(None)
    block.append_token_ids([1, 2, 3])
    (forked,) = allocator.fork(block)
    allocator.free(block)
    assert allocator._block_tracker[0].active
    allocator.free(forked)
    assert not allocator._block_tracker[0].active
    assert list(allocator._hashless_allocator._free_block_indices) == [0, 1, 2]
    assert allocator.evictor.num_blocks == 0
    with pytest.raises(ValueError, match="neither in use nor cached"):
        allocator.mark_blocks_as_accessed([0], 1.0)


def test_blocks_are_computed_once_marked_or_in_the_evictor():
    allocator = caching(6, block_size=1)
    blocks = allocator.allocate_immutable_blocks(None, [[1], [2], [3]])
    assert allocator.get_computed_block_ids([], [0, 1, 2]) == []
    allocator.mark_blocks_as_computed([])
    assert allocator.get_computed_block_ids([], [0, 1, 2]) == [0, 1]
    assert allocator.get_computed_block_ids([0], [0, 1, 2], skip_last_block_id=False) == [0, 1, 2]
    fresh = allocator.allocate_immutable_block(None, [9])
    # A gap does not end the search.
    assert allocator.get_computed_block_ids([], [0, fresh.block_id, 2], skip_last_block_id=False) == [0, 2]
    allocator.free(fresh)
    assert allocator.block_is_computed(3)
    assert not allocator.block_is_computed(5)
    assert [allocator.is_block_cached(block) for block in blocks] == [True] * 3


def test_a_mark_counts_for_what_became_full_before_it_only():
    allocator = caching(1, block_size=2)
    block = allocator.allocate_immutable_block(None, [1, 2])
    allocator.mark_blocks_as_computed([0])
    allocator.free(block)
    allocator.allocate_mutable_block(None)  # evicts the block: id 0 is empty now
    allocator.mark_blocks_as_computed([0])
    assert not allocator.block_is_computed(0)


def test_common_computed_blocks():
    common = caching(1).get_common_computed_block_ids
    assert common([[1, 2, 3], [1, 2, 4], [1, 2]]) == [1, 2]
    assert common([[1, 2], []]) == [1, 2]  # empty lists are passed over
    assert common([[1], [2]]) == common([[]]) == common([]) == []


def test_computed_blocks_tracker_stops_at_a_gap():
    allocator = CpuGpuBlockAllocator.create("prefix_caching", 8, 0, 1)
    tracker = ComputedBlocksTracker(allocator)
    table = BlockTable(1, allocator)
    table.allocate([1, 2, 3])
    tracker.add_seq(0)
    tracker.add_seq(1)
    assert tracker.get_cached_computed_blocks_and_update(0, table.physical_block_ids) == []
    allocator.mark_blocks_as_computed([])
    assert tracker.get_cached_computed_blocks_and_update(0, table.physical_block_ids) == []  # the gap stands
    assert tracker.get_cached_computed_blocks_and_update(1, table.physical_block_ids) == [0, 1]
    table.append_token_ids([4])
    assert tracker.get_cached_computed_blocks_and_update(1, table.physical_block_ids) == [0, 1, 2]
    tracker.remove_seq(0)
    for unknown in (tracker.remove_seq, lambda seq_id: tracker.add_seq(seq_id + 1)):
        with pytest.raises(AssertionError):
            unknown(0)


def test_last_access_tracker_stamps_when_asked():
    allocator = CpuGpuBlockAllocator.create("prefix_caching", 4, 0, 1)
    tracker = LastAccessBlocksTracker(allocator)
    table = BlockTable(1, allocator)
    table.allocate([1, 2])
    trackers = allocator._allocators[Device.GPU]._block_tracker
    tracker.add_seq(0)
    tracker.update_seq_blocks_last_access(0, table.physical_block_ids)
    assert trackers[1].last_accessed == NEVER_ACCESSED
    tracker.update_last_access(0, 3.0)
    tracker.update_seq_blocks_last_access(0, table.physical_block_ids)
    assert [trackers[i].last_accessed for i in range(3)] == [3.0, 3.0, NEVER_ACCESSED]


def test_prefix_caching_full_blocks_touched():
    device, host = caching(4), caching(4, block_ids=range(4, 8))
    blocks = device.allocate_immutable_blocks(None, [[1, 2, 3, 4], [5, 6, 7, 8]])
    assert host.get_num_full_blocks_touched(blocks) == 2  # not found
    twins = host.allocate_immutable_blocks(None, [[1, 2, 3, 4], [5, 6, 7, 8]])
    assert host.get_num_full_blocks_touched(blocks) == 0  # found and in use
    host.free(twins[1])
    assert host.get_num_full_blocks_touched(blocks) == 1  # found, but counted as free till now
    part = device.allocate_mutable_block(blocks[-1])
    part.append_token_ids([9])
    assert host.get_num_full_blocks_touched([*blocks, part]) == 1


def test_prefix_caching_swap_finds_what_is_there():
    device, host = caching(4), caching(4, block_ids=range(4, 8))
    blocks = device.allocate_immutable_blocks(None, [[1, 2, 3, 4], [5, 6, 7, 8]])
    device.swap_out(blocks)
    host.swap_in(blocks)
    assert ids(blocks) == [4, 5]
    host.swap_out(blocks)
    device.swap_in(blocks)
    assert ids(blocks) == [0, 1]  # still cached
    assert [count(device, i) for i in range(4)] == [1, 1, 0, 0]
    assert device.evictor.num_blocks == 0


# Device and host.


def test_device_ids_come_first_then_the_host():
    for allocator_type in ALLOCATOR_TYPES:
        allocator = CpuGpuBlockAllocator.create(allocator_type, 3, 2, block_size=4)
        gpu = [allocator.allocate_mutable_block(None, Device.GPU) for _ in range(3)]
        cpu = [allocator.allocate_mutable_block(None, Device.CPU) for _ in range(2)]
        assert (ids(gpu), ids(cpu)) == ([0, 1, 2], [3, 4])
        assert allocator.all_block_ids == frozenset(range(5))
        assert allocator.get_physical_block_id(Device.CPU, 4) == 1
        assert [allocator.get_num_total_blocks(device) for device in (Device.GPU, Device.CPU)] == [3, 2]
        for block in (gpu[1], cpu[0]):
            allocator.free(block)
        assert [allocator.get_num_free_blocks(device) for device in (Device.GPU, Device.CPU)] == [1, 1]
        with pytest.raises(NoFreeBlocksError):
            [allocator.allocate_mutable_block(None, Device.CPU) for _ in range(2)]


def test_pair_of_allocators_refuses():
    with pytest.raises(ValueError, match="allocator_type='radix'"):
        CpuGpuBlockAllocator.create("radix", 1, 1, 4)
    with pytest.raises(AssertionError, match="different block ids"):
        CpuGpuBlockAllocator(naive(2), naive(2))


@pytest.mark.parametrize("allocator_type", ALLOCATOR_TYPES)
def test_swap_maps_ids_and_keeps_the_pairs(allocator_type):
    allocator = CpuGpuBlockAllocator.create(allocator_type, 3, 3, block_size=4)
    table = BlockTable(4, allocator)
    table.allocate([1, 2, 3, 4, 5])
    assert allocator.swap(table.blocks, Device.GPU, Device.CPU) == {0: 3, 1: 4}
    table.update(table.blocks)
    assert table.physical_block_ids == [3, 4]
    assert [allocator.get_num_free_blocks(device) for device in (Device.GPU, Device.CPU)] == [3, 1]
    assert allocator.swap(table.blocks, Device.CPU, Device.GPU) in ({3: 1, 4: 0}, {3: 0, 4: 1})
    assert {source for source, _ in allocator.get_and_reset_swaps()} == {0, 1, 3, 4}
    assert allocator.get_and_reset_swaps() == []


def test_null_block_is_one_and_cannot_change():
    allocator = CpuGpuBlockAllocator.create("naive", 3, 1, block_size=4)
    null_block = allocator.allocate_or_get_null_block()
    assert allocator.allocate_or_get_null_block() is null_block
    assert (null_block.block_id, null_block.mutable, null_block.token_ids) == (0, False, [])
    allocator.free(null_block)
    assert allocator.get_num_free_blocks(Device.GPU) == 2
    for change in (lambda: null_block.append_token_ids([1]), lambda: setattr(null_block, "block_id", 1)):
        with pytest.raises(ValueError, match="the null block cannot be changed"):
            change()
    with pytest.raises(ValueError, match="the null block cannot be changed"):
        allocator.swap([null_block], Device.GPU, Device.CPU)
    assert null_block.block_id == 0
    with pytest.raises(AssertionError):
        allocator.fork(null_block)


# The table of a sequence.


@pytest.mark.parametrize("allocator_type", ALLOCATOR_TYPES)
def test_nine_tokens_in_blocks_of_four(allocator_type):
    """The walk-through of the seed: 3 blocks, two full and immutable, the last mutable with one token."""
    table = BlockTable(4, CpuGpuBlockAllocator.create(allocator_type, 8, 0, 4))
    blocks = table._allocate_blocks_for_token_ids(None, [1, 2, 3, 4, 5, 6, 7, 8, 9], Device.GPU)
    table._blocks.update(blocks)
    table._num_full_slots = 9
    assert [block.token_ids for block in blocks] == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert [block.mutable for block in blocks] == [False, False, True]
    assert table.physical_block_ids == [0, 1, 2]
    assert [block.prev_block for block in blocks] == [None, blocks[0], blocks[1]]


def test_required_blocks():
    required = [
        BlockTable.get_num_required_blocks([0] * n, 4, lookahead)
        for n, lookahead in ((0, 0), (1, 0), (4, 0), (5, 0), (4, 1), (9, 7))
    ]
    assert required == [0, 1, 1, 2, 2, 4]


@pytest.mark.parametrize("allocator_type", ALLOCATOR_TYPES)
def test_append_fills_the_last_block_and_takes_new_ones(allocator_type):
    allocator = CpuGpuBlockAllocator.create(allocator_type, 8, 0, 4)
    table = BlockTable(4, allocator)
    with pytest.raises(AssertionError, match="has no blocks"):
        table.append_token_ids([1])
    table.allocate([1, 2, 3])
    table.append_token_ids([4, 5, 6, 7, 8, 9], num_lookahead_slots=4)
    assert [block.token_ids for block in table.blocks] == [[1, 2, 3, 4], [5, 6, 7, 8], [9], []]
    assert (table.physical_block_ids, table.num_full_slots) == ([0, 1, 2, 3], 9)
    table.append_token_ids([10, 11, 12, 13])  # into the slots held ready
    assert [block.token_ids for block in table.blocks[2:]] == [[9, 10, 11, 12], [13]]
    assert table.get_unseen_token_ids(list(range(1, 16))) == [14, 15]
    table.ensure_num_empty_slots(3)
    assert len(table.blocks) == 4
    table.ensure_num_empty_slots(4)
    assert len(table.blocks) == 5
    table.free()
    assert (table.physical_block_ids, allocator.get_num_free_blocks(Device.GPU)) == ([], 8)


@pytest.mark.parametrize(
    ("num_full", "num_new", "lookahead", "touched"),
    [(4, 0, 0, 0), (3, 0, 0, 1), (3, 1, 0, 1), (3, 2, 0, 2), (4, 1, 0, 1), (4, 4, 0, 1), (3, 1, 5, 3)],
)
def test_blocks_touched_by_append(num_full, num_new, lookahead, touched):
    table = BlockTable(4, CpuGpuBlockAllocator.create("naive", 8, 0, 4))
    table.allocate([0] * num_full)
    assert table.get_num_blocks_touched_by_append_slots([0] * num_new, lookahead) == touched


@pytest.mark.parametrize("allocator_type", ALLOCATOR_TYPES)
def test_fork_of_a_table_then_append_on_both_sides(allocator_type):
    allocator = CpuGpuBlockAllocator.create(allocator_type, 8, 0, 4)
    parent = BlockTable(4, allocator)
    parent.allocate([1, 2, 3, 4, 5])
    child = parent.fork()
    assert child.physical_block_ids == parent.physical_block_ids == [0, 1]
    child.append_token_ids([6])
    parent.append_token_ids([7])
    assert (child.physical_block_ids, parent.physical_block_ids) == ([0, 2], [0, 1])
    assert allocator.clear_copy_on_writes() == [(1, 2)]
    parent.free()
    assert allocator.get_num_free_blocks(Device.GPU) == 6
    assert child._get_all_token_ids() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("allocator_type", ALLOCATOR_TYPES)
def test_window_replaces_dropped_blocks_with_the_null_block(allocator_type):
    allocator = CpuGpuBlockAllocator.create(allocator_type, 8, 0, block_size=2)
    table = BlockTable(2, allocator, max_block_sliding_window=2)
    table.allocate([0, 1, 2, 3, 4, 5])
    table.append_token_ids([6], num_computed_slots=6)  # the null block is taken first: id 3
    null_block = allocator.allocate_or_get_null_block()
    assert table.physical_block_ids == [3, 1, 2, 4 if allocator_type == "prefix_caching" else 0]
    assert table.blocks[0] is null_block
    table.append_token_ids([7, 8], num_computed_slots=7)  # 7 // 2 - 2: still one
    table.append_token_ids([9], num_computed_slots=9)
    assert [block is null_block for block in table.blocks] == [True, True, False, False, False]
    assert table.num_full_slots == 10
    assert allocator.get_num_free_blocks(Device.GPU) == 8 - 1 - 3
    with pytest.raises(AssertionError, match="num_computed_slots"):
        table.append_token_ids([1])
    with pytest.raises(AssertionError, match="cannot fork"):
        table.fork()
    table.free()
    assert allocator.get_num_free_blocks(Device.GPU) == 7


def test_table_refuses():
    table = BlockTable(4, CpuGpuBlockAllocator.create("naive", 2, 0, 4))
    for refused in (table.fork, lambda: table.ensure_num_empty_slots(1), lambda: table.allocate([])):
        with pytest.raises(AssertionError):
            refused()
    with pytest.raises(NoFreeBlocksError):
        table.allocate([0] * 9)
    assert table.blocks == []


# The manager.


def group(request_id, *prompts, status=SequenceStatus.WAITING):
    """A request; its sequences have ids 10 * request_id, 10 * request_id + 1, ..."""
    seqs = [Sequence(10 * request_id + i, prompt) for i, prompt in enumerate(prompts)]
    for seq in seqs:
        seq.status = status
    return SequenceGroup(str(request_id), seqs)


def start(manager, request_id, *prompts):
    seq_group = group(request_id, *prompts)
    manager.allocate(seq_group)
    for seq in seq_group.seqs:
        seq.status = SequenceStatus.RUNNING
        seq.data.update_num_computed_tokens(seq.get_len())
    return seq_group


def test_can_allocate_ok_later_never():
    manager = SelfAttnBlockSpaceManager(block_size=4, num_gpu_blocks=10, num_cpu_blocks=0, watermark=0.2)
    assert manager.watermark_blocks == 2
    assert manager.can_allocate(group(0, [0] * 32)) == AllocStatus.OK
    assert manager.can_allocate(group(0, [0] * 33)) == AllocStatus.NEVER
    assert manager.can_allocate(group(0, [0] * 32), num_lookahead_slots=1) == AllocStatus.NEVER
    start(manager, 1, [0] * 4)
    assert manager.can_allocate(group(0, [0] * 28)) == AllocStatus.OK
    assert manager.can_allocate(group(0, [0] * 29)) == AllocStatus.LATER
    assert BlockSpaceManagerV2 is SelfAttnBlockSpaceManager
    with pytest.raises(AssertionError, match="watermark"):
        SelfAttnBlockSpaceManager(4, 10, 0, watermark=-0.1)


def test_can_allocate_with_a_window_asks_for_no_more_than_the_window():
    manager = SelfAttnBlockSpaceManager(4, 6, 0, watermark=0, sliding_window=8)
    assert manager.max_block_sliding_window == 4
    assert manager.can_allocate(group(0, [0] * 400)) == AllocStatus.OK


def test_sequences_of_a_request_share_their_prompt_until_they_write():
    manager = SelfAttnBlockSpaceManager(4, 8, 0, watermark=0)
    seq_group = start(manager, 0, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    first, second = seq_group.seqs
    assert manager.get_block_table(first) == manager.get_block_table(second) == [0, 1]
    assert manager.get_num_free_gpu_blocks() == 6
    for seq, token_id in ((first, 6), (second, 7)):
        seq.append_token_id(token_id)
    assert manager.can_append_slots(seq_group, 0)
    assert manager.append_slots(first, 0) == [(1, 2)]
    assert manager.append_slots(second, 0) == []
    assert [manager.get_block_table(seq) for seq in (first, second)] == [[0, 2], [0, 1]]
    with pytest.raises(AssertionError, match="already"):
        manager.allocate(group(0, [1]))
    for seq in (first, second, second):  # freeing again does nothing
        manager.free(seq)
    assert manager.get_num_free_gpu_blocks() == 8
    with pytest.raises(KeyError):
        manager.get_block_table(first)


def test_can_append_slots_counts_every_touched_block():
    manager = SelfAttnBlockSpaceManager(4, 3, 0, watermark=0)
    seq_group = start(manager, 0, [0] * 4, [0] * 4)
    for seq in seq_group.seqs:
        seq.append_token_id(1)
    assert manager.can_append_slots(seq_group, 3)
    assert not manager.can_append_slots(seq_group, 4)


def test_fork_through_the_manager():
    manager = SelfAttnBlockSpaceManager(4, 4, 0, watermark=0)
    (parent,) = start(manager, 0, [1, 2]).seqs
    child = parent.fork(5)
    manager.fork(parent, child)
    manager.fork(Sequence(99, [1]), Sequence(98, [1]))  # no parent, no child
    assert manager.get_block_table(child) == [0]
    assert set(manager.block_tables) == {0, 5}
    child.append_token_id(3)
    assert manager.append_slots(child, 0) == [(0, 1)]


@pytest.mark.parametrize("enable_caching", [False, True])
def test_swap_through_the_manager(enable_caching):
    manager = SelfAttnBlockSpaceManager(4, 4, 4, watermark=0, enable_caching=enable_caching)
    seq_group = start(manager, 0, [1, 2, 3, 4, 5])
    (seq,) = seq_group.seqs
    assert manager.can_swap_out(seq_group)
    assert manager.swap_out(seq_group) == [(0, 0), (1, 1)]
    seq.status = SequenceStatus.SWAPPED
    assert manager.get_block_table(seq) == [4, 5]
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (4, 2)
    seq.append_token_id(6)
    assert manager.can_swap_in(seq_group, 0) == AllocStatus.OK
    assert manager.can_swap_in(seq_group, 16) == AllocStatus.NEVER
    start(manager, 1, [7] * 9)  # takes 3 of the 4 blocks
    assert manager.can_swap_in(seq_group, 0) == AllocStatus.LATER
    manager.free(Sequence(10, []))
    assert manager.can_swap_in(seq_group, 0) == AllocStatus.OK
    mapping = manager.swap_in(seq_group)
    assert [source for source, _ in mapping] == [0, 1]
    assert [target for _, target in mapping] == manager.get_block_table(seq)
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (2, 4)


def test_swap_needs_room_above_the_watermark_on_the_gpu_only():
    manager = SelfAttnBlockSpaceManager(4, 4, 2, watermark=0.75)
    seq_group = start(manager, 0, [1] * 8)  # as though admitted: the watermark is not asked about here
    assert manager.can_swap_out(seq_group)
    manager.swap_out(seq_group)
    seq_group.seqs[0].status = SequenceStatus.SWAPPED
    assert manager.can_swap_in(seq_group, 0) == AllocStatus.LATER


def test_can_swap_does_not_see_blocks_held_ready():
    manager = SelfAttnBlockSpaceManager(4, 4, 1, watermark=0)
    seq_group = start(manager, 0, [1] * 4)
    assert manager.append_slots(seq_group.seqs[0], num_lookahead_slots=4) == []
    assert manager.can_swap_out(seq_group)
    with pytest.raises(NoFreeBlocksError):
        manager.swap_out(seq_group)


def test_common_computed_blocks_of_a_request():
    manager = SelfAttnBlockSpaceManager(2, 8, 0, watermark=0, enable_caching=True)
    (old,) = start(manager, 0, [1, 2, 3, 4, 5]).seqs
    assert manager.get_common_computed_block_ids([old]) == []
    manager.mark_blocks_as_computed(group(0), 5)
    new = start(manager, 1, [1, 2, 3, 4, 6], [1, 2, 3, 4, 6]).seqs
    assert manager.get_common_computed_block_ids(new) == [0, 1]
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 0.5


def test_last_access_reaches_the_evictor_when_the_sequence_is_freed():
    manager = SelfAttnBlockSpaceManager(2, 4, 0, watermark=0, enable_caching=True)
    (first,) = start(manager, 0, [1, 2]).seqs
    (second,) = start(manager, 1, [3, 4]).seqs
    manager.access_all_blocks_in_seq(first, 2.0)
    manager.access_all_blocks_in_seq(second, 1.0)
    for seq in (second, first):
        manager.free(seq)
    table = manager.block_allocator._allocators[Device.GPU].evictor.free_table
    assert [(block_id, block.last_accessed) for block_id, block in table.items()] == [(1, 1.0), (0, 2.0)]
    # Two free ids, then the one accessed first.
    assert manager.get_block_table(start(manager, 2, [9] * 5).seqs[0]) == [2, 3, 1]


def test_window_through_the_manager():
    manager = SelfAttnBlockSpaceManager(2, 8, 2, watermark=0, sliding_window=2)
    seq_group = start(manager, 0, [0] * 10)
    (seq,) = seq_group.seqs
    seq.append_token_id(1)
    manager.append_slots(seq, 0)  # 10 // 2 - 3 blocks are out of the window
    assert [type(block) is NullBlock for block in manager.block_tables[0].blocks] == [True] * 2 + [False] * 4
    assert manager.get_num_free_gpu_blocks() == 8 - 1 - 4
    with pytest.raises(ValueError, match="the null block"):
        manager.swap_out(seq_group)
    assert len(manager.get_block_table(seq)) == 6


def test_encoder_has_a_table_of_its_own():
    manager = SelfAttnBlockSpaceManager(4, 4, 0, watermark=0)
    seq_group = SequenceGroup("r", [Sequence(0, [1] * 5)], encoder_seq=Sequence(1, [2] * 8))
    assert manager.can_allocate(seq_group) == AllocStatus.OK
    manager.allocate(seq_group)
    assert (manager.get_block_table(seq_group.seqs[0]), manager.get_cross_block_table(seq_group)) == (
        [0, 1],
        [2, 3],
    )
    manager.free_cross(seq_group)
    manager.free_cross(seq_group)
    assert manager.get_num_free_gpu_blocks() == 2
    for kwargs, match in (
        ({"sliding_window": 4}, "a sliding window"),
        ({"enable_caching": True}, "prefix caching"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            SelfAttnBlockSpaceManager(4, 4, 0, **kwargs).can_allocate(seq_group)


# Random histories.


def has_any(histories):
    return bool(histories.groups)


def has_running(histories):
    return any(g.get_seqs(SequenceStatus.RUNNING) for g in histories.groups)


def has_swapped(histories):
    return any(g.get_seqs(SequenceStatus.SWAPPED) for g in histories.groups)


class Histories(RuleBasedStateMachine):
    """Drives a manager as a scheduler does, over a memory that remembers what was written to it.

    A slot's content is the history of its token: the tokens up to and including it. A sequence that shares,
    copies, swaps and frees as it should reads its own history in every slot, always.
    """

    enable_caching: bool

    @initialize(
        block_size=st.sampled_from([1, 2, 3]),
        num_gpu_blocks=st.sampled_from([40, 20, 10, 4]),
        num_cpu_blocks=st.sampled_from([20, 8, 3, 0]),
        sliding_window=st.sampled_from([None, None, 1, 4]),
    )
    def make(self, block_size, num_gpu_blocks, num_cpu_blocks, sliding_window):
        self.block_size = block_size
        self.num_gpu_blocks = num_gpu_blocks
        self.manager = SelfAttnBlockSpaceManager(
            block_size, num_gpu_blocks, num_cpu_blocks, 0.0, sliding_window, self.enable_caching
        )
        self.memory = {}  # (block id, offset) -> history
        self.groups = []
        self.next_id = 0
        self.now = 0.0

    def new_group(self, prompt, num_seqs):
        seqs = [Sequence(self.next_id + i, prompt) for i in range(num_seqs)]
        self.next_id += num_seqs
        return SequenceGroup(str(self.next_id), seqs)

    def write(self, seq):
        """The step: the keys and values of all tokens not yet computed are written."""
        token_ids = seq.get_token_ids()
        block_ids = self.manager.get_block_table(seq)
        for position in range(seq.data.get_num_computed_tokens(), len(token_ids)):
            slot = block_ids[position // self.block_size], position % self.block_size
            self.memory[slot] = token_ids[: position + 1]
        seq.data.update_num_computed_tokens(len(token_ids) - seq.data.get_num_computed_tokens())

    def copy_blocks(self, pairs):
        for source, target in pairs:
            for offset in range(self.block_size):
                self.memory[target, offset] = self.memory.get((source, offset))

    def blocks_of(self, seq):
        return self.manager.block_tables[seq.seq_id].blocks

    def is_whole(self, seq_group):
        """No block dropped by the window, none held ready: the sequences can be forked and swapped."""
        return all(
            not isinstance(block, NullBlock) and block.token_ids
            for seq in seq_group.seqs
            for block in self.blocks_of(seq)
        )

    def pick(self, data, status):
        return data.draw(st.sampled_from([g for g in self.groups if g.get_seqs(status)]))

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=7), num_seqs=st.sampled_from([1, 1, 2]))
    def admit(self, prompt, num_seqs):
        seq_group = self.new_group(prompt, num_seqs)
        if self.manager.can_allocate(seq_group) != AllocStatus.OK:
            return
        # With a window can_allocate counts the window only, but the prompt takes all its blocks.
        before = copy.deepcopy(self.manager)
        try:
            self.manager.allocate(seq_group)
        except NoFreeBlocksError:
            assert self.manager.sliding_window is not None
            self.manager = before
            return
        for seq in seq_group.seqs:
            seq.status = SequenceStatus.RUNNING
            self.write(seq)
        self.groups.append(seq_group)

    @rule(num_blocks_over=st.integers(1, 3), now=st.sampled_from([False] * 7 + [True]))
    def admit_too_much(self, num_blocks_over, now):
        """More blocks than are free, of tokens never seen before: refused, and the copy takes over."""
        if not now:
            return
        num_blocks = self.manager.get_num_free_gpu_blocks() + num_blocks_over
        before = copy.deepcopy(self.manager)
        with pytest.raises(NoFreeBlocksError):
            self.manager.allocate(self.new_group([7] * (num_blocks * self.block_size), 1))
        self.manager = before

    @precondition(has_running)
    @rule(data=st.data(), num_tokens=st.sampled_from([1, 2, 5]), lookahead=st.sampled_from([0, 0, 0, 2]))
    def append(self, data, num_tokens, lookahead):
        self.append_to(self.pick(data, SequenceStatus.RUNNING), num_tokens, lookahead)

    @precondition(has_running)
    @rule()
    def decode(self):
        for seq_group in self.groups:
            self.append_to(seq_group, 1, 0)

    def append_to(self, seq_group, num_tokens, lookahead):
        """Forks get different tokens, other sequences often the same."""
        running = seq_group.get_seqs(SequenceStatus.RUNNING)
        before = copy.deepcopy([seq.data for seq in running])
        for i, seq in enumerate(running):
            for _ in range(num_tokens):
                seq.append_token_id(i)
        null_block = self.manager.sliding_window is not None
        room = self.manager.get_num_free_gpu_blocks() > 0 or not null_block  # the null block is one more
        if not (self.manager.can_append_slots(seq_group, lookahead + self.block_size * null_block) and room):
            for seq, seq_data in zip(running, before, strict=True):
                seq.data = seq_data
            return
        for seq in running:
            self.copy_blocks(self.manager.append_slots(seq, lookahead))
            self.write(seq)

    @precondition(has_running)
    @rule(data=st.data())
    def fork(self, data):
        seq_group = self.pick(data, SequenceStatus.RUNNING)
        if len(seq_group.seqs) < 4 and self.is_whole(seq_group):
            parent = data.draw(st.sampled_from(seq_group.get_seqs(SequenceStatus.RUNNING)))
            child = parent.fork(self.next_id)
            self.next_id += 1
            self.manager.fork(parent, child)
            seq_group.add(child)

    @precondition(has_any)
    @rule(data=st.data())
    def free(self, data):
        seq_group = self.pick(data, None)
        seq = data.draw(st.sampled_from(seq_group.seqs))
        if self.enable_caching and seq.status == SequenceStatus.RUNNING:
            self.now += 1
            self.manager.access_all_blocks_in_seq(seq, self.now)
        self.manager.free(seq)
        seq_group.seqs.remove(seq)
        if not seq_group.seqs:
            self.groups.remove(seq_group)

    @precondition(has_running)
    @rule(data=st.data())
    def swap_out(self, data):
        seq_group = self.pick(data, SequenceStatus.RUNNING)
        if not self.is_whole(seq_group) or not self.manager.can_swap_out(seq_group):
            return
        mapping = self.manager.swap_out(seq_group)
        self.copy_blocks((gpu, self.num_gpu_blocks + cpu) for gpu, cpu in mapping)
        for seq in seq_group.get_seqs(SequenceStatus.RUNNING):
            seq.status = SequenceStatus.SWAPPED

    @precondition(has_swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        seq_group = self.pick(data, SequenceStatus.SWAPPED)
        if self.manager.can_swap_in(seq_group, 0) != AllocStatus.OK:
            return
        mapping = self.manager.swap_in(seq_group)
        self.copy_blocks((self.num_gpu_blocks + cpu, gpu) for cpu, gpu in mapping)
        for seq in seq_group.get_seqs(SequenceStatus.SWAPPED):
            seq.status = SequenceStatus.RUNNING

    @precondition(lambda self: self.enable_caching and has_running(self))
    @rule(data=st.data())
    def look_up(self, data):
        """There is always a block left to compute."""
        self.manager.mark_blocks_as_computed(self.new_group([], 0), 0)
        seq_group = self.pick(data, SequenceStatus.RUNNING)
        if not seq_group.get_seqs(SequenceStatus.SWAPPED):
            computed = self.manager.get_common_computed_block_ids(seq_group.seqs)
            assert len(computed) < max(len(self.blocks_of(seq)) for seq in seq_group.seqs)

    @invariant()
    def every_sequence_reads_its_own_history(self):
        for seq_group in self.groups:
            for seq in seq_group.seqs:
                token_ids = seq.get_token_ids()
                blocks = self.blocks_of(seq)
                block_ids = self.manager.get_block_table(seq)
                assert block_ids == ids(blocks)
                for position in range(len(token_ids)):
                    i, offset = divmod(position, self.block_size)
                    if not isinstance(blocks[i], NullBlock):
                        assert blocks[i].token_ids[offset] == token_ids[position]
                        assert self.memory[block_ids[i], offset] == token_ids[: position + 1]

    @invariant()
    def free_and_used_are_all(self):
        entries = Counter(
            block.block_id
            for table in self.manager.block_tables.values()
            for block in table.blocks
            if not isinstance(block, NullBlock)
        )
        null_block = self.manager.block_allocator._null_block
        if null_block is not None:
            assert entries[null_block.block_id] == 0
            entries[null_block.block_id] = 1
        for allocator in self.manager.block_allocator._allocators.values():
            used = {block_id: n for block_id, n in entries.items() if block_id in allocator.all_block_ids}
            assert {i: n for i, n in allocator._refcounter._refcounts.items() if n} == +Counter(used)
            if self.enable_caching:
                free = [*allocator._hashless_allocator._free_block_indices, *allocator.evictor.free_table]
                self.check_cache(allocator, used)
            else:
                free = list(allocator._free_block_indices)
            assert sorted([*free, *used]) == sorted(allocator.all_block_ids)
            assert allocator.get_num_free_blocks() == len(free)

    def check_cache(self, allocator, used):
        """Findable blocks are in use or in the evictor, each once; the tracker knows exactly those in use."""
        cached = allocator._cached_blocks
        assert len(set(cached.values())) == len(cached)
        assert all(block_id in used or block_id in allocator.evictor for block_id in cached.values())
        for block_id, block in allocator.evictor.free_table.items():
            assert cached[block.content_hash] == block_id
        assert {block_id for block_id, tracker in allocator._block_tracker.items() if tracker.active} == set(
            used
        )
        for table in self.manager.block_tables.values():
            for block in table.blocks:
                if block.block_id in allocator.all_block_ids and block.content_hash is not None:
                    assert cached[block.content_hash] == block.block_id

    @invariant()
    def block_objects_are_conserved(self):
        tables = self.manager.block_tables.values()
        objects = [block for table in tables for block in table.blocks if not isinstance(block, NullBlock)]
        assert len({id(block) for block in objects}) == len(objects)
        num_held = len(objects) + (self.manager.block_allocator._null_block is not None)
        pools = [a._block_pool for a in self.manager.block_allocator._allocators.values()]
        assert sum(len(pool._pool) - len(pool._free_ids) for pool in pools) == num_held


class NaiveHistories(Histories):
    enable_caching = False


class PrefixCachingHistories(Histories):
    enable_caching = True


quick = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNaiveHistories = NaiveHistories.TestCase
TestNaiveHistories.settings = quick
TestPrefixCachingHistories = pytest.mark.slow(PrefixCachingHistories.TestCase)
TestPrefixCachingHistories.settings = quick
