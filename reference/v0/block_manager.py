"""vLLM v0's block manager (0.3.3): two stacks of free blocks, and a table of blocks for each sequence.

A block's reference count is its number of holders: the sequences whose table contains it, once each, and the
prefix that owns it. A block without holders lies on its device's stack: last freed, first taken.

Where this oracle is stricter than vLLM 0.3.3, because there the outcome is left to chance or is wrong:

- `free` and `reset` give blocks back in the order of the table (vLLM walks a set of objects).
- An operation that raises leaves everything as it was (vLLM stops half way).
- A table that wraps around its sliding window names a block several times and is still one holder. vLLM
  counts each entry in `fork`, `swap_out` and `swap_in`, and then leaks the block or frees it twice.
- Copy-on-write in such a table replaces the block at all its entries. vLLM replaces the last one only, so the
  table goes on using, and later frees, a block it no longer holds.
- A shared prefix together with a sliding window is refused. vLLM lets the window write over the prefix.

AssertionErrors are vLLM's own, kept for those who test for them.
"""

import enum

from .block import BlockTable, Device, PhysicalTokenBlock
from .sequence import Sequence, SequenceGroup, SequenceStatus

_OUT_OF_MEMORY = "Out of memory! No free blocks are available."


def _once_each(block_table: BlockTable) -> BlockTable:
    """Return the blocks of a table without repetitions, in order."""
    return list(dict.fromkeys(block_table))


class BlockAllocator:
    """The free blocks of one device, as a stack: at first the highest number is on top."""

    def __init__(self, device: Device, block_size: int, num_blocks: int) -> None:
        self.device = device
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.free_blocks: BlockTable = [
            PhysicalTokenBlock(device, block_number, block_size) for block_number in range(num_blocks)
        ]

    def allocate(self) -> PhysicalTokenBlock:
        """Take the top block, for one holder. ValueError when the stack is empty."""
        if not self.free_blocks:
            raise ValueError(_OUT_OF_MEMORY)
        block = self.free_blocks.pop()
        block.ref_count = 1
        return block

    def free(self, block: PhysicalTokenBlock) -> None:
        """Drop one reference; the last one puts the block on top. ValueError when there is none."""
        if block.ref_count == 0:
            raise ValueError(f"Double free! {block} is already freed.")
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_blocks.append(block)

    def get_num_free_blocks(self) -> int:
        return len(self.free_blocks)


class AllocStatus(enum.Enum):
    """The answer of `BlockSpaceManager.can_allocate`.

    OK: now. LATER: not now, but in an empty cache it would fit. NEVER: not even in an empty cache.
    """

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class BlockSpaceManager:
    """Maps the logical blocks of sequences to physical blocks on two devices.

    block_size: tokens per block.
    watermark: the share of the GPU's blocks that admission (`can_allocate`, `can_swap_in`) leaves free, >= 0.
    sliding_window: tokens a sequence attends to, a multiple of block_size, or None for all of them. With a
        window a sequence has at most window / block_size blocks and writes round and round in them.
    block_tables: the blocks of each sequence, by seq_id.
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float = 0.01,
        sliding_window: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_total_gpu_blocks = num_gpu_blocks
        self.num_total_cpu_blocks = num_cpu_blocks

        self.block_sliding_window: int | None = None
        if sliding_window is not None:
            assert sliding_window % block_size == 0, f"{sliding_window=} must be a multiple of {block_size=}"
            self.block_sliding_window = sliding_window // block_size

        assert watermark >= 0.0, f"{watermark=} must be at least 0"
        self.watermark = watermark
        self.watermark_blocks = int(watermark * num_gpu_blocks)

        self.gpu_allocator = BlockAllocator(Device.GPU, block_size, num_gpu_blocks)
        self.cpu_allocator = BlockAllocator(Device.CPU, block_size, num_cpu_blocks)
        self.block_tables: dict[int, BlockTable] = {}

    # Admission: a group's first blocks.

    def can_allocate(self, seq_group: SequenceGroup) -> AllocStatus:
        """Return whether the prompt of the group's waiting sequences fits above the watermark."""
        seq = seq_group.get_seqs(status=SequenceStatus.WAITING)[0]
        num_required_blocks = len(seq.logical_token_blocks)
        if seq_group.prefix is not None and seq_group.prefix.allocated:
            num_required_blocks -= seq_group.prefix.get_num_blocks()
        if self.block_sliding_window is not None:
            num_required_blocks = min(num_required_blocks, self.block_sliding_window)

        if self.num_total_gpu_blocks - num_required_blocks < self.watermark_blocks:
            return AllocStatus.NEVER
        if self.gpu_allocator.get_num_free_blocks() - num_required_blocks < self.watermark_blocks:
            return AllocStatus.LATER
        return AllocStatus.OK

    def allocate(self, seq_group: SequenceGroup) -> None:
        """Give the group's waiting sequences one table for the prompt they share.

        Blocks of an allocated prefix come first; a prefix not yet allocated takes its share of the new blocks
        and becomes a holder of them.

        Raises: ValueError when blocks run out; NotImplementedError for a prefix with a sliding window.
        """
        waiting_seqs = seq_group.get_seqs(status=SequenceStatus.WAITING)
        num_seqs = seq_group.num_seqs()
        prefix = seq_group.prefix
        if prefix is not None and self.block_sliding_window is not None:
            raise NotImplementedError("a shared prefix cannot be used with a sliding window")

        shared_blocks: BlockTable = []
        if prefix is not None and prefix.block_table is not None:
            shared_blocks = prefix.block_table
        num_new_entries = len(waiting_seqs[0].logical_token_blocks) - len(shared_blocks)
        num_new_blocks = num_new_entries
        if self.block_sliding_window is not None:
            num_new_blocks = min(num_new_entries, self.block_sliding_window)
        if num_new_blocks > self.gpu_allocator.get_num_free_blocks():
            raise ValueError(_OUT_OF_MEMORY)

        new_blocks = [self.gpu_allocator.allocate() for _ in range(num_new_blocks)]
        for block in new_blocks:
            block.ref_count = num_seqs
        for block in shared_blocks:
            block.ref_count += num_seqs
        block_table = shared_blocks + [new_blocks[i % num_new_blocks] for i in range(num_new_entries)]

        if prefix is not None and not prefix.allocated:
            prefix.set_block_table(block_table[: prefix.get_num_blocks()])
            for block in block_table[: prefix.get_num_blocks()]:
                block.ref_count += 1

        for seq in waiting_seqs:
            self.block_tables[seq.seq_id] = block_table.copy()

    # Growth: room for one more token, which `seq` already counts in its logical blocks.

    def can_append_slot(self, seq_group: SequenceGroup) -> bool:
        """Return whether every running sequence of the group could take one block, the most it may need."""
        return seq_group.num_seqs(status=SequenceStatus.RUNNING) <= self.gpu_allocator.get_num_free_blocks()

    def append_slot(self, seq: Sequence) -> tuple[int, int] | None:
        """Make the place of the sequence's last token writable by this sequence alone.

        Returns: the (source, destination) block numbers to copy before the token is written, or None.
        Raises: ValueError when blocks run out; AssertionError when the table is more than one block behind,
            or not on the GPU.
        """
        block_table = self.block_tables[seq.seq_id]
        num_missing = len(seq.logical_token_blocks) - len(block_table)
        assert num_missing <= 1, f"{num_missing=} must be at most 1: call append_slot after every token"

        on_gpu = all(block.device == Device.GPU for block in block_table)
        assert on_gpu, f"{block_table=} must be on the GPU: swap the sequence in first"

        if num_missing == 0:
            last_block = block_table[-1]
        elif self.block_sliding_window and len(block_table) >= self.block_sliding_window:
            last_block = block_table[-self.block_sliding_window]  # its tokens are leaving the window
        else:
            block_table.append(self.gpu_allocator.allocate())
            return None

        copy_pair = None
        if last_block.ref_count > 1:
            new_block = self.gpu_allocator.allocate()
            block_table[:] = [new_block if block is last_block else block for block in block_table]
            self.gpu_allocator.free(last_block)
            copy_pair = last_block.block_number, new_block.block_number
            last_block = new_block
        if num_missing == 1:
            block_table.append(last_block)
        return copy_pair

    def can_append_slots(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> bool:
        """Call `can_append_slot` under its name since vLLM 0.4. Looking ahead is refused, as there."""
        assert num_lookahead_slots == 0, f"{num_lookahead_slots=} must be 0"
        return self.can_append_slot(seq_group)

    def append_slots(self, seq: Sequence, num_lookahead_slots: int = 0) -> list[tuple[int, int]]:
        """Call `append_slot` under its name since vLLM 0.4: the pair to copy is a list of none or one
        (0.4.3).
        """
        assert num_lookahead_slots == 0, f"{num_lookahead_slots=} must be 0"
        copy_pair = self.append_slot(seq)
        return [] if copy_pair is None else [copy_pair]

    def fork(self, parent_seq: Sequence, child_seq: Sequence) -> None:
        """Share all blocks of the parent with the child. Takes no block, so it cannot run out."""
        block_table = self.block_tables[parent_seq.seq_id]
        for block in _once_each(block_table):
            block.ref_count += 1
        self.block_tables[child_seq.seq_id] = block_table.copy()

    # Swapping: a group's blocks move between the devices together.

    def _get_physical_blocks(self, seq_group: SequenceGroup) -> BlockTable:
        """Return the distinct blocks of the group's unfinished sequences."""
        seqs = seq_group.get_unfinished_seqs()
        return _once_each([block for seq in seqs for block in self.block_tables[seq.seq_id]])

    def _move(self, tables: dict[int, BlockTable], target: BlockAllocator) -> dict[int, int]:
        """Replace each block of these tables by one of the other device; shared blocks stay shared.

        Returns: source to target block numbers. Raises: ValueError when the target's blocks do not suffice.
        """
        source_blocks = _once_each([block for table in tables.values() for block in table])
        if len(source_blocks) > target.get_num_free_blocks():
            raise ValueError(_OUT_OF_MEMORY)
        moved_to = {block: target.allocate() for block in source_blocks}
        for block, target_block in moved_to.items():
            target_block.ref_count = sum(block in table for table in tables.values())
        for seq_id, table in tables.items():
            self._free_block_table(table)
            self.block_tables[seq_id] = [moved_to[block] for block in table]
        return {block.block_number: moved_to[block].block_number for block in source_blocks}

    def can_swap_in(self, seq_group: SequenceGroup) -> bool:
        """Return whether the group's blocks, and one more per swapped sequence, fit above the watermark."""
        num_required_blocks = len(self._get_physical_blocks(seq_group))
        num_required_blocks += seq_group.num_seqs(status=SequenceStatus.SWAPPED)
        return self.gpu_allocator.get_num_free_blocks() - num_required_blocks >= self.watermark_blocks

    def swap_in(self, seq_group: SequenceGroup) -> dict[int, int]:
        """Bring the group's swapped sequences back to the GPU; a prefix never left it.

        Returns: CPU to GPU block numbers, to copy.
        Raises: ValueError when GPU blocks run out; AssertionError when the prefix is not ready.
        """
        prefix_blocks: BlockTable = []
        if seq_group.prefix is not None:
            assert seq_group.prefix.computed, "the group's prefix must be computed before it is swapped in"
            assert seq_group.prefix.block_table is not None, "the group's prefix must be allocated"
            prefix_blocks = seq_group.prefix.block_table

        seqs = seq_group.get_seqs(status=SequenceStatus.SWAPPED)
        tables = {seq.seq_id: self.block_tables[seq.seq_id] for seq in seqs}
        mapping = self._move(tables, self.gpu_allocator)
        for seq_id in tables:
            for block in prefix_blocks:
                block.ref_count += 1
            self.block_tables[seq_id] = prefix_blocks + self.block_tables[seq_id]
        return mapping

    def can_swap_out(self, seq_group: SequenceGroup) -> bool:
        """Return whether the CPU has a block for each of the group's, though those of a prefix would not
        move.
        """
        return len(self._get_physical_blocks(seq_group)) <= self.cpu_allocator.get_num_free_blocks()

    def swap_out(self, seq_group: SequenceGroup) -> dict[int, int]:
        """Move the group's running sequences to the CPU. Blocks of its prefix are let go, not copied.

        Returns: GPU to CPU block numbers, to copy. Raises: ValueError when CPU blocks run out.
        """
        prefix_blocks: BlockTable = []
        if seq_group.prefix is not None and seq_group.prefix.block_table is not None:
            prefix_blocks = seq_group.prefix.block_table

        seqs = seq_group.get_seqs(status=SequenceStatus.RUNNING)
        tables = {
            seq.seq_id: [block for block in self.block_tables[seq.seq_id] if block not in prefix_blocks]
            for seq in seqs
        }
        released = [b for seq in seqs for b in self.block_tables[seq.seq_id] if b in prefix_blocks]
        mapping = self._move(tables, self.cpu_allocator)
        for block in released:
            self.gpu_allocator.free(block)
        return mapping

    # The end.

    def _free_block_table(self, block_table: BlockTable) -> None:
        for block in _once_each(block_table):
            allocator = self.gpu_allocator if block.device == Device.GPU else self.cpu_allocator
            allocator.free(block)

    def free(self, seq: Sequence) -> None:
        """Free all blocks of a sequence, first to last. A sequence without a table is no error."""
        if seq.seq_id in self.block_tables:
            self._free_block_table(self.block_tables.pop(seq.seq_id))

    def reset(self) -> None:
        """Free every sequence. Prefixes keep what they hold."""
        for block_table in self.block_tables.values():
            self._free_block_table(block_table)
        self.block_tables.clear()

    def get_block_table(self, seq: Sequence) -> list[int]:
        """Return the block numbers of a sequence, by logical block number."""
        return [block.block_number for block in self.block_tables[seq.seq_id]]

    def get_num_free_gpu_blocks(self) -> int:
        return self.gpu_allocator.get_num_free_blocks()

    def get_num_free_cpu_blocks(self) -> int:
        return self.cpu_allocator.get_num_free_blocks()
