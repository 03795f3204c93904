"""The v0 oracle: the articles' examples, each rule by hand, and random walks through simulated memory."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference.invariants import check_block_space_manager
from reference.v0.block import Device, LogicalTokenBlock, PhysicalTokenBlock
from reference.v0.block_manager import AllocStatus, BlockAllocator, BlockSpaceManager
from reference.v0.cache_engine import GIB, CacheEngine, get_dtype_size, num_available_blocks
from reference.v0.sequence import Prefix, Sequence, SequenceGroup, SequenceStatus

OUT_OF_MEMORY = "Out of memory! No free blocks are available."


def make_group(
    num_tokens: int, block_size: int, seq_ids: tuple[int, ...] = (0,), prefix: Prefix | None = None
) -> SequenceGroup:
    """Waiting sequences of one prompt: the prefix, if any, and then the tokens 0, 1, 2, ..."""
    tokens = [*(prefix.token_ids if prefix else ()), *range(num_tokens)]
    return SequenceGroup("g", [Sequence(i, "", list(tokens), block_size) for i in seq_ids], prefix=prefix)


def set_status(group: SequenceGroup, status: SequenceStatus) -> None:
    for seq in group.get_seqs():
        seq.status = status


def start(manager: BlockSpaceManager, group: SequenceGroup) -> None:
    manager.allocate(group)
    set_status(group, SequenceStatus.RUNNING)
    if group.prefix is not None:
        group.prefix.computed = True


def append_token(manager: BlockSpaceManager, seq: Sequence) -> tuple[int, int] | None:
    seq.append_token_id(7, {7: -0.5})
    return manager.append_slot(seq)


def error_of(call: Callable[..., Any], *args: Any, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as info:
        call(*args)
    return str(info.value)


# Blocks and sequences.


def test_logical_block_fills_from_left_to_right() -> None:
    block = LogicalTokenBlock(block_number=3, block_size=4)
    assert block.is_empty()
    assert block.token_ids == [-1, -1, -1, -1]
    block.append_tokens([5, 6, 7])
    assert block.token_ids == [5, 6, 7, -1]
    assert block.get_token_ids() == [5, 6, 7]
    assert block.get_last_token_id() == 7
    assert (block.get_num_empty_slots(), block.is_full(), block.is_empty()) == (1, False, False)
    block.append_tokens([8])
    assert block.is_full()


def test_logical_block_refuses_too_many_tokens_and_an_absent_last_one() -> None:
    block = LogicalTokenBlock(0, 2)
    with pytest.raises(AssertionError, match="no last token"):
        block.get_last_token_id()
    with pytest.raises(AssertionError, match=r"len\(token_ids\)=3 must be at most num_empty_slots=2"):
        block.append_tokens([1, 2, 3])
    assert block.is_empty()


def test_sequence_cuts_its_tokens_into_logical_blocks() -> None:
    seq = Sequence(0, "", list(range(9)), block_size=4)
    assert [block.get_token_ids() for block in seq.logical_token_blocks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [block.block_number for block in seq.logical_token_blocks] == [0, 1, 2]
    for _ in range(4):
        seq.append_token_id(7, {7: -0.5, 8: -3.0})
    assert len(seq.logical_token_blocks) == 4
    assert seq.get_token_ids() == [*range(9), 7, 7, 7, 7]
    assert (seq.get_len(), seq.get_prompt_len(), seq.get_output_len()) == (13, 9, 4)
    assert seq.get_output_token_ids() == [7] * 4
    assert seq.get_last_token_id() == 7
    assert seq.get_cumulative_logprob() == -2.0
    with pytest.raises(AssertionError, match="token_id=1 must be in"):
        seq.append_token_id(1, {7: 0.0})


def test_an_empty_prompt_has_no_logical_block_and_a_full_one_no_empty_block() -> None:
    assert Sequence(0, "", [], 4).logical_token_blocks == []
    assert len(Sequence(0, "", [1] * 8, 4).logical_token_blocks) == 2


def test_forked_sequence_shares_nothing() -> None:
    parent = Sequence(0, "", [1, 2, 3], block_size=4)
    child = parent.fork(5)
    child.append_token_id(7, {7: 0.0})
    assert (parent.seq_id, child.seq_id) == (0, 5)
    assert parent.get_token_ids() == [1, 2, 3]
    assert parent.logical_token_blocks[0].get_token_ids() == [1, 2, 3]
    assert child.logical_token_blocks[0].get_token_ids() == [1, 2, 3, 7]


def test_group_finds_its_sequences_by_status_and_id() -> None:
    group = make_group(3, 4, seq_ids=(4, 2, 9))
    group.find(2).status = SequenceStatus.RUNNING
    group.find(9).status = SequenceStatus.FINISHED_STOPPED
    assert [seq.seq_id for seq in group.get_seqs()] == [4, 2, 9]
    assert [seq.seq_id for seq in group.get_seqs(SequenceStatus.RUNNING)] == [2]
    assert [seq.seq_id for seq in group.get_unfinished_seqs()] == [4, 2]
    assert [seq.seq_id for seq in group.get_finished_seqs()] == [9]
    assert (group.num_seqs(), group.num_seqs(SequenceStatus.SWAPPED)) == (3, 0)
    assert (group.num_unfinished_seqs(), group.num_finished_seqs()) == (2, 1)
    assert not group.is_finished()
    assert error_of(group.find, 3) == "Sequence 3 not found."
    assert error_of(group.remove, 3) == "Sequence 3 not found."
    assert error_of(group.add, group.find(4)) == "Sequence 4 already exists."
    group.remove(4)
    group.remove(2)
    assert group.is_finished()
    group.add(Sequence(11, "", [1], 4))
    assert not group.is_finished()


@pytest.mark.parametrize("status", SequenceStatus)
def test_finished_statuses_have_a_reason(status: SequenceStatus) -> None:
    finished = status.name.startswith("FINISHED")
    assert SequenceStatus.is_finished(status) == finished
    reason = {"STOPPED": "stop", "LENGTH_CAPPED": "length", "ABORTED": "abort", "IGNORED": "length"}
    assert SequenceStatus.get_finished_reason(status) == reason.get(status.name.removeprefix("FINISHED_"))


def test_prefix_knows_its_blocks_once_it_is_allocated() -> None:
    prefix = Prefix([1, 2, 3, 4], block_size=2)
    assert (prefix.get_length(), prefix.get_num_blocks(), prefix.allocated) == (4, 2, False)
    with pytest.raises(AssertionError, match="not allocated"):
        prefix.get_block_numbers()
    table = [PhysicalTokenBlock(Device.GPU, number, 2) for number in (8, 5)]
    prefix.set_block_table(table)
    table.pop()
    assert prefix.allocated
    assert prefix.get_block_numbers() == [8, 5]
    assert prefix != Prefix([1, 2, 3, 4], block_size=2)
    with pytest.raises(AssertionError, match=r"len\(token_ids\)=3 must be a multiple of block_size=2"):
        Prefix([1, 2, 3], block_size=2)


# The allocator.


def test_allocator_is_a_stack_with_the_highest_number_on_top() -> None:
    allocator = BlockAllocator(Device.GPU, block_size=4, num_blocks=4)
    blocks = [allocator.allocate() for _ in range(3)]
    assert [block.block_number for block in blocks] == [3, 2, 1]
    assert [block.ref_count for block in blocks] == [1, 1, 1]
    assert allocator.get_num_free_blocks() == 1
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    assert [allocator.allocate().block_number for _ in range(3)] == [1, 3, 0]
    assert error_of(allocator.allocate) == OUT_OF_MEMORY


def test_allocator_keeps_a_block_until_its_last_holder_lets_go() -> None:
    allocator = BlockAllocator(Device.CPU, block_size=4, num_blocks=2)
    block = allocator.allocate()
    block.ref_count += 1
    allocator.free(block)
    assert allocator.get_num_free_blocks() == 1
    allocator.free(block)
    assert allocator.get_num_free_blocks() == 2
    assert error_of(allocator.free, block) == (
        "Double free! PhysicalTokenBlock(device=Device.CPU, block_number=1, ref_count=0) is already freed."
    )
    assert allocator.get_num_free_blocks() == 2


# Admission.


@pytest.mark.parametrize(
    ("num_tokens", "num_taken", "watermark", "status"),
    [
        (16, 0, 0.0, AllocStatus.OK),  # 4 of 10 blocks
        (40, 0, 0.0, AllocStatus.OK),  # exactly all
        (41, 0, 0.0, AllocStatus.NEVER),
        (16, 6, 0.0, AllocStatus.OK),  # exactly what is left
        (16, 7, 0.0, AllocStatus.LATER),
        (28, 0, 0.3, AllocStatus.OK),  # exactly down to the watermark of 3 blocks
        (29, 0, 0.3, AllocStatus.NEVER),
        (16, 3, 0.3, AllocStatus.OK),
        (16, 4, 0.3, AllocStatus.LATER),
        (16, 4, 0.29, AllocStatus.OK),  # the watermark is rounded down, to 2 blocks
        (40, 0, 0.01, AllocStatus.OK),
    ],
)
def test_can_allocate_watermark(
    num_tokens: int, num_taken: int, watermark: float, status: AllocStatus
) -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=10, num_cpu_blocks=0, watermark=watermark)
    for _ in range(num_taken):
        manager.gpu_allocator.allocate()
    assert manager.can_allocate(make_group(num_tokens, 4)) is status


def test_can_allocate_counts_no_more_than_the_window_and_not_the_allocated_prefix() -> None:
    manager = BlockSpaceManager(4, 4, 0, watermark=0.0, sliding_window=8)
    assert manager.can_allocate(make_group(100, 4)) is AllocStatus.OK
    manager = BlockSpaceManager(4, 4, 0, watermark=0.0)
    prefix = Prefix(range(8), 4)
    assert manager.can_allocate(make_group(9, 4, prefix=prefix)) is AllocStatus.NEVER
    start(manager, make_group(1, 4, prefix=prefix))
    assert manager.can_allocate(make_group(4, 4, (1,), prefix)) is AllocStatus.OK
    assert manager.can_allocate(make_group(5, 4, (1,), prefix)) is AllocStatus.LATER


def test_default_watermark_is_one_percent() -> None:
    assert BlockSpaceManager(16, 1000, 0).watermark_blocks == 10


def test_allocate_gives_the_group_one_table() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=8, num_cpu_blocks=0)
    group = make_group(9, 4, seq_ids=(0, 1))
    manager.allocate(group)
    assert [manager.get_block_table(seq) for seq in group.get_seqs()] == [[7, 6, 5], [7, 6, 5]]
    assert [block.ref_count for block in manager.block_tables[0]] == [2, 2, 2]
    assert manager.block_tables[0] is not manager.block_tables[1]
    assert manager.get_num_free_gpu_blocks() == 5
    check_block_space_manager(manager)


def test_allocate_that_runs_out_changes_nothing() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=2, num_cpu_blocks=0)
    assert error_of(manager.allocate, make_group(9, 4)) == OUT_OF_MEMORY
    assert manager.get_num_free_gpu_blocks() == 2
    assert manager.block_tables == {}


def test_constructor_refuses() -> None:
    with pytest.raises(AssertionError, match="sliding_window=6 must be a multiple of block_size=4"):
        BlockSpaceManager(4, 8, 8, sliding_window=6)
    with pytest.raises(AssertionError, match=r"watermark=-0.1 must be at least 0"):
        BlockSpaceManager(4, 8, 8, watermark=-0.1)


# Growth, copy-on-write, fork.


def test_append_takes_a_block_only_when_the_last_is_full() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=4, num_cpu_blocks=0)
    group = make_group(3, 4)
    start(manager, group)
    seq = group.get_seqs()[0]
    tables = []
    for _ in range(6):
        assert append_token(manager, seq) is None
        tables.append(manager.get_block_table(seq))
    assert tables == [[3], [3, 2], [3, 2], [3, 2], [3, 2], [3, 2, 1]]


def test_append_must_follow_every_token() -> None:
    manager = BlockSpaceManager(1, num_gpu_blocks=8, num_cpu_blocks=0)
    group = make_group(1, 1)
    start(manager, group)
    seq = group.get_seqs()[0]
    seq.append_token_id(7, {7: 0.0})
    seq.append_token_id(7, {7: 0.0})
    with pytest.raises(AssertionError, match="num_missing=2 must be at most 1"):
        manager.append_slot(seq)


def test_can_append_slot_wants_a_block_for_each_running_sequence() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=3, num_cpu_blocks=0)
    group = make_group(3, 4, seq_ids=(0, 1))
    start(manager, group)
    assert manager.can_append_slot(group)  # two sequences, two blocks
    manager.gpu_allocator.allocate()
    assert not manager.can_append_slot(group)
    group.get_seqs()[0].status = SequenceStatus.FINISHED_STOPPED
    assert manager.can_append_slot(group)
    assert manager.can_append_slots(group)


def test_copy_on_write_moves_the_first_writer_and_leaves_the_last() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=8, num_cpu_blocks=0)
    group = make_group(6, 4, seq_ids=(0, 1))
    start(manager, group)
    first, second = group.get_seqs()
    assert append_token(manager, first) == (6, 5)
    assert manager.get_block_table(first) == [7, 5]
    assert manager.get_block_table(second) == [7, 6]
    assert [block.ref_count for block in manager.block_tables[0]] == [2, 1]
    assert [block.ref_count for block in manager.block_tables[1]] == [2, 1]
    assert append_token(manager, second) is None
    check_block_space_manager(manager)


def test_append_slots_is_the_later_name() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=8, num_cpu_blocks=0)
    group = make_group(2, 4, seq_ids=(0, 1))
    start(manager, group)
    pairs = []
    for seq in group.get_seqs():
        seq.append_token_id(7, {7: 0.0})
        pairs.append(manager.append_slots(seq))
    assert pairs == [[(7, 6)], []]
    with pytest.raises(AssertionError, match="num_lookahead_slots=1 must be 0"):
        manager.append_slots(seq, 1)
    with pytest.raises(AssertionError, match="num_lookahead_slots=1 must be 0"):
        manager.can_append_slots(group, 1)


def test_copy_on_write_that_runs_out_changes_nothing() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=1, num_cpu_blocks=0)
    group = make_group(2, 4, seq_ids=(0, 1))
    start(manager, group)
    seq = group.get_seqs()[0]
    assert error_of(append_token, manager, seq) == OUT_OF_MEMORY
    assert manager.get_block_table(seq) == [0]
    check_block_space_manager(manager)


def test_fork_holds_every_block_of_the_parent_and_takes_none() -> None:
    manager = BlockSpaceManager(4, num_gpu_blocks=2, num_cpu_blocks=0)
    group = make_group(8, 4)
    start(manager, group)
    parent = group.get_seqs()[0]
    child = parent.fork(1)
    manager.fork(parent, child)
    assert manager.get_block_table(child) == manager.get_block_table(parent) == [1, 0]
    assert [block.ref_count for block in manager.block_tables[0]] == [2, 2]
    manager.free(parent)
    assert manager.get_num_free_gpu_blocks() == 0
    manager.free(child)
    assert manager.get_num_free_gpu_blocks() == 2


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


# Random walks.


class V0Walk(RuleBasedStateMachine):
    """Every operation on simulated memory: each sequence must read back the tokens that it wrote.

    memory[device, block_number] holds block_size tokens. Writing, copying and swapping go where the manager
    says, and freed blocks are wiped, so a block lost, shared wrongly or freed too early shows.
    """

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_gpu_blocks=st.integers(2, 12),
        num_cpu_blocks=st.integers(0, 8),
        watermark=st.sampled_from([0.0, 0.1, 0.3]),
        window_blocks=st.sampled_from([None, None, 1, 2, 3]),
    )
    def build(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float,
        window_blocks: int | None,
    ) -> None:
        self.window = None if window_blocks is None else window_blocks * block_size
        self.manager = BlockSpaceManager(block_size, num_gpu_blocks, num_cpu_blocks, watermark, self.window)
        self.block_size = block_size
        self.memory: dict[tuple[Device, int], list[int]] = {}
        self.groups: list[SequenceGroup] = []
        self.prefixes = [] if self.window else [Prefix([100 + i for i in range(block_size)], block_size)]
        self.num_seqs = 0
        self.num_tokens = 0

    def next_id(self) -> int:
        self.num_seqs += 1
        return self.num_seqs

    def write(self, seq: Sequence, position: int) -> None:
        block = self.manager.block_tables[seq.seq_id][position // self.block_size]
        slots = self.memory.setdefault((block.device, block.block_number), [-1] * self.block_size)
        slots[position % self.block_size] = seq.get_token_ids()[position]

    def with_status(self, status: SequenceStatus) -> list[SequenceGroup]:
        return [group for group in self.groups if group.num_seqs(status)]

    @rule(data=st.data(), num_seqs=st.integers(1, 2), with_prefix=st.booleans())
    def admit(self, data: st.DataObject, num_seqs: int, with_prefix: bool) -> None:
        prefix = self.prefixes[0] if with_prefix and self.prefixes else None
        num_tokens = data.draw(st.integers(1, 4 * self.block_size))
        prompt = list(range(1000 * self.num_seqs, 1000 * self.num_seqs + num_tokens))
        tokens = [*(prefix.token_ids if prefix else ()), *prompt]
        seqs = [Sequence(self.next_id(), "", list(tokens), self.block_size) for _ in range(num_seqs)]
        group = SequenceGroup("", seqs, prefix=prefix)
        num_held = 0 if prefix is None or not prefix.allocated else prefix.get_num_blocks()
        if self.manager.can_allocate(group) is not AllocStatus.OK:
            return
        start(self.manager, group)
        for position in range(num_held * self.block_size, len(tokens)):
            self.write(seqs[0], position)
        self.groups.append(group)

    @precondition(lambda self: self.with_status(SequenceStatus.RUNNING))
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.with_status(SequenceStatus.RUNNING)))
        if not self.manager.can_append_slot(group):
            return
        for seq in group.get_seqs(SequenceStatus.RUNNING):
            self.num_tokens += 1
            token = -1000 - self.num_tokens
            seq.append_token_id(token, {token: 0.0})
            copy_pair = self.manager.append_slot(seq)
            if copy_pair is not None:
                source, destination = copy_pair
                self.memory[Device.GPU, destination] = self.memory[Device.GPU, source].copy()
            self.write(seq, seq.get_len() - 1)

    @precondition(lambda self: self.with_status(SequenceStatus.RUNNING))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.with_status(SequenceStatus.RUNNING)))
        parent = data.draw(st.sampled_from(group.get_seqs(SequenceStatus.RUNNING)))
        child = parent.fork(self.next_id())
        group.add(child)
        self.manager.fork(parent, child)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.groups))
        seq = data.draw(st.sampled_from(group.get_unfinished_seqs()))
        self.manager.free(seq)
        seq.status = SequenceStatus.FINISHED_STOPPED
        if group.is_finished():
            self.groups.remove(group)

    @precondition(lambda self: self.with_status(SequenceStatus.RUNNING))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.with_status(SequenceStatus.RUNNING)))
        if self.manager.can_swap_out(group):
            mapping = self.manager.swap_out(group)
            self.swap(group, mapping, Device.GPU, Device.CPU, SequenceStatus.SWAPPED)

    @precondition(lambda self: self.with_status(SequenceStatus.SWAPPED))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.with_status(SequenceStatus.SWAPPED)))
        if self.manager.can_swap_in(group):
            mapping = self.manager.swap_in(group)
            self.swap(group, mapping, Device.CPU, Device.GPU, SequenceStatus.RUNNING)

    def swap(
        self,
        group: SequenceGroup,
        mapping: dict[int, int],
        source: Device,
        target: Device,
        status: SequenceStatus,
    ) -> None:
        for source_number, target_number in mapping.items():
            self.memory[target, target_number] = self.memory[source, source_number].copy()
        for seq in group.get_unfinished_seqs():
            seq.status = status

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.groups = []

    @invariant()
    def conserves_blocks(self) -> None:
        if hasattr(self, "manager"):
            check_block_space_manager(self.manager, self.prefixes)

    @invariant()
    def reads_back_what_was_written(self) -> None:
        if not hasattr(self, "manager"):
            return
        for allocator in (self.manager.gpu_allocator, self.manager.cpu_allocator):
            for block in allocator.free_blocks:
                self.memory.pop((block.device, block.block_number), None)
        for group in self.groups:
            for seq in group.get_unfinished_seqs():
                table = self.manager.block_tables[seq.seq_id]
                tokens = seq.get_token_ids()
                # A swapped sequence has left its prefix behind.
                on_cpu = seq.status is SequenceStatus.SWAPPED and group.prefix is not None
                skipped = len(group.prefix.token_ids) if on_cpu and group.prefix else 0
                first = max(skipped, 0 if self.window is None else len(tokens) - self.window)
                for position in range(first, len(tokens)):
                    block = table[(position - skipped) // self.block_size]
                    slots = self.memory[block.device, block.block_number]
                    assert slots[position % self.block_size] == tokens[position]


TestV0Walk = V0Walk.TestCase
TestV0Walk.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
