"""Allocator of one device's blocks, without prefix caching.

The free ids stand in a queue that starts in increasing order. Ids are taken from its head, and a freed id
goes back to the head: the block freed last is given out next.
"""

from collections import deque

from .block import Block, NoFreeBlocksError, blocks_up_to


class NaiveBlockAllocator:
    """Ids with reference counts. Full blocks are not shared by content.

    Attributes:
        block_ids: the ids that it gives out.
        free_ids: those that nobody holds, in the order in which they will be given out.
        ref_counts: the number of blocks that hold each id.
        copies: (source, target) ids of the blocks to copy, in order, since `take_copies` was last called.
    """

    def __init__(self, block_ids: range, block_size: int) -> None:
        self.block_ids = block_ids
        self.block_size = block_size
        self.free_ids = deque(block_ids)
        self.ref_counts = dict.fromkeys(block_ids, 0)
        self.copies: list[tuple[int, int]] = []

    def _take_id(self) -> int:
        """Take an id, with one reference. NoFreeBlocksError: there is none."""
        if not self.free_ids:
            raise NoFreeBlocksError
        block_id = self.free_ids.popleft()
        self.ref_counts[block_id] = 1
        return block_id

    def _drop_reference(self, block: Block) -> None:
        """Take the block's id away from it. The last reference returns the id to the free queue."""
        assert block.block_id is not None, "the block is not allocated"
        self.ref_counts[block.block_id] -= 1
        if self.ref_counts[block.block_id] == 0:
            self.free_ids.appendleft(block.block_id)
        block.block_id = None

    def allocate_mutable_block(self, prev_block: Block | None) -> Block:
        """Return a new empty block that follows `prev_block`."""
        return Block(prev_block, [], self.block_size, self._take_id())

    def allocate_immutable_block(self, prev_block: Block | None, token_ids: list[int]) -> Block:
        """Return a full block that holds `token_ids`, exactly `block_size` of them."""
        return Block(prev_block, token_ids, self.block_size, self._take_id())

    def append_token_ids(self, block: Block, token_ids: list[int]) -> None:
        """Add tokens to a block. If others share its memory, it moves to an id of its own, noted as a copy.

        NoFreeBlocksError: there is no id to move to. The block has the tokens and no id then.
        """
        block.write(token_ids)
        shared_id = block.block_id
        if shared_id is not None and self.ref_counts[shared_id] > 1:
            self._drop_reference(block)
            block.block_id = self._take_id()
            self.copies.append((shared_id, block.block_id))

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, target) ids to copy since the last call, in order, and forget them."""
        copies, self.copies = self.copies, []
        return copies

    def free(self, block: Block) -> None:
        """Drop the block's reference to its memory."""
        self._drop_reference(block)

    def fork(self, last_block: Block) -> list[Block]:
        """Return blocks for a second sequence that shares the memory of the one that ends in `last_block`."""
        forked: list[Block] = []
        for block in blocks_up_to(last_block):
            assert block.block_id is not None, "cannot fork a freed block"
            self.ref_counts[block.block_id] += 1
            prev_block = forked[-1] if forked else None
            forked.append(Block(prev_block, block.token_ids, self.block_size, block.block_id))
        return forked

    def swap_out(self, blocks: list[Block]) -> None:
        """Release the blocks' ids; the blocks and their tokens stay with the caller."""
        for block in blocks:
            self.free(block)

    def swap_in(self, blocks: list[Block]) -> None:
        """Give each block an id of this allocator, as though its tokens were allocated anew."""
        for block in blocks:
            if block.is_full:
                newcomer = self.allocate_immutable_block(block.prev_block, block.token_ids)
            else:
                newcomer = self.allocate_mutable_block(block.prev_block)
                self.append_token_ids(newcomer, block.token_ids)
            block.block_id = newcomer.block_id

    def num_full_blocks_touched(self, blocks: list[Block]) -> int:
        """Return how many free blocks the full ones among `blocks` would take if swapped in here."""
        return len({id(block) for block in blocks if block.is_full})

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_ids)

    @property
    def hit_rate(self) -> float:
        """Full blocks found in the cache, from 0 to 1; -1 where there is no prefix cache."""
        return -1.0
