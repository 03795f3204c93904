"""What both allocators are built from: reference counts, copies to make, pooled block objects, id lists."""

import dataclasses
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from .interfaces import Block, BlockAllocator, BlockId, Device

RefCount = int


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def chunk_list[T](items: list[T], chunk_size: int) -> Iterator[list[T]]:
    """Cut a list into pieces of `chunk_size`; the last may be shorter."""
    for start in range(0, len(items), chunk_size):
        yield items[start : start + chunk_size]


def get_all_blocks_recursively(last_block: Block) -> list[Block]:
    """All blocks of the sequence that ends in `last_block`, first to last.

    (vLLM recurses, hence the name; a loop does not care how long the sequence is.)
    """
    blocks = []
    block: Block | None = last_block
    while block is not None:
        blocks.append(block)
        block = block.prev_block
    return blocks[::-1]


class RefCounterProtocol(Protocol):
    """Counts references to block ids. Each verb returns the count that results."""

    def incr(self, block_id: BlockId) -> RefCount: ...

    def decr(self, block_id: BlockId) -> RefCount: ...

    def get(self, block_id: BlockId) -> RefCount: ...


class RefCounter(RefCounterProtocol):
    """Reference counts of a fixed set of ids, all 0 at first.

    AssertionError: an unknown id; a count below 0.
    """

    def __init__(self, all_block_indices: Iterable[BlockId]) -> None:
        self._refcounts: dict[BlockId, RefCount] = dict.fromkeys(all_block_indices, 0)

    def incr(self, block_id: BlockId) -> RefCount:
        self._refcounts[block_id] = self.get(block_id) + 1
        return self._refcounts[block_id]

    def decr(self, block_id: BlockId) -> RefCount:
        assert self.get(block_id) > 0, f"{block_id=} has no reference to drop"
        self._refcounts[block_id] -= 1
        return self._refcounts[block_id]

    def get(self, block_id: BlockId) -> RefCount:
        assert block_id in self._refcounts, f"{block_id=} is not counted here"
        return self._refcounts[block_id]

    def as_readonly(self) -> "ReadOnlyRefCounter":
        """A live view that refuses to change anything."""
        return ReadOnlyRefCounter(self)


class ReadOnlyRefCounter(RefCounterProtocol):
    """Shows another counter's counts. ValueError: `incr` and `decr`."""

    def __init__(self, refcounter: RefCounter) -> None:
        self._refcounter = refcounter

    def incr(self, block_id: BlockId) -> RefCount:
        raise ValueError("a read-only counter cannot incr")

    def decr(self, block_id: BlockId) -> RefCount:
        raise ValueError("a read-only counter cannot decr")

    def get(self, block_id: BlockId) -> RefCount:
        return self._refcounter.get(block_id)


class CopyOnWriteTracker:
    """Knows which blocks may be written, and keeps the (source, target) pairs that wait to be copied."""

    def __init__(self, refcounter: RefCounterProtocol) -> None:
        self._copy_on_writes: list[tuple[BlockId, BlockId]] = []
        self._refcounter = refcounter

    def is_appendable(self, block: Block) -> bool:
        """Whether nobody else holds the block's memory. A block without memory is appendable."""
        return block.block_id is None or self._refcounter.get(block.block_id) <= 1

    def record_cow(self, src_block_id: BlockId | None, trg_block_id: BlockId | None) -> None:
        """Note a copy to make. AssertionError: an id is None."""
        assert src_block_id is not None
        assert trg_block_id is not None
        self._copy_on_writes.append((src_block_id, trg_block_id))

    def clear_cows(self) -> list[tuple[BlockId, BlockId]]:
        """The pairs noted since the last call, in order, and forget them."""
        cows, self._copy_on_writes = self._copy_on_writes, []
        return cows


class BlockPool:
    """A stock of block *objects*, used again and again; several objects may carry the same block id.

    Objects are handed out lowest number first; one that comes back is the next to go out. When none is left
    the pool doubles, so it never refuses (an empty pool, `pool_size` 0, can't double: AssertionError).
    """

    def __init__(
        self, block_size: int, create_block: Block.Factory, allocator: BlockAllocator, pool_size: int
    ) -> None:
        assert pool_size >= 0
        self._block_size = block_size
        self._create_block = create_block
        self._allocator = allocator
        self._pool_size = 0
        self._free_ids: deque[int] = deque()
        self._pool: list[Block] = []
        self._add_blocks(pool_size)

    def increase_pool(self) -> None:
        """Double the number of objects; the new ones queue up behind those that are free."""
        self._add_blocks(self._pool_size)

    def _add_blocks(self, num_blocks: int) -> None:
        for pool_id in range(self._pool_size, self._pool_size + num_blocks):
            block = self._create_block(
                prev_block=None,
                token_ids=[],
                block_size=self._block_size,
                allocator=self._allocator,
                block_id=None,
            )
            block.pool_id = pool_id
            self._pool.append(block)
            self._free_ids.append(pool_id)
        self._pool_size += num_blocks

    def init_block(
        self, prev_block: Block | None, token_ids: list[int], block_size: int, physical_block_id: int | None
    ) -> Block:
        """Take an object and set it up afresh."""
        if not self._free_ids:
            self.increase_pool()
            assert self._free_ids, "a pool of size 0 cannot grow"
        block = self._pool[self._free_ids.popleft()]
        block.__init__(  # type: ignore[misc]
            prev_block=prev_block,
            token_ids=token_ids,
            block_size=block_size,
            allocator=block._allocator,
            block_id=physical_block_id,
        )
        return block

    def free_block(self, block: Block) -> None:
        """Take an object back.

        A swapped block is freed by the other device's allocator: its object goes home all the same. (0.6.3
        files its number in the pool that was asked, where it names another object, or none.)
        """
        home = self if self._owns(block) else block._allocator._block_pool  # type: ignore[attr-defined]
        assert home._owns(block), "the block belongs to no pool"
        home._free_ids.appendleft(block.pool_id)

    def _owns(self, block: Block) -> bool:
        return block.pool_id < self._pool_size and self._pool[block.pool_id] is block


class BlockList:
    """A table's blocks, and beside them their ids, so that the ids need not be gathered at every step."""

    def __init__(self, blocks: list[Block]) -> None:
        self.update(blocks)

    def update(self, blocks: list[Block]) -> None:
        """Hold these blocks instead. AssertionError, here and below: a block without an id."""
        self._blocks: list[Block] = blocks
        self._block_ids: list[BlockId] = [_id_of(block) for block in blocks]

    def append_token_ids(self, block_index: int, token_ids: list[int]) -> None:
        """Add tokens to one block; its id is read again, as it may have changed."""
        block = self._blocks[block_index]
        block.append_token_ids(token_ids)
        self._block_ids[block_index] = _id_of(block)

    def append(self, new_block: Block) -> None:
        self._blocks.append(new_block)
        self._block_ids.append(_id_of(new_block))

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, block_index: int) -> Block:
        return self._blocks[block_index]

    def __setitem__(self, block_index: int, new_block: Block) -> None:
        self._blocks[block_index] = new_block
        self._block_ids[block_index] = _id_of(new_block)

    def reset(self) -> None:
        self.update([])

    def ids(self) -> list[BlockId]:
        return self._block_ids

    def list(self) -> list[Block]:
        return self._blocks


def _id_of(block: Block) -> BlockId:
    assert block.block_id is not None
    return block.block_id


@dataclasses.dataclass
class CacheMetricData:
    """The share of cache queries that hit, over all time.

    Queries are counted in groups of `block_size` (groups of queries: nothing to do with blocks of tokens). A
    full group is folded into a running mean and its counts start anew, so that no count grows without end.
    """

    num_completed_blocks: int = 0
    completed_block_cache_hit_rate: float = 0.0
    num_incompleted_block_queries: int = 0
    num_incompleted_block_hit: int = 0
    block_size: int = 1000

    def query(self, hit: bool) -> None:
        """Count one query."""
        self.num_incompleted_block_queries += 1
        self.num_incompleted_block_hit += int(hit)
        if self.num_incompleted_block_queries == self.block_size:
            self.completed_block_cache_hit_rate = self.get_hit_rate()
            self.num_completed_blocks += 1
            self.num_incompleted_block_queries = 0
            self.num_incompleted_block_hit = 0

    def get_hit_rate(self) -> float:
        """Hits per query, 0 to 1; 0 before the first query."""
        num_queries = self.num_completed_blocks * self.block_size + self.num_incompleted_block_queries
        if num_queries == 0:
            return 0.0
        num_completed_hits = self.completed_block_cache_hit_rate * self.num_completed_blocks * self.block_size
        return (num_completed_hits + self.num_incompleted_block_hit) / num_queries


class PooledBlockAllocator(BlockAllocator):
    """What the naive and the prefix-caching allocator do alike, once ids can be taken and dropped."""

    _refcounter: RefCounter
    _cow_tracker: CopyOnWriteTracker
    _block_pool: BlockPool
    _block_size: int

    @abstractmethod
    def _allocate_block_id(self) -> BlockId:
        """Take an id, with one reference. NoFreeBlocksError: there is none."""

    @abstractmethod
    def _free_block_id(self, block: Block) -> None:
        """Drop the block's reference and set its id to None."""

    def allocate_mutable_block(self, prev_block: Block | None, device: Device | None = None) -> Block:
        assert device is None
        block_id = self._allocate_block_id()
        return self._block_pool.init_block(prev_block, [], self._block_size, block_id)

    def free(self, block: Block, keep_block_object: bool = False) -> None:
        self._free_block_id(block)
        if not keep_block_object:
            self._block_pool.free_block(block)

    def fork(self, last_block: Block) -> list[Block]:
        """See BlockAllocator. AssertionError: a block of the sequence is not allocated."""
        forked: list[Block] = []
        for block in get_all_blocks_recursively(last_block):
            assert block.block_id is not None, "cannot fork a freed block"
            assert self._refcounter.get(block.block_id) > 0, "cannot fork a freed block"
            self._refcounter.incr(block.block_id)
            prev_block = forked[-1] if forked else None
            forked.append(
                self._block_pool.init_block(prev_block, block.token_ids, self._block_size, block.block_id)
            )
        return forked

    def cow_block_if_not_appendable(self, block: Block) -> BlockId:
        """See BlockAllocator.

        First the shared id is dropped, then a new one taken. NoFreeBlocksError: there is none.
        """
        src_block_id = block.block_id
        assert src_block_id is not None
        if self._cow_tracker.is_appendable(block):
            return src_block_id
        self._free_block_id(block)
        trg_block_id = self._allocate_block_id()
        self._cow_tracker.record_cow(src_block_id, trg_block_id)
        return trg_block_id

    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        return self._cow_tracker.clear_cows()

    def swap_out(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._free_block_id(block)

    def swap_in(self, blocks: list[Block]) -> None:
        # A second block is allocated for each, for the sake of its id; then its object goes back to the pool.
        for block in blocks:
            if block.is_full:
                newcomer = self.allocate_immutable_block(block.prev_block, block.token_ids)
            else:
                newcomer = self.allocate_mutable_block(block.prev_block)
                newcomer.append_token_ids(block.token_ids)
            block.block_id = newcomer.block_id
            newcomer.block_id = None
            self._block_pool.free_block(newcomer)

    def get_num_total_blocks(self) -> int:
        return len(self.all_block_ids)

    def get_physical_block_id(self, absolute_id: int) -> int:
        """See BlockAllocator. ValueError: the id is another allocator's."""
        return sorted(self.all_block_ids).index(absolute_id)
