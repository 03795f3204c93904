"""One sequence's blocks, first to last."""

from .common import BlockList, cdiv, chunk_list
from .cpu_gpu_block_allocator import NullBlock
from .interfaces import Block, Device, DeviceAwareBlockAllocator


class BlockTable:
    """Maps a sequence's tokens to blocks: token i lies in block i // block_size, at place i % block_size.

    Args:
        block_size: tokens per block.
        block_allocator: where the blocks come from.
        _blocks: the blocks to begin with; none if not given.
        max_block_sliding_window: blocks to keep, for models whose attention reaches back only so far; the
            ones before them are dropped. All are kept if not given.

    AssertionError, from everything that adds to a table or forks it: nothing has been allocated.
    """

    def __init__(
        self,
        block_size: int,
        block_allocator: DeviceAwareBlockAllocator,
        _blocks: list[Block] | None = None,
        max_block_sliding_window: int | None = None,
    ) -> None:
        self._block_size = block_size
        self._allocator = block_allocator
        self._blocks = BlockList(_blocks or [])
        self._max_block_sliding_window = max_block_sliding_window
        self._num_full_slots = len(self._get_all_token_ids())

    @staticmethod
    def get_num_required_blocks(token_ids: list[int], block_size: int, num_lookahead_slots: int = 0) -> int:
        """Blocks that hold the tokens and as many empty slots, if nothing can be shared."""
        return cdiv(len(token_ids) + num_lookahead_slots, block_size)

    def allocate(self, token_ids: list[int], device: Device = Device.GPU) -> None:
        """Fill the empty table with a prompt.

        AssertionError: the table or the prompt is not as said. NoFreeBlocksError: the table stays empty.
        """
        assert not self._is_allocated, "the table has blocks already"
        assert token_ids, "there must be at least one token"
        self.update(self._allocate_blocks_for_token_ids(None, token_ids, device))
        self._num_full_slots = len(token_ids)

    def update(self, blocks: list[Block]) -> None:
        """Hold these blocks, with the ids they have now."""
        self._blocks.update(blocks)

    def append_token_ids(
        self, token_ids: list[int], num_lookahead_slots: int = 0, num_computed_slots: int | None = None
    ) -> None:
        """Add tokens at the end, with empty slots behind them.

        In this order: blocks that have left the window are dropped, first to last; blocks are taken for all
        slots; the tokens are written, which copies a last block that is shared.

        Args:
            token_ids: the tokens.
            num_lookahead_slots: slots to have ready behind the tokens; what lies there is undefined.
            num_computed_slots: tokens whose keys and values are in the cache already. Needed with a window.

        NoFreeBlocksError: what was done by then stays done.
        """
        assert self._is_allocated, "the table has no blocks"
        self._drop_blocks_out_of_window(num_computed_slots)
        first_block_idx = self._num_full_slots // self._block_size
        self.ensure_num_empty_slots(len(token_ids) + num_lookahead_slots)
        for i, chunk in enumerate(self._chunk_token_blocks_for_append(token_ids)):
            self._blocks.append_token_ids(first_block_idx + i, chunk)
        self._num_full_slots += len(token_ids)

    def _drop_blocks_out_of_window(self, num_computed_slots: int | None) -> None:
        if self._max_block_sliding_window is None:
            return
        null_block = self._allocator.allocate_or_get_null_block()
        assert num_computed_slots is not None, "a sliding window needs num_computed_slots"
        num_to_drop = num_computed_slots // self._block_size - self._max_block_sliding_window
        for i in range(num_to_drop):
            if self._blocks[i] is not null_block:
                self._allocator.free(self._blocks[i])
                self._blocks[i] = null_block

    def ensure_num_empty_slots(self, num_empty_slots: int) -> None:
        """Take GPU blocks until this many slots are empty.

        NoFreeBlocksError: those taken stay in the table.
        """
        for _ in range(cdiv(max(0, num_empty_slots - self._num_empty_slots), self._block_size)):
            self._blocks.append(self._allocator.allocate_mutable_block(self._blocks[-1], Device.GPU))

    def fork(self) -> "BlockTable":
        """A second table with the same content in the same memory.

        AssertionError: the window has dropped blocks.
        """
        assert self._is_allocated
        assert not any(isinstance(block, NullBlock) for block in self.blocks), (
            "cannot fork: blocks were dropped"
        )
        return BlockTable(
            block_size=self._block_size,
            block_allocator=self._allocator,
            _blocks=self._allocator.fork(self._blocks[-1]),
            max_block_sliding_window=self._max_block_sliding_window,
        )

    def free(self) -> None:
        """Give the blocks back, first to last; the table is empty then."""
        for block in self.blocks:
            self._allocator.free(block)
        self._blocks.reset()

    @property
    def physical_block_ids(self) -> list[int]:
        """The blocks' ids, first to last. The list is the table's own: read it only."""
        return self._blocks.ids()

    @property
    def blocks(self) -> list[Block]:
        return self._blocks.list()

    @property
    def num_full_slots(self) -> int:
        """Tokens in the table, those that the window has dropped included."""
        return self._num_full_slots

    def get_unseen_token_ids(self, sequence_token_ids: list[int]) -> list[int]:
        """Of all tokens of the sequence, those not yet in the table."""
        return sequence_token_ids[self._num_full_slots :]

    def get_num_blocks_touched_by_append_slots(self, token_ids: list[int], num_lookahead_slots: int) -> int:
        """Blocks that would be written to or taken; if every one needs a copy, that many free blocks suffice.

        Appending nothing counts as touching the last block, unless it is full.
        """
        num_slots = len(token_ids) + num_lookahead_slots
        num_slots_in_first = self._block_size - self._num_full_slots % self._block_size
        # Not max(0, ...): a full last block gives -1 here for no slots, and 0 in all.
        return 1 + cdiv(num_slots - num_slots_in_first, self._block_size)

    def _allocate_blocks_for_token_ids(
        self, prev_block: Block | None, token_ids: list[int], device: Device
    ) -> list[Block]:
        """Immutable blocks for the full pieces of the tokens, a mutable one for a rest."""
        chunks = list(chunk_list(token_ids, self._block_size))
        full_chunks = [chunk for chunk in chunks if len(chunk) == self._block_size]
        blocks: list[Block] = []
        if full_chunks:
            blocks += self._allocator.allocate_immutable_blocks(prev_block, full_chunks, device)
        for rest in chunks[len(full_chunks) :]:
            last_block = blocks[-1] if blocks else prev_block
            block = self._allocator.allocate_mutable_block(last_block, device)
            block.append_token_ids(rest)
            blocks.append(block)
        return blocks

    def _chunk_token_blocks_for_append(self, token_ids: list[int]) -> list[list[int]]:
        """Cut tokens at the ends of blocks: the first piece fills the last block, or begins a new one."""
        if not token_ids:
            return []
        num_in_first = self._block_size - self._num_full_slots % self._block_size
        return [token_ids[:num_in_first], *chunk_list(token_ids[num_in_first:], self._block_size)]

    def _get_all_token_ids(self) -> list[int]:
        return [token_id for block in self.blocks for token_id in block.token_ids]

    @property
    def _is_allocated(self) -> bool:
        return len(self._blocks) > 0

    @property
    def _num_empty_slots(self) -> int:
        assert self._is_allocated
        return len(self._blocks) * self._block_size - self._num_full_slots
