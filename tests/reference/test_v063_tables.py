"""The two devices and the tables of the 0.6.3 oracle: walk-throughs and edges."""

import pytest

from reference.v063.block import Device, NoFreeBlocksError
from reference.v063.block_table import BlockTable
from reference.v063.cpu_gpu import CpuGpuBlockAllocator
from reference.v063.prefix_caching import ComputedBlocksTracker

CACHING_OR_NOT = pytest.mark.parametrize("enable_caching", [False, True])


def table_of(allocator, token_ids, block_size=4, **kwargs):
    table = BlockTable(block_size, allocator, **kwargs)
    table.allocate(token_ids)
    return table


# Device and host.


@CACHING_OR_NOT
def test_device_ids_come_first_then_the_host(enable_caching):
    allocator = CpuGpuBlockAllocator(3, 2, 4, enable_caching)
    gpu, cpu = (
        [each.allocate_mutable_block(None) for _ in each.block_ids] for each in allocator.allocators.values()
    )
    assert ([block.block_id for block in gpu], [block.block_id for block in cpu]) == ([0, 1, 2], [3, 4])
    for block in (gpu[1], cpu[0]):
        allocator.free(block)
    assert [each.num_free_blocks for each in allocator.allocators.values()] == [1, 1]


@CACHING_OR_NOT
def test_swap_gives_places_on_each_device(enable_caching):
    allocator = CpuGpuBlockAllocator(3, 3, 4, enable_caching)
    table = table_of(allocator, [1, 2, 3, 4, 5])
    assert allocator.swap(table.blocks, Device.GPU, Device.CPU) == [(0, 0), (1, 1)]
    assert table.block_ids == [3, 4]
    assert [each.num_free_blocks for each in allocator.allocators.values()] == [3, 1]
    back = allocator.swap(table.blocks, Device.CPU, Device.GPU)
    assert back == [(0, 0), (1, 1)] if enable_caching else [(0, 1), (1, 0)]


def test_null_block_is_one_and_cannot_change():
    allocator = CpuGpuBlockAllocator(3, 1, 4)
    null_block = allocator.allocate_or_get_null_block()
    assert allocator.allocate_or_get_null_block() is null_block
    allocator.free(null_block)
    assert (null_block.block_id, allocator.gpu.num_free_blocks) == (0, 2)
    with pytest.raises(AssertionError, match="the null block cannot be changed"):
        allocator.append_token_ids(null_block, [1])
    with pytest.raises(ValueError, match="the null block cannot be changed"):
        allocator.swap([null_block], Device.GPU, Device.CPU)
    assert null_block.block_id == 0


# The table of a sequence.


@CACHING_OR_NOT
def test_append_fills_the_last_block_and_takes_new_ones(enable_caching):
    allocator = CpuGpuBlockAllocator(8, 0, 4, enable_caching)
    table = table_of(allocator, [1, 2, 3])
    table.append_token_ids([4, 5, 6, 7, 8, 9], num_lookahead_slots=4)
    assert [block.token_ids for block in table.blocks] == [[1, 2, 3, 4], [5, 6, 7, 8], [9], []]
    assert (table.block_ids, table.num_tokens) == ([0, 1, 2, 3], 9)
    assert [block.prev_block for block in table.blocks] == [None, *table.blocks[:3]]
    table.append_token_ids([10, 11, 12, 13])  # into the slots held ready
    assert [block.token_ids for block in table.blocks[2:]] == [[9, 10, 11, 12], [13]]
    for num_empty_slots, num_blocks in ((3, 4), (4, 5)):
        table.ensure_num_empty_slots(num_empty_slots)
        assert len(table.blocks) == num_blocks
    table.free()
    assert (table.block_ids, allocator.gpu.num_free_blocks) == ([], 8)


@pytest.mark.parametrize(
    ("num_full", "num_new", "lookahead", "touched"),
    [(4, 0, 0, 0), (3, 0, 0, 1), (3, 1, 0, 1), (3, 2, 0, 2), (4, 1, 0, 1), (4, 4, 0, 1), (3, 1, 5, 3)],
)
def test_blocks_touched_by_append(num_full, num_new, lookahead, touched):
    table = table_of(CpuGpuBlockAllocator(8, 0, 4), [0] * num_full)
    assert table.num_blocks_touched_by_append(num_new, lookahead) == touched


@CACHING_OR_NOT
def test_fork_of_a_table_then_append_on_both_sides(enable_caching):
    allocator = CpuGpuBlockAllocator(8, 0, 4, enable_caching)
    parent = table_of(allocator, [1, 2, 3, 4, 5])
    child = parent.fork()
    assert child.block_ids == parent.block_ids == [0, 1]
    child.append_token_ids([6])
    parent.append_token_ids([7])
    assert (child.block_ids, parent.block_ids) == ([0, 2], [0, 1])
    assert allocator.gpu.take_copies() == [(1, 2)]
    parent.free()
    assert allocator.gpu.num_free_blocks == 6
    assert [block.token_ids for block in child.blocks] == [[1, 2, 3, 4], [5, 6]]


@CACHING_OR_NOT
def test_window_replaces_dropped_blocks_with_the_null_block(enable_caching):
    allocator = CpuGpuBlockAllocator(8, 0, 2, enable_caching)
    table = table_of(allocator, [0, 1, 2, 3, 4, 5], block_size=2, max_blocks_in_window=2)
    table.append_token_ids([6], num_computed_tokens=6)  # the null block is taken first: id 3
    assert table.block_ids == [3, 1, 2, 4 if enable_caching else 0]
    table.append_token_ids([7, 8], num_computed_tokens=7)  # 7 // 2 - 2: still one
    table.append_token_ids([9], num_computed_tokens=9)
    null_block = allocator.null_block
    assert [block is null_block for block in table.blocks] == [True, True, False, False, False]
    assert (table.num_tokens, allocator.gpu.num_free_blocks) == (10, 8 - 1 - 3)
    with pytest.raises(AssertionError, match="num_computed_tokens"):
        table.append_token_ids([1])
    with pytest.raises(AssertionError, match="cannot fork"):
        table.fork()
    table.free()
    assert allocator.gpu.num_free_blocks == 7


def test_an_empty_table_refuses():
    table = BlockTable(4, CpuGpuBlockAllocator(2, 0, 4))
    for refused in (
        table.fork,
        lambda: table.ensure_num_empty_slots(1),
        lambda: table.allocate([]),
        lambda: table.append_token_ids([1]),
    ):
        with pytest.raises(AssertionError):
            refused()
    with pytest.raises(NoFreeBlocksError):
        table.allocate([0] * 9)
    assert table.blocks == []


# Prefix caching.


def test_same_prompt_shares_ids_of_full_blocks():
    allocator = CpuGpuBlockAllocator(8, 0, 4, enable_caching=True)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 6, 6, 7, 8]]
    tables = [table_of(allocator, prompt) for prompt in prompts]
    assert [table.block_ids for table in tables] == [[0, 1, 2], [0, 1, 3], [0, 4]]
    assert list(allocator.gpu.ref_counts.values()) == [3, 2, 1, 1, 1, 0, 0, 0]
    # The second sequence fills its last block like the first one, which has filled its own: they become one.
    for table in tables[:2]:
        table.append_token_ids([10, 11, 12])
    assert tables[1].block_ids == [0, 1, 2]
    assert allocator.gpu.free_ids[0] == 3
    # Of the 6 full blocks in the three prompts, 3 were found: 0 and 1 of the second, 0 of the third.
    assert [each.hit_rate for each in allocator.allocators.values()] == [0.5, 0.0]


def test_computed_blocks_tracker_stops_at_a_gap():
    allocator = CpuGpuBlockAllocator(8, 0, 1, enable_caching=True)
    tracker = ComputedBlocksTracker(allocator.gpu)
    table = table_of(allocator, [1, 2, 3], block_size=1)
    assert tracker.computed_ids(0, table.block_ids) == []
    allocator.gpu.mark_blocks_as_computed()
    assert tracker.computed_ids(0, table.block_ids) == []  # the gap stands
    assert tracker.computed_ids(1, table.block_ids) == [0, 1]
    table.append_token_ids([4])
    assert tracker.computed_ids(1, table.block_ids) == [0, 1, 2]
    tracker.remove(0)
    assert tracker.computed_ids(0, table.block_ids) == [0, 1, 2]
