"""Blocks and their allocator with prefix caching: a full block is found again by all tokens up to its end.

Life of an id: free (in the queue of the naive allocator inside) -> in use by a block that is not full -> in
use by full blocks, its hash in `_cached_blocks` -> used by nobody but still findable (in the evictor) ->
found again, or evicted and given out for other tokens. Only a block that never became full returns to the
free queue.
"""

from collections.abc import Iterable

from .common import BlockPool, CacheMetricData, CopyOnWriteTracker, PooledBlockAllocator
from .evictor import EvictionPolicy, make_evictor
from .interfaces import Block, BlockAllocator, BlockId, Device, DeviceAwareBlockAllocator
from .naive_block import OBJECTS_PER_BLOCK, NaiveBlock, NaiveBlockAllocator

PrefixHash = int

NEVER_ACCESSED = -1.0  # older than any time a clock gives


class BlockTracker:
    """What is known of one id while blocks use it."""

    def __init__(self) -> None:
        self.active = False
        self.reset()

    def reset(self) -> None:
        self.last_accessed = NEVER_ACCESSED
        self.computed = False

    def enable(self) -> None:
        """Somebody begins to use the id. AssertionError: it is in use."""
        assert not self.active
        self.active = True
        self.reset()

    def disable(self) -> None:
        """Nobody uses the id any more. AssertionError: nobody did."""
        assert self.active
        self.active = False
        self.reset()


class PrefixCachingBlockAllocator(PooledBlockAllocator):
    """Gives out ids with reference counts, and the same id to all full blocks with the same history.

    Args:
        num_blocks: how many ids there are.
        block_size: tokens per block.
        block_ids: the ids, in the order to give them out; 0, 1, ... if not given.
        eviction_policy: which unused cached block goes first when no id is free.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[int] | None = None,
        eviction_policy: EvictionPolicy = EvictionPolicy.LRU,
    ) -> None:
        block_ids = list(range(num_blocks) if block_ids is None else block_ids)
        self._block_size = block_size
        self._cached_blocks: dict[PrefixHash, BlockId] = {}  # in use, or in the evictor
        self._touched_blocks: set[BlockId] = set()  # became full since mark_blocks_as_computed
        self._block_tracker = {block_id: BlockTracker() for block_id in block_ids}
        self._block_pool = BlockPool(block_size, self._create_block, self, num_blocks * OBJECTS_PER_BLOCK)
        self._hashless_allocator = NaiveBlockAllocator(
            create_block=self._create_block,
            num_blocks=num_blocks,
            block_size=block_size,
            block_ids=block_ids,
            block_pool=self._block_pool,
        )
        self.evictor = make_evictor(eviction_policy)
        self._refcounter = (
            self._hashless_allocator.refcounter
        )  # one count, whichever of the two gave the id out
        self._cow_tracker = CopyOnWriteTracker(self._refcounter.as_readonly())
        self.metric_data = CacheMetricData()

    def _create_block(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        allocator: BlockAllocator,
        block_id: int | None = None,
        computed: bool = False,
    ) -> Block:
        # The naive allocator inside would name itself as the allocator.
        return PrefixCachingBlock(prev_block, token_ids, block_size, self, block_id, computed)

    # Allocate.

    def allocate_mutable_block(self, prev_block: Block | None, device: Device | None = None) -> Block:
        """See BlockAllocator. A free id if there is one, else that of an evicted block."""
        assert_prefix_caching_block_or_none(prev_block)
        block = super().allocate_mutable_block(prev_block, device)
        assert not block.computed
        assert block.content_hash is None
        return block

    def allocate_immutable_block(
        self, prev_block: Block | None, token_ids: list[int], device: Device | None = None
    ) -> Block:
        """See BlockAllocator.

        A cached block with the same history lends its id: no free id is needed then.
        """
        assert device is None
        assert_prefix_caching_block_or_none(prev_block)
        probe = self._block_pool.init_block(prev_block, token_ids, self._block_size, None)
        assert probe.content_hash is not None, "an immutable block must be full, and so must all before it"
        cached_block_id = self._cached_blocks.get(probe.content_hash)
        self.metric_data.query(hit=cached_block_id is not None)
        if cached_block_id is not None:
            probe.block_id = cached_block_id
            self._incr_refcount_cached_block(probe)
            return probe
        self._block_pool.free_block(probe)
        block = self.allocate_mutable_block(prev_block)
        block.append_token_ids(token_ids)
        return block

    def allocate_immutable_blocks(
        self, prev_block: Block | None, block_token_ids: list[list[int]], device: Device | None = None
    ) -> list[Block]:
        """See BlockAllocator. NoFreeBlocksError: blocks allocated by then stay in use, as in 0.6.3."""
        blocks = []
        for token_ids in block_token_ids:
            prev_block = self.allocate_immutable_block(prev_block, token_ids, device)
            blocks.append(prev_block)
        return blocks

    def _allocate_block_id(self) -> BlockId:
        if self._hashless_allocator.get_num_free_blocks() > 0:
            block_id = self._hashless_allocator._allocate_block_id()
        elif self.evictor.num_blocks > 0:
            block_id, content_hash = self.evictor.evict()
            assert self._cached_blocks[content_hash] == block_id
            del self._cached_blocks[content_hash]
            self._refcounter.incr(block_id)
        else:
            raise BlockAllocator.NoFreeBlocksError()
        self._track_block_id(block_id, computed=False)
        return block_id

    def promote_to_immutable_block(self, block: Block) -> BlockId:
        """Make a block that has become full findable; if its twin is findable already, take the twin's id.

        AssertionError: the block has no content hash, no id, or nobody uses its id.
        """
        assert block.content_hash is not None
        assert block.block_id is not None
        assert self._refcounter.get(block.block_id) > 0
        if block.content_hash not in self._cached_blocks:
            # Found from now on, but computed only when the step that fills it has been scheduled.
            self._cached_blocks[block.content_hash] = block.block_id
            self._touched_blocks.add(block.block_id)
            return block.block_id
        self._decr_refcount_hashless_block(block)
        twin_block_id = self._cached_blocks[block.content_hash]
        block.block_id = twin_block_id
        self._incr_refcount_cached_block(block)
        return twin_block_id

    def _incr_refcount_cached_block(self, block: Block) -> None:
        assert block.block_id is not None
        block.computed = True
        if self._refcounter.incr(block.block_id) == 1:
            if block.block_id in self.evictor:
                self.evictor.remove(block.block_id)
            self._track_block_id(block.block_id, computed=True)

    # Free.

    def _free_block_id(self, block: Block) -> None:
        assert block.block_id is not None, "the block is not allocated"
        if block.content_hash is not None:
            self._decr_refcount_cached_block(block)
        else:
            self._decr_refcount_hashless_block(block)

    def _decr_refcount_cached_block(self, block: Block) -> None:
        """Drop a reference to a findable id. The last one leaves the id in the evictor, computed or not."""
        block_id = block.block_id
        assert block_id is not None
        assert block.content_hash is not None
        if self._refcounter.decr(block_id) == 0:
            assert block.content_hash in self._cached_blocks
            last_accessed = self._block_tracker[block_id].last_accessed
            self.evictor.add(block_id, block.content_hash, block.num_tokens_total, last_accessed)
            self._untrack_block_id(block_id)
        block.block_id = None

    def _decr_refcount_hashless_block(self, block: Block) -> None:
        """Drop a reference to an id that nobody can find. The last one returns it to the free queue."""
        assert block.block_id is not None
        if self._refcounter.get(block.block_id) == 1:
            self._untrack_block_id(block.block_id)
        self._hashless_allocator.free(block, keep_block_object=True)

    # What is known of the ids.

    def _track_block_id(self, block_id: BlockId, computed: bool) -> None:
        self._block_tracker[block_id].enable()
        self._block_tracker[block_id].computed = computed

    def _untrack_block_id(self, block_id: BlockId) -> None:
        self._block_tracker[block_id].disable()

    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None:
        """Note when the ids were last used. ValueError: an id is neither in use nor cached."""
        for block_id in block_ids:
            if self._block_tracker[block_id].active:
                self._block_tracker[block_id].last_accessed = now
            elif block_id in self.evictor:
                self.evictor.update(block_id, now)
            else:
                raise ValueError(f"{block_id=} is neither in use nor cached")

    def mark_blocks_as_computed(self, block_ids: list[int]) -> None:
        """Note that blocks that became full since the last call are computed; `block_ids` plays no part."""
        for block_id in self._touched_blocks:
            self._block_tracker[block_id].computed = True
        self._touched_blocks.clear()

    def block_is_computed(self, block_id: int) -> bool:
        if self._block_tracker[block_id].active:
            return self._block_tracker[block_id].computed
        return block_id in self.evictor

    def is_block_cached(self, block: Block) -> bool:
        """Whether a block with this history can be found. AssertionError: the block has no content hash."""
        assert block.content_hash is not None
        return block.content_hash in self._cached_blocks

    def get_computed_block_ids(
        self, prev_computed_block_ids: list[int], block_ids: list[int], skip_last_block_id: bool = True
    ) -> list[int]:
        """`prev_computed_block_ids`, extended in place by each later id that is computed, gaps or no gaps.

        Args:
            prev_computed_block_ids: the result for this sequence last time; stands for as many first ids.
            block_ids: all ids of the sequence.
            skip_last_block_id: leave the last id out, so that at least one block is left to compute.
        """
        num_block_ids = len(block_ids) - int(skip_last_block_id)
        assert len(prev_computed_block_ids) <= num_block_ids
        for block_id in block_ids[len(prev_computed_block_ids) : num_block_ids]:
            if self.block_is_computed(block_id):
                prev_computed_block_ids.append(block_id)
        return prev_computed_block_ids

    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]:
        """The longest run of ids with which all the lists begin; empty lists are passed over."""
        lists = [block_ids for block_ids in computed_seq_block_ids if block_ids]
        common = []
        for nth_ids in zip(*lists, strict=False):
            if len(set(nth_ids)) > 1:
                break
            common.append(nth_ids[0])
        return common

    def get_num_full_blocks_touched(self, blocks: list[Block]) -> int:
        """How many of the full blocks would take a free id: those not found, and those in the evictor."""
        num_touched_blocks = 0
        for block in blocks:
            if block.is_full:
                assert block.content_hash is not None
                cached_block_id = self._cached_blocks.get(block.content_hash)
                num_touched_blocks += int(cached_block_id is None or cached_block_id in self.evictor)
        return num_touched_blocks

    def get_num_free_blocks(self, device: Device | None = None) -> int:
        """Free ids, and ids that can be evicted."""
        assert device is None
        return self._hashless_allocator.get_num_free_blocks() + self.evictor.num_blocks

    @property
    def all_block_ids(self) -> frozenset[int]:
        return self._hashless_allocator.all_block_ids

    def get_prefix_cache_hit_rate(self) -> float:
        return self.metric_data.get_hit_rate()


class PrefixCachingBlock(Block):
    """A block that has a hash of its history once it is full, and then tells its allocator.

    Args:
        prev_block: the block before it in the sequence, a PrefixCachingBlock too.
        token_ids: the first tokens, at most `block_size`.
        block_size: tokens that fit.
        allocator: a PrefixCachingBlockAllocator.
        block_id: the memory; None while there is none.
        computed: whether the memory holds the content already.
    """

    def __init__(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        allocator: BlockAllocator,
        block_id: int | None = None,
        computed: bool = False,
    ) -> None:
        assert isinstance(allocator, PrefixCachingBlockAllocator), f"{allocator=} must cache prefixes"
        assert_prefix_caching_block_or_none(prev_block)
        self._prev_block = prev_block
        self._allocator = allocator
        self._computed = computed
        self._last_accessed = NEVER_ACCESSED
        self._cached_content_hash: int | None = None
        # It holds tokens and id. It has no hash, so that copy-on-write drops the id as that of a block not
        # yet findable, although the tokens that fill it have just been added.
        self._block = NaiveBlock(prev_block, token_ids, block_size, allocator, block_id)
        self._update_num_tokens_total()

    def _update_num_tokens_total(self) -> None:
        before = self._prev_block.num_tokens_total if self._prev_block is not None else 0
        self._cached_num_tokens_total = before + len(self.token_ids)

    def append_token_ids(self, token_ids: list[int]) -> None:
        """Add tokens; if that fills the block, it is promoted and may get the id of its twin.

        AssertionError: the block is full or shared from the cache, or the tokens are too many.
        NoFreeBlocksError: the block is shared and there is no id to copy it to.
        """
        assert self.content_hash is None, "the block is immutable"
        assert not self.computed
        if not token_ids:
            return
        self._block.append_token_ids(token_ids)
        self._update_num_tokens_total()
        if self.content_hash is not None:
            self.block_id = self._allocator.promote_to_immutable_block(self)

    @property
    def content_hash(self) -> int | None:
        """Set once, when this block is full and all before it have a hash; None until then."""
        if self._cached_content_hash is None and self.is_full:
            prev_hash = self._prev_block.content_hash if self._prev_block is not None else None
            if self._prev_block is None or prev_hash is not None:
                self._cached_content_hash = self.hash_block_tokens(
                    self._prev_block is None, prev_hash, self.token_ids
                )
        return self._cached_content_hash

    @staticmethod
    def hash_block_tokens(
        is_first_block: bool, prev_block_hash: int | None, cur_block_token_ids: list[int]
    ) -> int:
        """Python's hash of (first or not, the hash before, the tokens); equal hashes pass for equal content.

        AssertionError: a first block with a hash before it, or a later one without.
        """
        assert (prev_block_hash is None) == is_first_block
        return hash((is_first_block, prev_block_hash, *cur_block_token_ids))

    @property
    def block_id(self) -> int | None:
        return self._block.block_id

    @block_id.setter
    def block_id(self, value: int | None) -> None:
        self._block.block_id = value

    @property
    def computed(self) -> bool:
        return self._computed

    @computed.setter
    def computed(self, value: bool) -> None:
        self._computed = value

    @property
    def last_accessed(self) -> float:
        return self._last_accessed

    @last_accessed.setter
    def last_accessed(self, last_accessed_ts: float) -> None:
        self._last_accessed = last_accessed_ts

    @property
    def token_ids(self) -> list[int]:
        return self._block.token_ids

    @property
    def num_tokens_total(self) -> int:
        return self._cached_num_tokens_total

    @property
    def num_empty_slots(self) -> int:
        return self._block.num_empty_slots

    @property
    def is_full(self) -> bool:
        return self._block.is_full

    @property
    def block_size(self) -> int:
        return self._block.block_size

    @property
    def prev_block(self) -> Block | None:
        return self._prev_block


def assert_prefix_caching_block_or_none(block: Block | None) -> None:
    assert block is None or isinstance(block, PrefixCachingBlock), f"{block=} must cache prefixes"


class ComputedBlocksTracker:
    """Remembers, per sequence, the ids found computed, so that only new blocks are looked at.

    The last block never counts. Once an id was found not computed (a gap), the answer stands until the
    sequence is removed. What was found stands too, even if a swap gives the sequence other ids.
    AssertionError: a sequence added twice, or unknown.
    """

    def __init__(self, allocator: DeviceAwareBlockAllocator) -> None:
        self._allocator = allocator
        self._cached_computed_seq_blocks: dict[
            int, tuple[list[int], bool]
        ] = {}  # ids, whether there is a gap

    def add_seq(self, seq_id: int) -> None:
        assert seq_id not in self._cached_computed_seq_blocks
        self._cached_computed_seq_blocks[seq_id] = ([], False)

    def remove_seq(self, seq_id: int) -> None:
        assert seq_id in self._cached_computed_seq_blocks
        del self._cached_computed_seq_blocks[seq_id]

    def get_cached_computed_blocks_and_update(self, seq_id: int, block_ids: list[int]) -> list[int]:
        """The computed ids of a sequence whose ids are `block_ids`, at least one."""
        assert seq_id in self._cached_computed_seq_blocks
        assert block_ids
        computed_block_ids, has_gap = self._cached_computed_seq_blocks[seq_id]
        num_to_look_at = len(block_ids) - 1
        if has_gap:
            return computed_block_ids
        if len(computed_block_ids) >= num_to_look_at:
            assert len(computed_block_ids) == num_to_look_at
            return computed_block_ids
        computed_block_ids = self._allocator.get_computed_block_ids(
            computed_block_ids, block_ids, skip_last_block_id=True
        )
        has_gap = len(computed_block_ids) < num_to_look_at
        self._cached_computed_seq_blocks[seq_id] = (computed_block_ids, has_gap)
        return computed_block_ids


class LastAccessBlocksTracker:
    """Remembers, per sequence, when it last ran, and tells the allocator when asked.

    AssertionError: a sequence added twice, or unknown.
    """

    def __init__(self, allocator: DeviceAwareBlockAllocator) -> None:
        self._allocator = allocator
        self._seq_last_access: dict[int, float | None] = {}

    def add_seq(self, seq_id: int) -> None:
        assert seq_id not in self._seq_last_access
        self._seq_last_access[seq_id] = None

    def remove_seq(self, seq_id: int) -> None:
        assert seq_id in self._seq_last_access
        del self._seq_last_access[seq_id]

    def update_last_access(self, seq_id: int, time: float) -> None:
        assert seq_id in self._seq_last_access
        self._seq_last_access[seq_id] = time

    def update_seq_blocks_last_access(self, seq_id: int, block_ids: list[int]) -> None:
        """Stamp the ids with the time of the sequence, if it has one."""
        assert seq_id in self._seq_last_access
        last_access = self._seq_last_access[seq_id]
        if last_access is not None:
            self._allocator.mark_blocks_as_accessed(block_ids, last_access)
