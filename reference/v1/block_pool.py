"""vLLM V1's block pool (0.33): every block, the order in which free ones are taken, and what they still hold.

A freed block keeps its content and its hash until it is taken for something else, so the free queue is also
the cache's eviction order. The caller frees a request's blocks last to first, so the beginning of a
prompt, the part that others share, is evicted last.

Where this oracle is stricter than vLLM: the null block's reference count stays 0 (vLLM lets it drift), and
a block named twice in one `free_blocks` enters the queue once. Freeing a block that nobody uses raises no
error, as in vLLM: its count becomes negative, which `reference.invariants` reports.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    Request,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)


@dataclass(frozen=True)
class BlockStored:
    """Content has become findable."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None
    group_idx: int = 0


@dataclass(frozen=True)
class BlockRemoved:
    """Content can no longer be found."""

    block_hashes: list[BlockHash]
    group_idx: int = 0


@dataclass(frozen=True)
class AllBlocksCleared:
    """No content can be found."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class BlockHashToBlockMap:
    """The cached blocks by hash. Several blocks may have one hash: the same tokens, computed by two requests.

    A block never gives way to its double, so a request's table only ever grows. Under a hash lies the
    block itself, or, once there have been two, a dictionary of blocks by id (vLLM's own layout).
    """

    def __init__(self) -> None:
        self._cache: dict[BlockHashWithGroupId, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def get_all_blocks(self, key: BlockHashWithGroupId) -> list[KVCacheBlock]:
        """Return the blocks of this hash, first inserted first."""
        blocks = self._cache.get(key, {})
        return [blocks] if isinstance(blocks, KVCacheBlock) else list(blocks.values())

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """Return the block of this hash that was inserted first, or None."""
        blocks = self.get_all_blocks(key)
        return blocks[0] if blocks else None

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        blocks = self._cache.get(key)
        if blocks is None:
            self._cache[key] = block
        elif isinstance(blocks, KVCacheBlock):
            self._cache[key] = {blocks.block_id: blocks, block.block_id: block}
        else:
            blocks[block.block_id] = block

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Take out the block of this hash and id, or return None when there is none."""
        for block in self.get_all_blocks(key):
            if block.block_id == block_id:
                blocks = self._cache[key]
                if isinstance(blocks, dict):
                    del blocks[block_id]
                if not isinstance(blocks, dict) or not blocks:
                    del self._cache[key]
                return block
        return None

    def __len__(self) -> int:
        """Return the number of different hashes."""
        return len(self._cache)


class BlockPool:
    """All blocks of one cache. Block 0 is the null block, a placeholder in tables, never given out.

    num_gpu_blocks: blocks in the cache, the null block included, at least 1.
    enable_caching: whether freed content is kept findable.
    hash_block_size: tokens per entry of `Request.block_hashes`.
    enable_kv_cache_events: whether to record what becomes findable and what no longer is, for `take_events`.
    metrics_collector: told of each block by `on_block_allocated`, `on_block_accessed`, `on_block_evicted`
        and of a reset by `reset`, when given.
    free_profile: where freed blocks go. "classic" (to vLLM 0.23): all to the tail. "split" (from 0.24): those
        with cached content to the tail, the others to the head. Either group keeps the order given, so with
        "split" the first block freed without content is the next one taken.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,
        free_profile: str = "classic",
    ) -> None:
        assert isinstance(num_gpu_blocks, int), f"{num_gpu_blocks=} must be an int"
        assert num_gpu_blocks > 0, f"{num_gpu_blocks=} must be at least 1"
        if free_profile not in ("classic", "split"):
            raise ValueError(f"{free_profile=} must be 'classic' or 'split'")
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.metrics_collector = metrics_collector
        self.free_profile = free_profile

        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.kv_event_queue: list[KVCacheEvent] = []

        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """Return the block that holds this content for each group, or None when any group lacks it."""
        cached_blocks = []
        for group_id in kv_cache_group_ids:
            key = make_block_hash_with_group_id(block_hash, group_id)
            block = self.cached_block_hash_to_block.get_one_block(key)
            if block is None:
                return None
            cached_blocks.append(block)
        return cached_blocks

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """Make the content of blocks[num_cached_blocks:num_full_blocks] findable, null blocks excepted.

        The key is (hash, group): each group has its own block for the same tokens.

        blocks: all blocks of the request in this group, in order.
        block_size: tokens per block, a multiple of `hash_block_size`.
        block_mask: for each of the blocks, whether to do so; all of them when None.

        Raises: AssertionError when the request has too few hashes, or a block has a hash already.
        """
        if num_cached_blocks >= num_full_blocks:
            return
        block_hashes = resolve_block_hashes(request.block_hashes, self.hash_block_size, block_size)
        assert len(block_hashes) >= num_full_blocks, (
            f"{len(block_hashes)=} must be at least {num_full_blocks=}"
        )

        new_hashes = []
        for index in range(num_cached_blocks, num_full_blocks):
            block = blocks[index]
            if block.is_null or (block_mask is not None and not block_mask[index - num_cached_blocks]):
                continue
            key = make_block_hash_with_group_id(block_hashes[index], kv_cache_group_id)
            block.block_hash = key
            self.cached_block_hash_to_block.insert(key, block)
            new_hashes.append(block_hashes[index])

        if self.enable_kv_cache_events:
            self.kv_event_queue.append(
                BlockStored(
                    block_hashes=new_hashes,
                    parent_block_hash=block_hashes[num_cached_blocks - 1] if num_cached_blocks else None,
                    token_ids=request.all_token_ids[
                        num_cached_blocks * block_size : num_full_blocks * block_size
                    ],
                    block_size=block_size,
                    lora_name=request.lora_request.lora_name if request.lora_request else None,
                    group_idx=kv_cache_group_id,
                )
            )

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the head of the free queue, for one request; their old content is evicted.

        Raises: ValueError when there are too few, and then takes none.
        """
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            if self.enable_caching:
                self._maybe_evict_cached_block(block)
            assert block.ref_cnt == 0, f"{block} was in the free queue, so its ref_cnt must be 0"
            block.ref_cnt = 1
            if self.metrics_collector:
                self.metrics_collector.on_block_allocated(block)
        return blocks

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Make the block's content unfindable. Returns whether it was findable."""
        if self.metrics_collector:
            self.metrics_collector.on_block_evicted(block)
        key = block.block_hash
        if key is None or self.cached_block_hash_to_block.pop(key, block.block_id) is None:
            return False
        block.reset_hash()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(BlockRemoved([get_block_hash(key)], get_group_id(key)))
        return True

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add one reference to each of these blocks; free ones leave the queue, from wherever they are."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop one reference to each of these blocks; blocks without a reference enter the queue.

        ordered_blocks: the one to evict first comes first.
        """
        to_head: list[KVCacheBlock] = []
        to_tail: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                has_content = self.enable_caching and block.block_hash is not None
                (to_tail if has_content or self.free_profile == "classic" else to_head).append(block)
        self.free_block_queue.prepend_n(to_head)
        self.free_block_queue.append_n(to_tail)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make the content of these blocks unfindable; who uses them keeps them.

        Raises: AssertionError on an id that is too large.
        """
        for block_id in block_ids:
            assert block_id < len(self.blocks), f"{block_id=} must be less than {len(self.blocks)=}"
            self._maybe_evict_cached_block(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Make all content unfindable. Refused, with False, while any block is in use."""
        if self.get_num_free_blocks() != self.num_gpu_blocks - 1:  # the null block is never free
            return False
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        for block in self.blocks:
            block.reset_hash()
        if self.metrics_collector:
            self.metrics_collector.reset()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        return True

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Return the blocks in use over all blocks, from 0 to 1. The null block does not count."""
        num_usable_blocks = self.num_gpu_blocks - 1
        if num_usable_blocks == 0:
            return 0.0
        return 1.0 - self.get_num_free_blocks() / num_usable_blocks

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events since the last call, oldest first."""
        events, self.kv_event_queue = self.kv_event_queue, []
        return events
