"""The v0 oracle: the end, shared prefixes, swapping, windows and sizes."""

import pytest

from reference.invariants import check_block_space_manager
from reference.v0.block_manager import BlockSpaceManager
from reference.v0.cache_engine import GIB, CacheEngine, get_dtype_size, num_available_blocks
from reference.v0.sequence import Prefix, SequenceStatus
from tests.reference.v0_requests import OUT_OF_MEMORY, append_token, error_of, make_group, set_status, start

# The end.


def test_free_gives_back_first_to_last_so_the_last_block_is_taken_first() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=4, num_cpu_blocks=0)
    group = make_group(12, 4)
    start(manager, group)
    manager.free(group.get_seqs()[0])
    assert [block.block_number for block in manager.gpu_allocator.free_blocks] == [0, 3, 2, 1]
    manager.free(group.get_seqs()[0])  # a second time there is nothing to free
    assert manager.get_num_free_gpu_blocks() == 4


def test_reset_frees_every_sequence_and_no_prefix() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=8, num_cpu_blocks=4)
    prefix = Prefix(range(4), 4)
    start(manager, make_group(3, 4, prefix=prefix))
    swapped = make_group(3, 4, seq_ids=(1,))
    start(manager, swapped)
    manager.swap_out(swapped)
    manager.reset()
    assert manager.block_tables == {}
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (7, 4)
    check_block_space_manager(manager, [prefix])


# The shared prefix.


def test_prefix_is_taken_once_and_shared_from_then_on() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=10, num_cpu_blocks=0)
    prefix = Prefix(range(8), 4)
    first, second = make_group(3, 4, (0,), prefix), make_group(5, 4, (1, 2), prefix)
    start(manager, first)
    assert prefix.get_block_numbers() == [9, 8]
    assert [block.ref_count for block in manager.block_tables[0]] == [2, 2, 1]
    start(manager, second)
    assert manager.get_block_table(second.find(1)) == [9, 8, 6, 5]
    assert [block.ref_count for block in manager.block_tables[1]] == [4, 4, 2, 2]
    check_block_space_manager(manager, [prefix])
    for seq in [*first.get_seqs(), *second.get_seqs()]:
        manager.free(seq)
    assert manager.get_num_free_gpu_blocks() == 8
    check_block_space_manager(manager, [prefix])


def test_prefix_stays_on_the_gpu_when_its_group_is_swapped() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=10, num_cpu_blocks=4, watermark=0.0)
    prefix = Prefix(range(8), 4)
    group = make_group(3, 4, (0, 1), prefix)
    start(manager, group)
    assert manager.swap_out(group) == {7: 3}
    set_status(group, SequenceStatus.SWAPPED)
    assert [block.ref_count for block in prefix.block_table or ()] == [1, 1]
    assert manager.get_block_table(group.find(0)) == [3]
    assert manager.swap_in(group) == {3: 7}
    assert manager.get_block_table(group.find(1)) == [9, 8, 7]
    check_block_space_manager(manager, [prefix])


def test_prefix_must_be_computed_before_swap_in() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=10, num_cpu_blocks=4)
    prefix = Prefix(range(8), 4)
    group = make_group(3, 4, (0,), prefix)
    start(manager, group)
    manager.swap_out(group)
    set_status(group, SequenceStatus.SWAPPED)
    prefix.computed = False
    with pytest.raises(AssertionError, match="must be computed"):
        manager.swap_in(group)


def test_prefix_with_a_sliding_window_is_refused() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=10, num_cpu_blocks=0, sliding_window=8)
    with pytest.raises(NotImplementedError, match="a shared prefix cannot be used with a sliding window"):
        manager.allocate(make_group(3, 4, prefix=Prefix(range(4), 4)))


# Swapping.


def test_swap_out_and_in_keeps_what_is_shared() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=6, num_cpu_blocks=3, watermark=0.0)
    group = make_group(6, 4, seq_ids=(0, 1))
    start(manager, group)
    assert append_token(manager, group.find(0)) == (4, 3)
    assert manager.can_swap_out(group)
    assert manager.swap_out(group) == {5: 2, 3: 1, 4: 0}
    set_status(group, SequenceStatus.SWAPPED)
    assert manager.get_block_table(group.find(0)) == [2, 1]
    assert manager.get_block_table(group.find(1)) == [2, 0]
    assert [block.ref_count for block in manager.block_tables[0]] == [2, 1]
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (6, 0)
    grown = group.find(0).fork(0)
    for _ in range(2):  # the 8th token would go into the last block, the 9th into a new one
        grown.append_token_id(7, {7: 0.0})
        with pytest.raises(AssertionError, match="must be on the GPU"):
            manager.append_slot(grown)

    assert manager.can_swap_in(group)
    assert manager.swap_in(group) == {2: 4, 1: 5, 0: 3}  # 4 was freed last
    set_status(group, SequenceStatus.RUNNING)
    assert manager.get_num_free_cpu_blocks() == 3
    check_block_space_manager(manager)


def test_can_swap_in_wants_one_block_more_for_each_sequence_above_the_watermark() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=10, num_cpu_blocks=10, watermark=0.2)
    group = make_group(8, 4, seq_ids=(0, 1))
    start(manager, group)
    manager.swap_out(group)
    set_status(group, SequenceStatus.SWAPPED)
    for _ in range(4):
        manager.gpu_allocator.allocate()
    assert manager.can_swap_in(group)  # 6 free: 2 blocks, 2 sequences, 2 for the watermark
    manager.gpu_allocator.allocate()
    assert not manager.can_swap_in(group)


def test_swap_that_runs_out_changes_nothing() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=4, num_cpu_blocks=1)
    group = make_group(8, 4)
    start(manager, group)
    assert not manager.can_swap_out(group)
    assert error_of(manager.swap_out, group) == OUT_OF_MEMORY
    assert manager.get_block_table(group.find(0)) == [3, 2]
    check_block_space_manager(manager)


def test_only_running_sequences_are_swapped_out() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=4, num_cpu_blocks=1)
    group = make_group(4, 4, seq_ids=(0, 1))
    start(manager, group)
    manager.free(group.find(1))
    group.find(1).status = SequenceStatus.FINISHED_STOPPED
    assert manager.can_swap_out(group)
    assert manager.swap_out(group) == {3: 0}


# The sliding window.


def test_prompt_longer_than_the_window_goes_round() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=8, num_cpu_blocks=0, sliding_window=8)
    group = make_group(17, 4)
    start(manager, group)
    assert manager.get_block_table(group.find(0)) == [7, 6, 7, 6, 7]
    assert [block.ref_count for block in manager.block_tables[0]] == [1] * 5
    assert manager.get_num_free_gpu_blocks() == 6
    manager.free(group.find(0))
    assert manager.get_num_free_gpu_blocks() == 8


def test_growing_past_the_window_takes_no_more_blocks() -> None:
    manager = BlockSpaceManager(2, num_gpu_blocks=8, num_cpu_blocks=0, sliding_window=4)
    group = make_group(1, 2)
    start(manager, group)
    for _ in range(9):
        assert append_token(manager, group.find(0)) is None
    assert manager.get_block_table(group.find(0)) == [7, 6, 7, 6, 7]
    assert manager.get_num_free_gpu_blocks() == 6


def test_copy_on_write_replaces_a_wrapped_block_everywhere() -> None:
    manager = BlockSpaceManager(2, num_gpu_blocks=8, num_cpu_blocks=0, sliding_window=4)
    group = make_group(4, 2, seq_ids=(0, 1))
    start(manager, group)
    assert append_token(manager, group.find(0)) == (7, 5)
    assert manager.get_block_table(group.find(0)) == [5, 6, 5]
    assert manager.get_block_table(group.find(1)) == [7, 6]
    check_block_space_manager(manager)
    assert append_token(manager, group.find(1)) is None
    assert manager.get_block_table(group.find(1)) == [7, 6, 7]
    check_block_space_manager(manager)


def test_wrapped_table_is_one_holder_when_forked_and_swapped() -> None:
    manager = BlockSpaceManager(2, num_gpu_blocks=8, num_cpu_blocks=4, watermark=0.0, sliding_window=4)
    group = make_group(6, 2)
    start(manager, group)
    child = group.find(0).fork(1)
    group.add(child)
    manager.fork(group.find(0), child)
    assert [block.ref_count for block in manager.block_tables[0]] == [2, 2, 2]
    assert manager.swap_out(group) == {7: 3, 6: 2}
    set_status(group, SequenceStatus.SWAPPED)
    assert manager.get_block_table(child) == [3, 2, 3]
    check_block_space_manager(manager)
    manager.swap_in(group)
    check_block_space_manager(manager)
    manager.reset()
    assert (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()) == (8, 4)


# Sizes.


def test_block_of_the_article_is_65536_bytes_and_has_32768_elements() -> None:
    shape = {"block_size": 4, "num_layers": 4, "num_heads": 8, "head_size": 128}
    assert CacheEngine.get_cache_block_size(cache_dtype="auto", model_dtype="half", **shape) == 65_536
    assert CacheEngine.get_cache_block_size(cache_dtype="fp8_e5m2", **shape) == 32_768
    assert CacheEngine.get_cache_block_size(cache_dtype="auto", model_dtype="float", **shape) == 131_072


@pytest.mark.parametrize(
    ("dtype", "size"), [("half", 2), ("float16", 2), ("bfloat16", 2), ("float", 4), ("fp8", 1), (float, 8)]
)
def test_dtype_sizes(dtype: object, size: int) -> None:
    assert get_dtype_size(dtype) == size


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype='nonsense' must be a NumPy dtype or one of"):
        get_dtype_size("nonsense")


def test_num_available_blocks() -> None:
    block = 64 * 1024
    # An 80 GiB GPU, 20 GiB of it used at the peak: 0.9 * 80 - 20 = 52 GiB for the cache.
    assert num_available_blocks(60 * GIB, 80 * GIB, block) == (52 * 16384, 4 * 16384)
    # 5 GiB were used before the model came, by somebody else: they do not count as the model's peak.
    assert num_available_blocks(60 * GIB, 80 * GIB, block, init_gpu_memory=75 * GIB)[0] == 57 * 16384
    assert num_available_blocks(60 * GIB, 80 * GIB, block, 0.5, cpu_swap_space=block - 1) == (20 * 16384, 0)
    assert num_available_blocks(1 * GIB, 80 * GIB, block, 0.9)[0] == 0  # never negative
    assert num_available_blocks(10, 10, 4, 0.9)[0] == 2  # 9 bytes hold 2 blocks
