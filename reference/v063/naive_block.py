"""Blocks and their allocator without prefix caching.

The free ids stand in a queue that starts in increasing order. Ids are taken from its head, and a freed id
goes back to the head: the block freed last is given out next.
"""

from collections import deque
from collections.abc import Iterable

from .common import BlockPool, CopyOnWriteTracker, PooledBlockAllocator, RefCounter
from .interfaces import Block, BlockAllocator, BlockId, Device

OBJECTS_PER_BLOCK = 4  # block objects made in advance for each id, since forks share ids


class NaiveBlockAllocator(PooledBlockAllocator):
    """Gives out ids with reference counts; full blocks are not shared by content.

    Args:
        create_block: makes the block objects; NaiveBlock, or the prefix-caching allocator's own factory.
        num_blocks: how many ids there are.
        block_size: tokens per block.
        block_ids: the ids, `num_blocks` different ones, in the order to give them out; 0, 1, ... if not
            given.
        block_pool: block objects shared with another allocator; a pool of its own if not given.
    """

    def __init__(
        self,
        create_block: Block.Factory,
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[int] | None = None,
        block_pool: BlockPool | None = None,
    ) -> None:
        self._free_block_indices: deque[BlockId] = deque(
            range(num_blocks) if block_ids is None else block_ids
        )
        self._all_block_indices = frozenset(self._free_block_indices)
        assert len(self._all_block_indices) == num_blocks, f"{num_blocks=} must equal the number of block_ids"
        self._block_size = block_size
        self._refcounter = RefCounter(self._free_block_indices)
        self._cow_tracker = CopyOnWriteTracker(self._refcounter.as_readonly())
        if block_pool is None:
            block_pool = BlockPool(block_size, create_block, self, num_blocks * OBJECTS_PER_BLOCK)
        self._block_pool = block_pool

    def _allocate_block_id(self) -> BlockId:
        if not self._free_block_indices:
            raise BlockAllocator.NoFreeBlocksError()
        block_id = self._free_block_indices.popleft()
        self._refcounter.incr(block_id)
        return block_id

    def _free_block_id(self, block: Block) -> None:
        assert block.block_id is not None, "the block is not allocated"
        if self._refcounter.decr(block.block_id) == 0:
            self._free_block_indices.appendleft(block.block_id)
        block.block_id = None

    def allocate_immutable_block(
        self, prev_block: Block | None, token_ids: list[int], device: Device | None = None
    ) -> Block:
        assert device is None
        block = self.allocate_mutable_block(prev_block)
        block.append_token_ids(token_ids)
        return block

    def allocate_immutable_blocks(
        self, prev_block: Block | None, block_token_ids: list[list[int]], device: Device | None = None
    ) -> list[Block]:
        """See BlockAllocator.

        NoFreeBlocksError: the ids do not suffice; those taken before are lost, as in 0.6.3.
        """
        assert device is None
        block_ids = [self._allocate_block_id() for _ in block_token_ids]
        blocks = []
        for block_id, token_ids in zip(block_ids, block_token_ids, strict=True):
            prev_block = self._block_pool.init_block(prev_block, token_ids, self._block_size, block_id)
            blocks.append(prev_block)
        return blocks

    def get_num_free_blocks(self) -> int:
        return len(self._free_block_indices)

    @property
    def refcounter(self) -> RefCounter:
        return self._refcounter

    @property
    def all_block_ids(self) -> frozenset[int]:
        return self._all_block_indices

    def get_num_full_blocks_touched(self, blocks: list[Block]) -> int:
        """The number of different block objects that are full: each takes an id of its own, shared or not."""
        return len({id(block) for block in blocks if block.is_full})

    def promote_to_immutable_block(self, block: Block) -> BlockId:
        raise NotImplementedError("naive blocks are not promoted")

    # Without a prefix cache nothing is ever found, and nothing need be noted.

    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None:
        pass

    def mark_blocks_as_computed(self, block_ids: list[int]) -> None:
        pass

    def get_computed_block_ids(
        self, prev_computed_block_ids: list[int], block_ids: list[int], skip_last_block_id: bool
    ) -> list[int]:
        return []

    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]:
        return []

    def get_prefix_cache_hit_rate(self) -> float:
        return -1


class NaiveBlock(Block):
    """A block that knows its tokens and its id, and asks its allocator before it writes to shared memory.

    Args:
        prev_block: the block before it in the sequence.
        token_ids: the first tokens, at most `block_size`.
        block_size: tokens that fit.
        allocator: asked for another id when tokens are appended to a shared block.
        block_id: the memory; None while there is none.
        _cow_target: the block whose id the allocator is to look at and drop; the block itself if not given.
    """

    def __init__(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        allocator: BlockAllocator,
        block_id: int | None = None,
        _cow_target: Block | None = None,
    ) -> None:
        self._token_ids: list[int] = []
        self._block_size = block_size
        self._prev_block = prev_block
        self._block_id = block_id
        self._allocator = allocator
        self._cow_target = self if _cow_target is None else _cow_target
        self._append_token_ids_no_cow(token_ids)

    def append_token_ids(self, token_ids: list[int]) -> None:
        """Add tokens, then move to an id of its own if others share this one.

        AssertionError: more tokens than empty slots. NoFreeBlocksError: there is no id to move to.
        """
        self._append_token_ids_no_cow(token_ids)
        if self._block_id is not None:
            self._block_id = self._allocator.cow_block_if_not_appendable(self._cow_target)

    def _append_token_ids_no_cow(self, token_ids: list[int]) -> None:
        assert len(token_ids) <= self.num_empty_slots, (
            f"{len(token_ids)=} must be at most {self.num_empty_slots=}"
        )
        self._token_ids.extend(token_ids)

    @property
    def block_id(self) -> int | None:
        return self._block_id

    @block_id.setter
    def block_id(self, value: int | None) -> None:
        self._block_id = value

    @property
    def token_ids(self) -> list[int]:
        return self._token_ids

    @property
    def num_empty_slots(self) -> int:
        return self._block_size - len(self._token_ids)

    @property
    def is_full(self) -> bool:
        return self.num_empty_slots == 0

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def prev_block(self) -> Block | None:
        return self._prev_block

    @property
    def content_hash(self) -> int | None:
        return None

    # What only prefix caching needs.

    @property
    def num_tokens_total(self) -> int:
        raise NotImplementedError("a naive block has no num_tokens_total")

    @property
    def computed(self) -> bool:
        raise NotImplementedError("a naive block has no computed")

    @computed.setter
    def computed(self, value: bool) -> None:
        raise NotImplementedError("a naive block has no computed")

    @property
    def last_accessed(self) -> float:
        raise NotImplementedError("a naive block has no last_accessed")

    @last_accessed.setter
    def last_accessed(self, last_accessed_ts: float) -> None:
        raise NotImplementedError("a naive block has no last_accessed")
