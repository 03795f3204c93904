"""vLLM V1's manager of requests' blocks (0.14), for layers of one kind: full or sliding-window attention.

Left out, as no allocator decision here needs it: several KV cache groups, blocks loaded from elsewhere
(connectors), encoder tokens, EAGLE, context parallelism, statistics.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..v0.cache_engine import get_dtype_size
from .block_pool import BlockPool, KVCacheEvent
from .kv_cache_utils import BlockHash, KVCacheBlock, Request


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class FullAttentionSpec:
    """The cache of one layer that attends to every token. `dtype`: see `get_dtype_size`."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in this layer, K and V."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * get_dtype_size(self.dtype)


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    """The cache of one layer in which a token attends to itself and `sliding_window - 1` tokens before."""

    sliding_window: int


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """The layers that share one block table."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec


@dataclass(frozen=True)
class KVCacheConfig:
    """`num_blocks` blocks, the null block included, for these groups. Tensors are not looked at."""

    num_blocks: int
    kv_cache_tensors: list[Any]
    kv_cache_groups: list[KVCacheGroupSpec]


@dataclass
class KVCacheBlocks:
    """Blocks handed to or from a scheduler: blocks[g][i] is the i-th block in group g, the only one here."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
        return KVCacheBlocks(tuple([*a, *b] for a, b in zip(self.blocks, other.blocks, strict=True)))

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Return the ids, group by group; None for no blocks at all where `allow_none`."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Return the ids of the blocks that are not cached."""
        assert len(self.blocks) == 1, "Only one group is supported"
        return [block.block_id for block in self.blocks[0] if block.block_hash is None]

    def new_empty(self) -> "KVCacheBlocks":
        return KVCacheBlocks(tuple(() for _ in self.blocks))


class SingleTypeKVCacheManager:
    """The block tables of one kind of attention, by request id, in `req_to_blocks`.

    num_cached_block: how many of a request's blocks, from the first, are cached.
    """

    def __init__(
        self, kv_cache_spec: KVCacheSpec, block_pool: BlockPool, enable_caching: bool, kv_cache_group_id: int
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.block_size = kv_cache_spec.block_size
        self.block_pool = block_pool
        self.enable_caching = enable_caching
        self.kv_cache_group_id = kv_cache_group_id
        self.req_to_blocks: defaultdict[str, list[KVCacheBlock]] = defaultdict(list)
        self.num_cached_block: dict[str, int] = {}

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many tokens, from the first, the next token does not attend to."""
        return 0

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Return the blocks of the longest cached prefix of at most `max_length` tokens, for each group.

        Blocks of it that attention will not read need not be cached: there the null block stands in.
        """
        raise NotImplementedError

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Return how many blocks, from this request's first, every request with blocks uses."""
        raise NotImplementedError

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
    ) -> int:
        """Return how many blocks would leave the free queue to give the request `num_tokens` tokens in all.

        They are the new ones, and the hits that nobody uses at present.
        """
        num_required_blocks = _cdiv(num_tokens, self.block_size)
        num_held_blocks = len(self.req_to_blocks.get(request_id, ()))
        if request_id in self.num_cached_block:
            assert not new_computed_blocks, "only a new request can have new computed blocks"
            return max(num_required_blocks - num_held_blocks, 0)

        num_skipped_blocks = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        num_present_blocks = max(num_skipped_blocks, num_held_blocks + len(new_computed_blocks))
        num_new_blocks = max(num_required_blocks - num_present_blocks, 0)
        read_blocks = new_computed_blocks[max(num_skipped_blocks - num_held_blocks, 0) :]
        return num_new_blocks + sum(block.ref_cnt == 0 and not block.is_null for block in read_blocks)

    def allocate_new_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], num_computed_tokens: int
    ) -> None:
        """Start a new request's table with the blocks it hit, null blocks where it will not read."""
        if request_id in self.num_cached_block:
            assert not new_computed_blocks, "only a new request can have new computed blocks"
            return
        req_blocks = self.req_to_blocks[request_id]
        assert not req_blocks, f"{request_id=} must be new to have new computed blocks"
        num_skipped_blocks = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        read_blocks = new_computed_blocks[num_skipped_blocks:]
        if self.enable_caching:
            self.block_pool.touch(read_blocks)
        else:
            assert not read_blocks, "Computed blocks should be empty when prefix caching is disabled"
        req_blocks.extend([self.block_pool.null_block] * num_skipped_blocks)
        req_blocks.extend(read_blocks)
        self.num_cached_block[request_id] = len(req_blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Extend the request's table to at least `num_tokens` tokens. Return the new blocks."""
        req_blocks = self.req_to_blocks[request_id]
        num_new_blocks = _cdiv(num_tokens, self.block_size) - len(req_blocks)
        new_blocks = self.block_pool.get_new_blocks(max(num_new_blocks, 0))
        req_blocks.extend(new_blocks)
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Cache the request's full blocks among its first `num_tokens` tokens."""
        num_cached_blocks = self.num_cached_block.get(request.request_id, 0)
        num_full_blocks = num_tokens // self.block_size
        if num_cached_blocks >= num_full_blocks:
            return
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.req_to_blocks[request.request_id],
            num_cached_blocks=num_cached_blocks,
            num_full_blocks=num_full_blocks,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
        )
        self.num_cached_block[request.request_id] = num_full_blocks

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Free, last to first, the blocks that hold skipped tokens only. Null blocks take their places."""
        blocks = self.req_to_blocks.get(request_id, [])
        num_skipped_blocks = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        removed_blocks = []
        for index in reversed(range(min(num_skipped_blocks, len(blocks)))):
            if blocks[index].is_null:
                break  # an earlier call has removed this one and all before it
            removed_blocks.append(blocks[index])
            blocks[index] = self.block_pool.null_block
        self.block_pool.free_blocks(removed_blocks)

    def free(self, request_id: str) -> None:
        """Free the request's blocks, last to first. A request without blocks is no error."""
        self.block_pool.free_blocks(reversed(self.req_to_blocks.pop(request_id, [])))
        self.num_cached_block.pop(request_id, None)


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every token is read, so a hit is an unbroken run of cached blocks from the first."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
    ) -> tuple[list[KVCacheBlock], ...]:
        computed_blocks: tuple[list[KVCacheBlock], ...] = tuple([] for _ in kv_cache_group_ids)
        for block_hash in block_hashes[: max_length // kv_cache_spec.block_size]:
            cached_blocks = block_pool.get_cached_block(block_hash, kv_cache_group_ids)
            if cached_blocks is None:
                break
            for computed, block in zip(computed_blocks, cached_blocks, strict=True):
                computed.append(block)
        return computed_blocks

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        num_common_blocks = 0
        for block in self.req_to_blocks[running_request_id]:
            if block.ref_cnt != len(self.req_to_blocks):
                break
            num_common_blocks += 1
        return num_common_blocks


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Only the window's tokens are read, so a hit is an unbroken run long enough to fill the window."""

    def __init__(
        self,
        kv_cache_spec: SlidingWindowSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
    ) -> None:
        super().__init__(kv_cache_spec, block_pool, enable_caching, kv_cache_group_id)
        self.sliding_window = kv_cache_spec.sliding_window

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        # The next token attends to itself and the `sliding_window - 1` tokens before it.
        return max(num_computed_tokens - (self.sliding_window - 1), 0)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
    ) -> tuple[list[KVCacheBlock], ...]:
        assert isinstance(kv_cache_spec, SlidingWindowSpec), f"{kv_cache_spec=} must have a sliding window"
        num_window_blocks = _cdiv(kv_cache_spec.sliding_window - 1, kv_cache_spec.block_size)
        cached = [
            block_pool.get_cached_block(block_hash, kv_cache_group_ids)
            for block_hash in block_hashes[: max_length // kv_cache_spec.block_size]
        ]
        for end in range(len(cached), 0, -1):
            start = max(end - max(num_window_blocks, 1), 0)
            if all(blocks is not None for blocks in cached[start:end]):
                break
        else:
            start = end = 0

        hits = [blocks for blocks in cached[start:end] if blocks is not None]
        null_blocks = [block_pool.null_block] * start
        return tuple(null_blocks + [blocks[i] for blocks in hits] for i in range(len(kv_cache_group_ids)))

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0  # the first blocks are null blocks, which nobody reads


class KVCacheManager:
    """Gives requests their blocks, finds the beginning of a request that is cached, frees.

    max_model_len: tokens a request may have at most, counting those looked ahead.
    hash_block_size: tokens per entry of `Request.block_hashes`; must be the group's block size, the default.
    enable_kv_cache_events, metrics_collector, free_profile: see `BlockPool`.

    Raises: NotImplementedError for more or fewer than one group; AssertionError for another hash block size.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        hash_block_size: int | None = None,
        enable_caching: bool = True,
        *,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,
        free_profile: str = "classic",
    ) -> None:
        num_groups = len(kv_cache_config.kv_cache_groups)
        if num_groups != 1:
            raise NotImplementedError(f"{num_groups=} must be 1")
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        block_size = spec.block_size
        if hash_block_size is None:
            hash_block_size = block_size
        assert hash_block_size == block_size or not enable_caching, (
            f"{hash_block_size=} must be {block_size=}"
        )

        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
            free_profile,
        )
        manager: SingleTypeKVCacheManager
        if isinstance(spec, SlidingWindowSpec):
            manager = SlidingWindowManager(spec, self.block_pool, enable_caching, kv_cache_group_id=0)
        else:
            manager = FullAttentionManager(spec, self.block_pool, enable_caching, kv_cache_group_id=0)
        self.single_type_managers = (manager,)
        self.empty_kv_cache_blocks = KVCacheBlocks(((),))

    @property
    def usage(self) -> float:
        return self.block_pool.get_usage()

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Return the cached blocks the request can begin with, and the number of tokens in them. Takes
        nothing.

        At least one token is left to compute, for its logits; hits being whole blocks, that may cost a block.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        manager = self.single_type_managers[0]
        blocks = manager.find_longest_cache_hit(
            block_hashes=request.block_hashes,
            max_length=request.num_tokens - 1,
            kv_cache_group_ids=[0],
            block_pool=self.block_pool,
            kv_cache_spec=manager.kv_cache_spec,
        )
        return self.create_kv_cache_blocks(blocks), len(blocks[0]) * manager.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> KVCacheBlocks | None:
        """Give the request room for its next tokens, and cache the blocks that these fill.

        num_new_tokens: tokens to compute now, at least 1, drafts included.
        num_new_computed_tokens, new_computed_blocks: what `get_computed_blocks` returned, for a new request.
        num_lookahead_tokens: further tokens to have room for.
        delay_cache_blocks: leave the caching to a later `cache_blocks`.

        Returns: the new blocks; or None when the free ones do not suffice, and then nothing is taken, though
            blocks outside of a sliding window have been freed.
        Raises: ValueError when num_new_tokens is 0.
        """
        if num_new_tokens == 0:
            raise ValueError("num_new_tokens must be greater than 0")
        manager = self.single_type_managers[0]
        request_id = request.request_id
        hit_blocks = (new_computed_blocks or self.empty_kv_cache_blocks).blocks[0]
        num_computed_tokens = min(request.num_computed_tokens + num_new_computed_tokens, self.max_model_len)
        num_tokens_need_slot = min(
            num_computed_tokens + num_new_tokens + num_lookahead_tokens, self.max_model_len
        )

        manager.remove_skipped_blocks(request_id, num_computed_tokens)
        num_blocks_to_allocate = manager.get_num_blocks_to_allocate(
            request_id, num_tokens_need_slot, hit_blocks, num_computed_tokens
        )
        if num_blocks_to_allocate > self.block_pool.get_num_free_blocks():
            return None

        if hit_blocks:
            manager.allocate_new_computed_blocks(request_id, hit_blocks, num_computed_tokens)
        new_blocks = manager.allocate_new_blocks(request_id, num_tokens_need_slot)
        if self.enable_caching and not delay_cache_blocks:
            # Tokens beyond request.num_tokens are drafts, which may yet be rejected.
            manager.cache_blocks(request, min(num_computed_tokens + num_new_tokens, request.num_tokens))
        return self.create_kv_cache_blocks((new_blocks,))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Cache the request's full blocks among its first `num_computed_tokens` tokens."""
        if self.enable_caching:
            self.single_type_managers[0].cache_blocks(request, num_computed_tokens)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Free the blocks that the token after `total_computed_tokens` no longer attends to."""
        self.single_type_managers[0].remove_skipped_blocks(request_id, total_computed_tokens)

    def free(self, request: Request) -> None:
        """Free the request's blocks, last to first, so that its beginning is evicted last."""
        self.single_type_managers[0].free(request.request_id)

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        return self.block_pool.reset_prefix_cache()

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return for each group how many blocks, from this request's first, all requests with blocks use."""
        return [m.get_num_common_prefix_blocks(running_request_id) for m in self.single_type_managers]

    def take_events(self) -> list[KVCacheEvent]:
        return self.block_pool.take_events()

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return all blocks of a request."""
        blocks = self.single_type_managers[0].req_to_blocks.get(request_id, [])
        return self.create_kv_cache_blocks((blocks,))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the ids of all blocks of a request, for each group."""
        return tuple([block.block_id for block in group] for group in self.get_blocks(request_id).blocks)

    def create_kv_cache_blocks(self, blocks: tuple[Sequence[KVCacheBlock], ...]) -> KVCacheBlocks:
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks
