"""The v0 oracle: blocks, sequences, the allocator, admission and growth."""

import pytest

from reference.invariants import check_block_space_manager
from reference.v0.block import Device, LogicalTokenBlock, PhysicalTokenBlock
from reference.v0.block_manager import AllocStatus, BlockAllocator, BlockSpaceManager
from reference.v0.sequence import Prefix, Sequence, SequenceStatus
from tests.reference.v0_requests import OUT_OF_MEMORY, append_token, error_of, make_group, start

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
