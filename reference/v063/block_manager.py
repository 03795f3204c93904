"""What the scheduler talks to: may this request have memory, give it, take it back, move it to the host."""

from .block_table import BlockTable
from .cpu_gpu_block_allocator import CpuGpuBlockAllocator
from .interfaces import AllocStatus, Block, Device
from .prefix_caching_block import ComputedBlocksTracker, LastAccessBlocksTracker
from .sequence import Sequence, SequenceGroup, SequenceStatus


class SelfAttnBlockSpaceManager:
    """A block table per sequence, over one pair of allocators.

    `can_...` answers never change anything, and assume that nothing can be shared. Lookahead slots are empty
    slots to have ready behind a sequence's tokens (speculative decoding writes there).

    Args:
        block_size: tokens per block.
        num_gpu_blocks, num_cpu_blocks: blocks on the device and on the host.
        watermark: share of the GPU's blocks to leave free when a request is admitted or swapped in, 0 or
            more.
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
        self.num_total_gpu_blocks = num_gpu_blocks
        self.num_total_cpu_blocks = num_cpu_blocks
        self.watermark = watermark
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.enable_caching = enable_caching
        self.sliding_window = sliding_window
        self.max_block_sliding_window: int | None = None
        if sliding_window is not None:
            # One block more since // rounds down, and one since the window need not begin where a block does.
            self.max_block_sliding_window = sliding_window // block_size + 2
        self.block_allocator = CpuGpuBlockAllocator.create(
            allocator_type="prefix_caching" if enable_caching else "naive",
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=block_size,
        )
        self.block_tables: dict[int, BlockTable] = {}  # by seq_id
        self.cross_block_tables: dict[str, BlockTable] = {}  # by request_id: the encoder's
        self._computed_blocks_tracker = ComputedBlocksTracker(self.block_allocator)
        self._last_access_blocks_tracker = LastAccessBlocksTracker(self.block_allocator)

    # Admission.

    def can_allocate(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """Whether the waiting request fits above the watermark: now, in an empty GPU, or never.

        Looks at the first waiting sequence: all are taken to have the same prompt.
        """
        self._check_encoder(seq_group)
        seq = seq_group.get_seqs(SequenceStatus.WAITING)[0]
        num_required_blocks = BlockTable.get_num_required_blocks(
            seq.get_token_ids(), self.block_size, num_lookahead_slots
        )
        encoder_seq = seq_group.get_encoder_seq()
        if encoder_seq is not None:
            num_required_blocks += BlockTable.get_num_required_blocks(
                encoder_seq.get_token_ids(), self.block_size
            )
        if self.max_block_sliding_window is not None:
            num_required_blocks = min(num_required_blocks, self.max_block_sliding_window)
        if self.num_total_gpu_blocks - num_required_blocks < self.watermark_blocks:
            return AllocStatus.NEVER
        if self.get_num_free_gpu_blocks() - num_required_blocks < self.watermark_blocks:
            return AllocStatus.LATER
        return AllocStatus.OK

    def allocate(self, seq_group: SequenceGroup) -> None:
        """Give tables to the waiting sequences; all but the first are forks of the first.

        AssertionError: one has a table already. NoFreeBlocksError: can_allocate was not asked.
        """
        waiting_seqs = seq_group.get_seqs(SequenceStatus.WAITING)
        assert not self.block_tables.keys() & {seq.seq_id for seq in waiting_seqs}, "there is a table already"
        first_seq = waiting_seqs[0]
        self._add_table(first_seq, self._allocate_sequence(first_seq))
        for seq in waiting_seqs[1:]:
            self._add_table(seq, self.block_tables[first_seq.seq_id].fork())

        assert seq_group.request_id not in self.cross_block_tables, "there is a table already"
        self._check_encoder(seq_group)
        encoder_seq = seq_group.get_encoder_seq()
        if encoder_seq is not None:
            self.cross_block_tables[seq_group.request_id] = self._allocate_sequence(encoder_seq)

    def _allocate_sequence(self, seq: Sequence) -> BlockTable:
        block_table = BlockTable(
            block_size=self.block_size,
            block_allocator=self.block_allocator,
            max_block_sliding_window=self.max_block_sliding_window,
        )
        if seq.get_token_ids():
            block_table.allocate(seq.get_token_ids())
        return block_table

    def _add_table(self, seq: Sequence, block_table: BlockTable) -> None:
        self.block_tables[seq.seq_id] = block_table
        self._computed_blocks_tracker.add_seq(seq.seq_id)
        self._last_access_blocks_tracker.add_seq(seq.seq_id)

    def _check_encoder(self, seq_group: SequenceGroup) -> None:
        if seq_group.is_encoder_decoder():
            if self.max_block_sliding_window is not None:
                raise NotImplementedError("a sliding window with an encoder is not supported")
            if self.enable_caching:
                raise NotImplementedError("prefix caching with an encoder is not supported")

    # Growth.

    def can_append_slots(self, seq_group: SequenceGroup, num_lookahead_slots: int) -> bool:
        """Whether the running sequences' new tokens fit even if every touched block must be new."""
        num_touched_blocks = 0
        for seq in seq_group.get_seqs(SequenceStatus.RUNNING):
            block_table = self.block_tables[seq.seq_id]
            num_touched_blocks += block_table.get_num_blocks_touched_by_append_slots(
                block_table.get_unseen_token_ids(seq.get_token_ids()), num_lookahead_slots
            )
        return num_touched_blocks <= self.get_num_free_gpu_blocks()

    def append_slots(self, seq: Sequence, num_lookahead_slots: int) -> list[tuple[int, int]]:
        """Put the sequence's new tokens into its table; returns the (source, target) ids to copy first.

        NoFreeBlocksError: can_append_slots was not asked.
        """
        block_table = self.block_tables[seq.seq_id]
        block_table.append_token_ids(
            block_table.get_unseen_token_ids(seq.get_token_ids()),
            num_lookahead_slots,
            seq.data.get_num_computed_tokens(),
        )
        return self.block_allocator.clear_copy_on_writes()

    def fork(self, parent_seq: Sequence, child_seq: Sequence) -> None:
        """Let the child share the parent's blocks. Nothing happens if the parent has no table."""
        if parent_seq.seq_id in self.block_tables:
            self._add_table(child_seq, self.block_tables[parent_seq.seq_id].fork())

    # The end.

    def free(self, seq: Sequence) -> None:
        """Take a sequence's blocks back, stamped with its last access. Nothing happens if it has no table.

        KeyError: it has an access time and lies on the host, whose blocks take no times; nothing is freed.
        """
        block_table = self.block_tables.get(seq.seq_id)
        if block_table is None:
            return
        self._last_access_blocks_tracker.update_seq_blocks_last_access(
            seq.seq_id, block_table.physical_block_ids
        )
        self._last_access_blocks_tracker.remove_seq(seq.seq_id)
        self._computed_blocks_tracker.remove_seq(seq.seq_id)
        block_table.free()
        del self.block_tables[seq.seq_id]

    def free_cross(self, seq_group: SequenceGroup) -> None:
        """Take the encoder's blocks back. Nothing happens if there are none."""
        block_table = self.cross_block_tables.pop(seq_group.request_id, None)
        if block_table is not None:
            block_table.free()

    # Tables and counts.

    def get_block_table(self, seq: Sequence) -> list[int]:
        """The sequence's block ids, first to last. KeyError: it has no table."""
        return self.block_tables[seq.seq_id].physical_block_ids

    def get_cross_block_table(self, seq_group: SequenceGroup) -> list[int]:
        """The encoder's block ids. KeyError: it has no table."""
        return self.cross_block_tables[seq_group.request_id].physical_block_ids

    def get_num_free_gpu_blocks(self) -> int:
        return self.block_allocator.get_num_free_blocks(Device.GPU)

    def get_num_free_cpu_blocks(self) -> int:
        return self.block_allocator.get_num_free_blocks(Device.CPU)

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        """Share of full blocks found in the cache, 0 to 1; -1 without caching."""
        return self.block_allocator.get_prefix_cache_hit_rate(device)

    # Prefix caching.

    def access_all_blocks_in_seq(self, seq: Sequence, now: float) -> None:
        """Note that the sequence runs.

        Its blocks learn the time when it is freed, just before they can be evicted.
        """
        if self.enable_caching:
            self._last_access_blocks_tracker.update_last_access(seq.seq_id, now)

    def mark_blocks_as_computed(self, seq_group: SequenceGroup, token_chunk_size: int) -> None:
        """Note that the step is scheduled: what became full for it counts as computed.

        For all groups at once.
        """
        self.block_allocator.mark_blocks_as_computed([])

    def get_common_computed_block_ids(self, seqs: list[Sequence]) -> list[int]:
        """The first blocks that all the sequences share and that need no computing."""
        return self.block_allocator.get_common_computed_block_ids(
            [
                self._computed_blocks_tracker.get_cached_computed_blocks_and_update(
                    seq.seq_id, self.block_tables[seq.seq_id].physical_block_ids
                )
                for seq in seqs
            ]
        )

    # Swapping.

    def can_swap_in(self, seq_group: SequenceGroup, num_lookahead_slots: int) -> AllocStatus:
        """Whether the swapped sequences, with their new tokens and lookahead slots, fit on the GPU."""
        return self._can_swap(seq_group, Device.GPU, SequenceStatus.SWAPPED, num_lookahead_slots)

    def can_swap_out(self, seq_group: SequenceGroup) -> bool:
        """Whether the running sequences fit on the host now."""
        return self._can_swap(seq_group, Device.CPU, SequenceStatus.RUNNING) == AllocStatus.OK

    def _can_swap(
        self, seq_group: SequenceGroup, device: Device, status: SequenceStatus, num_lookahead_slots: int = 0
    ) -> AllocStatus:
        """Counts full blocks and those that new tokens touch; empty blocks held ready are not seen."""
        blocks: list[Block] = []
        num_blocks_touched = 0
        for seq in seq_group.get_seqs(status):
            block_table = self.block_tables[seq.seq_id]
            # The last block, not full, and those that new tokens need; the full ones are counted below.
            num_blocks_touched += block_table.get_num_blocks_touched_by_append_slots(
                block_table.get_unseen_token_ids(seq.get_token_ids()), num_lookahead_slots
            )
            blocks += block_table.blocks
        num_blocks_touched += self.block_allocator.get_num_full_blocks_touched(blocks, device)

        watermark_blocks = self.watermark_blocks if device == Device.GPU else 0
        if self.block_allocator.get_num_total_blocks(device) < num_blocks_touched:
            return AllocStatus.NEVER
        if self.block_allocator.get_num_free_blocks(device) - num_blocks_touched < watermark_blocks:
            return AllocStatus.LATER
        return AllocStatus.OK

    def swap_in(self, seq_group: SequenceGroup) -> list[tuple[int, int]]:
        """Move the swapped sequences to the GPU; returns the (host, device) places to copy, both from 0."""
        return self._swap(seq_group, SequenceStatus.SWAPPED, Device.CPU, Device.GPU)

    def swap_out(self, seq_group: SequenceGroup) -> list[tuple[int, int]]:
        """Move the running sequences to the host; returns the (device, host) places to copy, both from 0."""
        return self._swap(seq_group, SequenceStatus.RUNNING, Device.GPU, Device.CPU)

    def _swap(
        self, seq_group: SequenceGroup, status: SequenceStatus, src: Device, dst: Device
    ) -> list[tuple[int, int]]:
        """ValueError: the window has dropped blocks of a sequence.

        NoFreeBlocksError: can_swap was not asked.
        """
        place = self.block_allocator.get_physical_block_id
        mapping = []
        for seq in seq_group.get_seqs(status):
            block_table = self.block_tables[seq.seq_id]
            swapped = self.block_allocator.swap(block_table.blocks, src, dst)
            block_table.update(block_table.blocks)
            mapping += [(place(src, old), place(dst, new)) for old, new in swapped.items()]
        return mapping


BlockSpaceManagerV2 = SelfAttnBlockSpaceManager
