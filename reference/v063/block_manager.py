"""Manager of the memory of requests: whether one may have some, giving it, taking it back, swapping it."""

from .block import AllocStatus, Block, Device
from .block_table import BlockTable, cdiv
from .cpu_gpu import CpuGpuBlockAllocator
from .prefix_caching import ComputedBlocksTracker, PrefixCachingBlockAllocator
from .sequence import Sequence, SequenceGroup, SequenceStatus


class SelfAttnBlockSpaceManager:
    """A block table per sequence, over one pair of allocators.

    `can_...` answers never change anything, and assume that nothing can be shared. Lookahead slots are empty
    slots to have ready behind a sequence's tokens (speculative decoding writes there).

    Args:
        block_size: tokens per block.
        num_gpu_blocks, num_cpu_blocks: blocks on the device and on the host.
        watermark: part of the GPU's blocks to leave free when a request is admitted or swapped in, 0 or more.
        sliding_window: tokens that attention reaches back, if it has such a limit.
        enable_caching: share full blocks by content.

    vLLM 0.6.3 names this class BlockSpaceManagerV2; from 0.6.4 on it has the name used here.
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float = 0.01,
        sliding_window: int | None = None,
        enable_caching: bool = False,
    ) -> None:
        assert watermark >= 0.0, f"{watermark=} must be at least 0"
        self.block_size = block_size
        self.num_total_blocks = {Device.GPU: num_gpu_blocks, Device.CPU: num_cpu_blocks}
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.max_blocks_in_window: int | None = None
        if sliding_window is not None:
            # One block more since // rounds down, and one since the window need not begin where a block does.
            self.max_blocks_in_window = sliding_window // block_size + 2
        self.allocator = CpuGpuBlockAllocator(num_gpu_blocks, num_cpu_blocks, block_size, enable_caching)
        self.block_tables: dict[int, BlockTable] = {}  # by seq_id
        self._last_access: dict[int, float] = {}  # by seq_id
        gpu = self.allocator.gpu
        self._cache = gpu if isinstance(gpu, PrefixCachingBlockAllocator) else None
        self._computed = None if self._cache is None else ComputedBlocksTracker(self._cache)

    # Admission.

    def can_allocate(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """Return whether the waiting request fits above the watermark: now, in an empty GPU, or never.

        Looks at the first waiting sequence: all are taken to have the same prompt.
        """
        seq = seq_group.get_seqs(SequenceStatus.WAITING)[0]
        num_required_blocks = cdiv(len(seq.get_token_ids()) + num_lookahead_slots, self.block_size)
        if self.max_blocks_in_window is not None:
            num_required_blocks = min(num_required_blocks, self.max_blocks_in_window)
        if self.num_total_blocks[Device.GPU] - num_required_blocks < self.watermark_blocks:
            return AllocStatus.NEVER
        if self.get_num_free_gpu_blocks() - num_required_blocks < self.watermark_blocks:
            return AllocStatus.LATER
        return AllocStatus.OK

    def allocate(self, seq_group: SequenceGroup) -> None:
        """Give tables to the waiting sequences; all but the first are forks of the first.

        AssertionError: one has a table already. NoFreeBlocksError: can_allocate was not asked.
        """
        first_seq, *other_seqs = seq_group.get_seqs(SequenceStatus.WAITING)
        assert not self.block_tables.keys() & {seq.seq_id for seq in (first_seq, *other_seqs)}, (
            "there is a table already"
        )
        block_table = BlockTable(self.block_size, self.allocator, self.max_blocks_in_window)
        if first_seq.get_token_ids():
            block_table.allocate(first_seq.get_token_ids())
        self.block_tables[first_seq.seq_id] = block_table
        for seq in other_seqs:
            self.block_tables[seq.seq_id] = block_table.fork()

    # Growth.

    def can_append_slots(self, seq_group: SequenceGroup, num_lookahead_slots: int) -> bool:
        """Return whether the running sequences' new tokens fit even if every touched block must be new."""
        num_touched_blocks = sum(
            self._num_blocks_touched(seq, num_lookahead_slots)
            for seq in seq_group.get_seqs(SequenceStatus.RUNNING)
        )
        return num_touched_blocks <= self.get_num_free_gpu_blocks()

    def _num_blocks_touched(self, seq: Sequence, num_lookahead_slots: int) -> int:
        block_table = self.block_tables[seq.seq_id]
        num_new_tokens = len(seq.get_token_ids()) - block_table.num_tokens
        return block_table.num_blocks_touched_by_append(num_new_tokens, num_lookahead_slots)

    def append_slots(self, seq: Sequence, num_lookahead_slots: int) -> list[tuple[int, int]]:
        """Put the sequence's new tokens into its table; return the (source, target) ids to copy first.

        NoFreeBlocksError: can_append_slots was not asked.
        """
        block_table = self.block_tables[seq.seq_id]
        block_table.append_token_ids(
            seq.get_token_ids()[block_table.num_tokens :],
            num_lookahead_slots,
            seq.data.get_num_computed_tokens(),
        )
        return self.allocator.gpu.take_copies()

    def fork(self, parent_seq: Sequence, child_seq: Sequence) -> None:
        """Let the child share the parent's blocks. Nothing happens if the parent has no table."""
        if parent_seq.seq_id in self.block_tables:
            self.block_tables[child_seq.seq_id] = self.block_tables[parent_seq.seq_id].fork()

    # The end.

    def free(self, seq: Sequence) -> None:
        """Take a sequence's blocks back, stamped with its last access. Nothing happens if it has no table.

        KeyError: it has an access time and lies on the host, whose blocks take no times; nothing is freed.
        """
        block_table = self.block_tables.get(seq.seq_id)
        if block_table is None:
            return
        if self._cache is not None and self._computed is not None:
            if seq.seq_id in self._last_access:
                self._cache.mark_blocks_as_accessed(block_table.block_ids, self._last_access[seq.seq_id])
                del self._last_access[seq.seq_id]
            self._computed.remove(seq.seq_id)
        block_table.free()
        del self.block_tables[seq.seq_id]

    # Tables and counts.

    def get_block_table(self, seq: Sequence) -> list[int]:
        """Return the sequence's block ids, first to last. KeyError: it has no table."""
        return self.block_tables[seq.seq_id].block_ids

    def get_num_free_gpu_blocks(self) -> int:
        return self.allocator.gpu.num_free_blocks

    def get_num_free_cpu_blocks(self) -> int:
        return self.allocator.allocators[Device.CPU].num_free_blocks

    # Prefix caching.

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Return full blocks found over full blocks looked for, from 0 to 1; -1 without caching."""
        return self.allocator.allocators[device].hit_rate

    def access_all_blocks_in_seq(self, seq: Sequence, now: float) -> None:
        """Note that the sequence runs.

        Its blocks learn the time when it is freed, just before they can be evicted.
        """
        if self._cache is not None:
            self._last_access[seq.seq_id] = now

    def mark_blocks_as_computed(self) -> None:
        """Mark the blocks that the scheduled step fills as computed, for all sequences."""
        if self._cache is not None:
            self._cache.mark_blocks_as_computed()

    def get_common_computed_block_ids(self, seqs: list[Sequence]) -> list[int]:
        """Return the first blocks that all the sequences share and that need no computing.

        A sequence without any is passed over.
        """
        if self._computed is None:
            return []
        computed = [self._computed.computed_ids(seq.seq_id, self.get_block_table(seq)) for seq in seqs]
        common: list[int] = []
        for nth_ids in zip(*filter(None, computed), strict=False):
            if len(set(nth_ids)) > 1:
                break
            common.append(nth_ids[0])
        return common

    # Swapping.

    def can_swap_in(self, seq_group: SequenceGroup, num_lookahead_slots: int) -> AllocStatus:
        """Return whether the swapped sequences, with their new tokens and lookahead slots, fit on the GPU."""
        return self._can_swap(seq_group, Device.GPU, SequenceStatus.SWAPPED, num_lookahead_slots)

    def can_swap_out(self, seq_group: SequenceGroup) -> bool:
        """Return whether the running sequences fit on the host now."""
        return self._can_swap(seq_group, Device.CPU, SequenceStatus.RUNNING) == AllocStatus.OK

    def _can_swap(
        self, seq_group: SequenceGroup, device: Device, status: SequenceStatus, num_lookahead_slots: int = 0
    ) -> AllocStatus:
        """Count full blocks and those that new tokens touch; empty blocks held ready are not seen."""
        seqs = seq_group.get_seqs(status)
        blocks: list[Block] = [block for seq in seqs for block in self.block_tables[seq.seq_id].blocks]
        allocator = self.allocator.allocators[device]
        # The last block, if not full, and those that new tokens need; then the full ones.
        num_blocks_touched = sum(self._num_blocks_touched(seq, num_lookahead_slots) for seq in seqs)
        num_blocks_touched += allocator.num_full_blocks_touched(blocks)

        watermark_blocks = self.watermark_blocks if device == Device.GPU else 0
        if len(allocator.block_ids) < num_blocks_touched:
            return AllocStatus.NEVER
        if allocator.num_free_blocks - num_blocks_touched < watermark_blocks:
            return AllocStatus.LATER
        return AllocStatus.OK

    def swap_in(self, seq_group: SequenceGroup) -> list[tuple[int, int]]:
        """Move the swapped sequences to the GPU; return the (host, device) places to copy, both from 0."""
        return self._swap(seq_group, SequenceStatus.SWAPPED, Device.CPU, Device.GPU)

    def swap_out(self, seq_group: SequenceGroup) -> list[tuple[int, int]]:
        """Move the running sequences to the host; return the (device, host) places to copy, both from 0."""
        return self._swap(seq_group, SequenceStatus.RUNNING, Device.GPU, Device.CPU)

    def _swap(
        self, seq_group: SequenceGroup, status: SequenceStatus, source: Device, target: Device
    ) -> list[tuple[int, int]]:
        """Move sequences of a status. ValueError: the window has dropped blocks of one.

        NoFreeBlocksError: can_swap was not asked.
        """
        return [
            pair
            for seq in seq_group.get_seqs(status)
            for pair in self.allocator.swap(self.block_tables[seq.seq_id].blocks, source, target)
        ]
