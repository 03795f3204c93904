"""One sequence's blocks, first to last."""

from collections.abc import Iterator

from .block import Block
from .cpu_gpu import CpuGpuBlockAllocator


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def chunks_of(token_ids: list[int], size: int) -> Iterator[list[int]]:
    """Return the tokens in chunks of `size`; the last may be shorter."""
    return (token_ids[start : start + size] for start in range(0, len(token_ids), size))


class BlockTable:
    """The blocks of a sequence: token i lies in block i // block_size, at offset i % block_size.

    Args:
        block_size: tokens per block.
        allocator: the source of the blocks.
        max_blocks_in_window: blocks to keep, for models whose attention reaches back only so far; the ones
            before them are dropped. None: all are kept.
        blocks: the blocks to begin with.

    AssertionError, from everything that adds to a table or forks it: nothing has been allocated.
    """

    def __init__(
        self,
        block_size: int,
        allocator: CpuGpuBlockAllocator,
        max_blocks_in_window: int | None = None,
        blocks: list[Block] | None = None,
    ) -> None:
        self.block_size = block_size
        self.allocator = allocator
        self.max_blocks_in_window = max_blocks_in_window
        self.blocks = blocks or []
        self.num_tokens = sum(len(block.token_ids) for block in self.blocks)  # those dropped included

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.block_id is not None]

    def allocate(self, token_ids: list[int]) -> None:
        """Fill the empty table with a prompt, on the GPU. NoFreeBlocksError: the table stays empty."""
        assert not self.blocks, "the table has blocks already"
        assert token_ids, "there must be at least one token"
        gpu = self.allocator.gpu
        blocks: list[Block] = []
        for chunk in chunks_of(token_ids, self.block_size):
            prev_block = blocks[-1] if blocks else None
            if len(chunk) == self.block_size:
                blocks.append(gpu.allocate_immutable_block(prev_block, chunk))
            else:
                blocks.append(gpu.allocate_mutable_block(prev_block))
                gpu.append_token_ids(blocks[-1], chunk)
        self.blocks = blocks
        self.num_tokens = len(token_ids)

    def append_token_ids(
        self, token_ids: list[int], num_lookahead_slots: int = 0, num_computed_tokens: int | None = None
    ) -> None:
        """Add tokens at the end, with empty slots behind them.

        In this order: blocks that have left the window are dropped, first to last; blocks are taken for all
        slots; the tokens are written, which copies a last block that is shared.

        Args:
            token_ids: the tokens.
            num_lookahead_slots: slots to have ready behind the tokens; what lies there is undefined.
            num_computed_tokens: tokens whose keys and values are in the cache already. Needed with a window.

        NoFreeBlocksError: what was done by then stays done.
        """
        assert self.blocks, "the table has no blocks"
        if self.max_blocks_in_window is not None:
            self.allocator.allocate_or_get_null_block()
            assert num_computed_tokens is not None, "a sliding window needs num_computed_tokens"
            self.drop_blocks(num_computed_tokens // self.block_size - self.max_blocks_in_window)
        self.ensure_num_empty_slots(len(token_ids) + num_lookahead_slots)
        position = self.num_tokens
        while token_ids:
            index, offset = divmod(position, self.block_size)
            chunk = token_ids[: self.block_size - offset]
            self.allocator.append_token_ids(self.blocks[index], chunk)
            token_ids = token_ids[len(chunk) :]
            position += len(chunk)
        self.num_tokens = position

    def drop_blocks(self, num_blocks: int) -> None:
        """Give the first blocks back, and let the null block stand for them."""
        null_block = self.allocator.allocate_or_get_null_block()
        for i in range(num_blocks):
            self.allocator.free(self.blocks[i])
            self.blocks[i] = null_block

    def ensure_num_empty_slots(self, num_empty_slots: int) -> None:
        """Take GPU blocks until this many slots are empty.

        NoFreeBlocksError: those taken stay in the table.
        """
        assert self.blocks, "the table has no blocks"
        while len(self.blocks) * self.block_size - self.num_tokens < num_empty_slots:
            self.blocks.append(self.allocator.gpu.allocate_mutable_block(self.blocks[-1]))

    def fork(self) -> "BlockTable":
        """Return a second table with the same content in the same memory.

        AssertionError: the window has dropped blocks.
        """
        assert self.blocks, "the table has no blocks"
        null_block = self.allocator.null_block
        assert not any(block is null_block for block in self.blocks), "cannot fork: blocks were dropped"
        forked = self.allocator.fork(self.blocks[-1])
        return BlockTable(self.block_size, self.allocator, self.max_blocks_in_window, forked)

    def free(self) -> None:
        """Give the blocks back, first to last; the table is empty then."""
        for block in self.blocks:
            self.allocator.free(block)
        self.blocks = []

    def num_blocks_touched_by_append(self, num_new_tokens: int, num_lookahead_slots: int) -> int:
        """Return how many blocks would be written to or taken.

        If every one needs a copy, that many free blocks suffice. Appending nothing counts as touching the
        last block, unless it is full.
        """
        num_slots = num_new_tokens + num_lookahead_slots
        num_slots_in_first = self.block_size - self.num_tokens % self.block_size
        # Not max(0, ...): a full last block gives -1 here for no slots, and 0 in all.
        return 1 + cdiv(num_slots - num_slots_in_first, self.block_size)
