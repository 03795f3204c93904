"""The block manager of the 0.6.3 oracle: requests admitted, grown, forked, swapped and freed."""

import pytest

from reference.v063.block import AllocStatus, Device, NoFreeBlocksError
from reference.v063.block_manager import SelfAttnBlockSpaceManager
from reference.v063.prefix_caching import NEVER_ACCESSED
from reference.v063.sequence import Sequence, SequenceGroup, SequenceStatus


def group(request_id, *prompts):
    """Return a request; its sequences have ids 10 * request_id, 10 * request_id + 1, ..."""
    seqs = [Sequence(10 * request_id + i, prompt) for i, prompt in enumerate(prompts)]
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
    with pytest.raises(AssertionError, match="watermark"):
        SelfAttnBlockSpaceManager(4, 10, 0, watermark=-0.1)


def test_can_allocate_with_a_window_asks_for_no_more_than_the_window():
    manager = SelfAttnBlockSpaceManager(4, 6, 0, watermark=0, sliding_window=8)
    assert manager.max_blocks_in_window == 4
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
    manager.mark_blocks_as_computed()
    new = start(manager, 1, [1, 2, 3, 4, 6], [1, 2, 3, 4, 6]).seqs
    assert manager.get_common_computed_block_ids(new) == [0, 1]
    assert manager.get_prefix_cache_hit_rate(Device.GPU) == 0.5


def test_last_access_reaches_the_evictor_when_the_sequence_is_freed():
    manager = SelfAttnBlockSpaceManager(2, 4, 0, watermark=0, enable_caching=True)
    (first,) = start(manager, 0, [1, 2]).seqs
    (second,) = start(manager, 1, [3, 4]).seqs
    manager.access_all_blocks_in_seq(first, 2.0)
    manager.access_all_blocks_in_seq(second, 1.0)
    gpu = manager.allocator.gpu
    assert list(gpu.last_accessed.values()) == [NEVER_ACCESSED] * 2
    for seq in (second, first):
        manager.free(seq)
    assert [(block_id, block.last_accessed) for block_id, block in gpu.evictor.table.items()] == [
        (1, 1.0),
        (0, 2.0),
    ]
    # Two free ids, then the one accessed first.
    assert manager.get_block_table(start(manager, 2, [9] * 5).seqs[0]) == [2, 3, 1]


def test_window_through_the_manager():
    manager = SelfAttnBlockSpaceManager(2, 8, 2, watermark=0, sliding_window=2)
    seq_group = start(manager, 0, [0] * 10)
    (seq,) = seq_group.seqs
    seq.append_token_id(1)
    manager.append_slots(seq, 0)  # 10 // 2 - 3 blocks are out of the window
    null_block = manager.allocator.null_block
    assert [block is null_block for block in manager.block_tables[0].blocks] == [True] * 2 + [False] * 4
    assert manager.get_num_free_gpu_blocks() == 8 - 1 - 4
    with pytest.raises(ValueError, match="the null block"):
        manager.swap_out(seq_group)
    assert len(manager.get_block_table(seq)) == 6
