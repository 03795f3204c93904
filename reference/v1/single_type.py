"""The block tables of one group of layers (vLLM 0.33, `v1/core/single_type_kv_cache_manager.py`).

A manager gives its group's requests their blocks, says which of them attention reads no more, and which
cached blocks a new request can begin with. All managers take from one pool.

Left out, as no allocator decision here needs it: Mamba, blocks loaded from elsewhere (connectors), encoder
tokens, context parallelism, and hashes within a block. Where vLLM differs:

- In a full-attention group with blocks larger than the hashes' it also registers the hash at which a prompt
  ends inside of a block. Only Mamba's finer hits look it up, but with EAGLE that block is freed to the tail.
- With a window of one token and no EAGLE its `reachable_block_mask` keeps nothing, so such a group never
  hits; here the window is one block, as vLLM's own look-up wants it.
"""

from collections import defaultdict
from collections.abc import Sequence

from .block_pool import BlockPool
from .kv_cache_utils import BlockHash, KVCacheBlock, Request, resolve_block_hashes, trim_null_head
from .specs import AttentionSpec, RSWASpec, cdiv

# For each group of the look-up: its blocks, null blocks where attention will not read.
Hits = tuple[list[KVCacheBlock], ...]


class SingleTypeKVCacheManager:
    """The block tables of one group, by request id, in `req_to_blocks`.

    num_cached_block: how many of a request's blocks, from the first, are cached or never will be.
    scheduler_block_size: tokens at whose multiples hits end, a multiple of the block size, the default.
    max_admission_blocks_per_request: the most blocks a request holds, for the admission of whole prompts.
    use_eagle: whether hits drop their last block, so that one more is kept findable. The coordinator sets it.
    """

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
        scheduler_block_size: int | None = None,
        max_admission_blocks_per_request: int | None = None,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.block_size = kv_cache_spec.block_size
        self.block_pool = block_pool
        self.enable_caching = enable_caching
        self.kv_cache_group_id = kv_cache_group_id
        self.cache_hit_alignment_tokens = scheduler_block_size or self.block_size
        self.max_admission_blocks_per_request = max_admission_blocks_per_request
        self.use_eagle = False
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
        kv_cache_spec: AttentionSpec,
        drop_eagle_block: bool = False,
        alignment_tokens: int | None = None,
    ) -> tuple[Hits, int]:
        """Return the blocks of the longest cached prefix of at most `max_length` tokens, and its tokens.

        Blocks of it that attention will not read need not be cached: there the null block stands in.

        block_hashes: one for every `block_pool.hash_block_size` tokens.
        kv_cache_group_ids: groups of this spec, all of which must have the prefix.
        drop_eagle_block: leave out the last block found, whose hidden states a draft model needs.
        alignment_tokens: the hit ends at a multiple of this; the block size by default.
        """
        raise NotImplementedError

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Return how many blocks, from this request's first, every request with blocks uses.

        vLLM 0.33 returns zeros: it has no cascade attention any more.
        """
        raise NotImplementedError

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Return how many blocks would leave the free queue to give the request `num_tokens` tokens in all.

        They are the new ones, and the hits that nobody uses at present.

        apply_admission_cap: count at most what the request holds at one time, as blocks leave its window
            while its prompt is computed. Only for admission: a step takes what it takes.
        """
        num_required_blocks = cdiv(num_tokens, self.block_size)
        if apply_admission_cap and self.max_admission_blocks_per_request is not None:
            num_required_blocks = min(num_required_blocks, self.max_admission_blocks_per_request)
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
        num_new_blocks = cdiv(num_tokens, self.block_size) - len(req_blocks)
        if num_new_blocks <= 0:
            return []
        new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
        req_blocks.extend(new_blocks)
        return new_blocks

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int] = (),
    ) -> None:
        """Cache the request's full blocks among its first `num_tokens` tokens that a hit may need.

        replay_boundaries: where a hit by the same prompt may end, see `coordinator.replay_boundaries`. The
            junction with another prompt, `request.shared_prefix_boundary`, joins them; with EAGLE also the
            place a block before it, as who leaves right behind the junction lacks the block to drop.
        """
        num_cached_blocks = self.num_cached_block.get(request.request_id, 0)
        num_hashed_tokens = len(request.block_hashes) * self.block_pool.hash_block_size
        num_full_blocks = min(num_tokens, num_hashed_tokens) // self.block_size
        if num_cached_blocks >= num_full_blocks:
            return
        boundaries = [*replay_boundaries]
        if request.shared_prefix_boundary:
            boundaries.append(request.shared_prefix_boundary)
            if self.use_eagle:
                boundaries.append(request.shared_prefix_boundary - self.block_size)
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.req_to_blocks[request.request_id],
            num_cached_blocks=num_cached_blocks,
            num_full_blocks=num_full_blocks,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
            block_mask=self.reachable_block_mask(
                start_block=num_cached_blocks,
                end_block=num_full_blocks,
                alignment_tokens=self.cache_hit_alignment_tokens,
                kv_cache_spec=self.kv_cache_spec,
                use_eagle=self.use_eagle,
                retention_interval=retention_interval,
                reachable_boundaries=boundaries,
            ),
        )
        self.num_cached_block[request.request_id] = num_full_blocks

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: AttentionSpec,
        use_eagle: bool,
        retention_interval: int | None = None,
        reachable_boundaries: Sequence[int] = (),
        final_segment_end_block: int | None = None,
    ) -> list[bool] | None:
        """Return which blocks from `start_block` on, before `end_block`, some hit may need; None for all.

        alignment_tokens: hits end at its multiples; None when they may end anywhere.
        retention_interval, reachable_boundaries: see `KVCacheConfig` and `cache_blocks`.
        final_segment_end_block: where the request ends, when known: its last tail stays findable though it
            ends at no multiple.
        """
        return None

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request and return its blocks, first to last, without the null blocks in front."""
        self.num_cached_block.pop(request_id, None)
        return trim_null_head(self.req_to_blocks.pop(request_id, []))

    def free(self, request_id: str) -> None:
        """Free the request's blocks, last to first. A request without blocks is no error."""
        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free, last to first, the blocks that hold skipped tokens only. Null blocks take their places.

        processed_computed_tokens: tokens of steps that are over; a step in flight still reads its window.
        """
        num_skipped_blocks = self.get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        if num_skipped_blocks:
            self._remove_blocks_in_range(request_id, 0, num_skipped_blocks)

    def _remove_blocks_in_range(self, request_id: str, first: int, end: int) -> None:
        """Free the blocks at [first, end) of the table, last to first, down to the first null block."""
        blocks = self.req_to_blocks.get(request_id, [])
        removed_blocks = []
        for index in reversed(range(first, min(end, len(blocks)))):
            if blocks[index].is_null:
                break  # an earlier call has removed this one and all before it
            removed_blocks.append(blocks[index])
            blocks[index] = self.block_pool.null_block
        self.block_pool.free_blocks(removed_blocks)


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every token is read, so a hit is an unbroken run of cached blocks from the first."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: AttentionSpec,
        drop_eagle_block: bool = False,
        alignment_tokens: int | None = None,
    ) -> tuple[Hits, int]:
        block_size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        computed_blocks: Hits = tuple([] for _ in kv_cache_group_ids)
        for block_hash in hashes[: max_length // block_size]:
            cached_blocks = block_pool.get_cached_block(block_hash, kv_cache_group_ids)
            if cached_blocks is None:
                break
            for computed, block in zip(computed_blocks, cached_blocks, strict=True):
                computed.append(block)
        length = max(len(computed_blocks[0]) - drop_eagle_block, 0) * block_size
        length -= length % (alignment_tokens or block_size)
        for computed in computed_blocks:
            del computed[length // block_size :]
        return computed_blocks, length

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        num_common_blocks = 0
        for block in self.req_to_blocks[running_request_id]:
            if block.ref_cnt != len(self.req_to_blocks):
                break
            num_common_blocks += 1
        return num_common_blocks


class RSWAManager(FullAttentionManager):
    """The prompt is read, and the last `rswa_window` generated tokens: blocks leave the middle of the table.

    A hit is that of full attention.
    """

    kv_cache_spec: RSWASpec

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks between the prompt's last one and the window. Without a prompt's length, none."""
        if num_prompt_tokens is None:
            return
        window_start = max(num_prompt_tokens, processed_computed_tokens - self.kv_cache_spec.rswa_window)
        first = cdiv(num_prompt_tokens, self.block_size)
        self._remove_blocks_in_range(request_id, first, window_start // self.block_size)
