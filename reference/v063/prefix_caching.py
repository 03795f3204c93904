"""Allocator with prefix caching: a full block is found again by all tokens up to its end.

Life of an id: free (in the queue) -> held by a block that is not full -> held by full blocks, its hash in
`cached_ids` -> held by nobody but still findable (in the evictor) -> found again, or evicted and given out
for other tokens. Only an id whose block never became full returns to the free queue.
"""

from .allocator import NaiveBlockAllocator
from .block import Block
from .evictor import Evictable, LRUEvictor

NEVER_ACCESSED = -1.0  # older than any time a clock gives


class PrefixCachingBlockAllocator(NaiveBlockAllocator):
    """Ids with reference counts, where all full blocks with the same history hold the same id.

    Attributes:
        cached_ids: the id of each content hash that can be found; held by blocks, or in the evictor.
        computed_ids: ids whose keys and values are in memory or are being computed.
        touched_ids: ids whose blocks became full since `mark_blocks_as_computed` was last called.
        last_accessed: the time of the last use of each id that blocks hold.
    """

    def __init__(self, block_ids: range, block_size: int) -> None:
        super().__init__(block_ids, block_size)
        self.cached_ids: dict[int, int] = {}
        self.computed_ids: set[int] = set()
        self.touched_ids: set[int] = set()
        self.last_accessed: dict[int, float] = {}
        self.evictor = LRUEvictor()
        self.num_lookups = 0
        self.num_hits = 0

    def _take_id(self) -> int:
        """Take a free id if there is one, else that of an evicted block, with one reference."""
        if self.evictor.table and not self.free_ids:
            block_id, content_hash = self.evictor.evict()
            del self.cached_ids[content_hash]
            self.ref_counts[block_id] = 1
        else:
            block_id = super()._take_id()
        self.computed_ids.discard(block_id)
        self.last_accessed[block_id] = NEVER_ACCESSED
        return block_id

    def _share_id(self, block: Block, block_id: int) -> None:
        """Give the block an id that was found; out of the evictor if nobody held it."""
        block.block_id = block_id
        self.ref_counts[block_id] += 1
        if self.ref_counts[block_id] == 1:
            del self.evictor.table[block_id]
            self.computed_ids.add(block_id)
            self.last_accessed[block_id] = NEVER_ACCESSED

    def _make_findable(self, block: Block) -> None:
        """Publish a block that has become full. If its twin can be found already, take the twin's id."""
        assert block.content_hash is not None
        assert block.block_id is not None
        twin_id = self.cached_ids.get(block.content_hash)
        if twin_id is None:
            # Found from now on, but computed only when the step that fills it has been scheduled.
            self.cached_ids[block.content_hash] = block.block_id
            self.touched_ids.add(block.block_id)
        else:
            self._drop_reference(block)
            self._share_id(block, twin_id)

    def allocate_immutable_block(self, prev_block: Block | None, token_ids: list[int]) -> Block:
        """Return a full block that holds `token_ids`. One with the same history lends its id if it is cached.

        AssertionError: the block, or one before it, is not full.
        """
        block = Block(prev_block, token_ids, self.block_size)
        assert block.content_hash is not None, "an immutable block must be full, and so must all before it"
        cached_id = self.cached_ids.get(block.content_hash)
        self.num_lookups += 1
        self.num_hits += int(cached_id is not None)
        if cached_id is None:
            block.block_id = self._take_id()
            self._make_findable(block)
        else:
            self._share_id(block, cached_id)
        return block

    def append_token_ids(self, block: Block, token_ids: list[int]) -> None:
        """Add tokens. A shared block moves to an id of its own; a block that becomes full can be found."""
        assert block.content_hash is None, "the block is immutable"
        if token_ids:
            super().append_token_ids(block, token_ids)
            if block.content_hash is not None:
                self._make_findable(block)

    def free(self, block: Block) -> None:
        """Drop the block's reference. The last one of a full block leaves its id in the evictor."""
        block_id, content_hash = block.block_id, block.content_hash
        if content_hash is None:
            self._drop_reference(block)
            return
        assert block_id is not None, "the block is not allocated"
        block.block_id = None
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            num_tokens = (block.index + 1) * self.block_size
            self.evictor.table[block_id] = Evictable(content_hash, num_tokens, self.last_accessed[block_id])

    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None:
        """Note when the ids were last used. KeyError: an id is of another allocator, or free."""
        for block_id in block_ids:
            if self.ref_counts[block_id]:
                self.last_accessed[block_id] = now
            else:
                self.evictor.table[block_id].last_accessed = now

    def mark_blocks_as_computed(self) -> None:
        """Note that all blocks that became full since the last call are computed."""
        self.computed_ids |= self.touched_ids
        self.touched_ids.clear()

    def is_computed(self, block_id: int) -> bool:
        """Return whether the id's keys and values need no computing. An id in the evictor always counts."""
        if self.ref_counts[block_id]:
            return block_id in self.computed_ids
        return block_id in self.evictor.table

    def num_full_blocks_touched(self, blocks: list[Block]) -> int:
        """Return the number of free ids that the full blocks would take: blocks not cached, and blocks in the
        evictor.
        """
        num_touched = 0
        for block in blocks:
            if block.is_full:
                assert block.content_hash is not None
                cached_id = self.cached_ids.get(block.content_hash)
                num_touched += int(cached_id is None or cached_id in self.evictor.table)
        return num_touched

    @property
    def num_free_blocks(self) -> int:
        """Free ids, and ids that can be evicted."""
        return len(self.free_ids) + len(self.evictor.table)

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_lookups if self.num_lookups else 0.0


class ComputedBlocksTracker:
    """Ids found computed, by sequence, so that only new blocks are looked at.

    The last block never counts, so that at least one block is left to compute. Once an id was found not
    computed (a gap), the answer stands until the sequence is removed. What was found stands too, even if a
    swap gives the sequence other ids.
    """

    def __init__(self, allocator: PrefixCachingBlockAllocator) -> None:
        self.allocator = allocator
        self._found: dict[int, tuple[list[int], bool]] = {}  # by seq_id: ids, whether there is a gap

    def remove(self, seq_id: int) -> None:
        self._found.pop(seq_id, None)

    def computed_ids(self, seq_id: int, block_ids: list[int]) -> list[int]:
        """Return the computed ids of a sequence whose ids are `block_ids`, at least one."""
        computed, has_gap = self._found.get(seq_id, ([], False))
        candidates = block_ids[len(computed) : -1]
        if candidates and not has_gap:
            computed = computed + [
                block_id for block_id in candidates if self.allocator.is_computed(block_id)
            ]
            self._found[seq_id] = (computed, len(computed) < len(block_ids) - 1)
        return computed
