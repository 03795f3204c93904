"""vLLM V1's manager of requests' blocks (0.33), for one or several groups of layers.

Left out, as no allocator decision here needs it: blocks loaded from elsewhere (connectors), encoder tokens,
context parallelism, statistics, and the blocks that a scheduler keeps free (its watermark). See also
`single_type` and `coordinator`. With one group of full attention or one window it is also 0.14's manager.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .block_pool import BlockPool, KVCacheEvent
from .coordinator import get_kv_cache_coordinator
from .kv_cache_utils import KVCacheBlock, Request
from .single_type import SingleTypeKVCacheManager
from .specs import KVCacheConfig


@dataclass
class KVCacheBlocks:
    """Blocks handed to or from a scheduler: blocks[g][i] is the i-th block in group g."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
        return KVCacheBlocks(tuple([*a, *b] for a, b in zip(self.blocks, other.blocks, strict=True)))

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Return the ids, group by group; None for no blocks at all where `allow_none`."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Return the ids of the blocks that are not cached, of the only group."""
        assert len(self.blocks) == 1, "Only one group is supported"
        return [block.block_id for block in self.blocks[0] if block.block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Return, for each group, the ids of the blocks that are not cached, null blocks excepted."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> "KVCacheBlocks":
        return KVCacheBlocks(tuple(() for _ in self.blocks))


class KVCacheManager:
    """Gives requests their blocks, finds the beginning of a request that is cached, frees.

    max_model_len: tokens a request may have at most, counting those looked ahead.
    hash_block_size: tokens per entry of `Request.block_hashes`: by default the groups' greatest divisor.
    scheduler_block_size: tokens at whose multiples hits end: their least common multiple by default.
    max_in_flight_tokens: tokens scheduled and not yet processed, over all steps under way, by which whole
        prompts are admitted; `max_model_len` by default, which limits nothing.
    use_eagle: whether a draft model needs hidden states, so that hits drop a block. See `KVCacheCoordinator`.
    enable_kv_cache_events, metrics_collector, free_profile: see `BlockPool`.

    Raises: ValueError without a group, and for a wrong retention interval; AssertionError for other hash and
        scheduler block sizes.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        hash_block_size: int | None = None,
        enable_caching: bool = True,
        *,
        scheduler_block_size: int | None = None,
        max_in_flight_tokens: int | None = None,
        use_eagle: bool = False,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,
        free_profile: str = "classic",
    ) -> None:
        num_groups = len(kv_cache_config.kv_cache_groups)
        if num_groups < 1:
            raise ValueError(f"{num_groups=} must be at least 1")
        block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.coordinator = get_kv_cache_coordinator(
            kv_cache_config,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_model_len if max_in_flight_tokens is None else max_in_flight_tokens,
            use_eagle=use_eagle,
            enable_caching=enable_caching,
            scheduler_block_size=scheduler_block_size or math.lcm(*block_sizes),
            hash_block_size=hash_block_size or math.gcd(*block_sizes),
            enable_kv_cache_events=enable_kv_cache_events,
            metrics_collector=metrics_collector,
            free_profile=free_profile,
        )
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in range(num_groups)))

    @property
    def block_pool(self) -> BlockPool:
        """Pool of all groups."""
        return self.coordinator.block_pool

    @property
    def single_type_managers(self) -> tuple[SingleTypeKVCacheManager, ...]:
        """Managers of the groups, in order."""
        return self.coordinator.single_type_managers

    @property
    def usage(self) -> float:
        return self.block_pool.get_usage()

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Return the cached blocks the request can begin with, the number of tokens in them, and a junction.

        Takes nothing. At least one token is left to compute, for its logits. Hits being whole blocks, that
        may cost one. The junction is where a longer prefix ends that some group knows and another lacks; 0 if
        none does. As `request.shared_prefix_boundary` it is kept findable for the next prompt.

        max_cache_hit_length: most tokens of a hit, `request.num_tokens - 1` by default.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0, 0
        if max_cache_hit_length is None:
            max_cache_hit_length = request.num_tokens - 1
        blocks, num_tokens, num_uncached = self.coordinator.find_longest_cache_hit(
            request.block_hashes, max_cache_hit_length
        )
        junction = num_tokens + num_uncached if num_uncached else 0
        return self.create_kv_cache_blocks(blocks), num_tokens, junction

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> KVCacheBlocks | None:
        """Give the request room for its next tokens, and cache the blocks that these fill.

        num_new_tokens: tokens to compute now, at least 1 unless tokens are hit, drafts included.
        num_new_computed_tokens, new_computed_blocks: what `get_computed_blocks` returned, for a new request.
        num_lookahead_tokens: further tokens to have room for.
        delay_cache_blocks: leave the caching to a later `cache_blocks`.
        full_sequence_must_fit: refuse also when the whole request has no room at present.
        reserved_blocks: free blocks that must be left.

        Returns: the new blocks; or None when the free ones do not suffice for all groups together, and then
            nothing is taken, though blocks that attention reads no more have been freed.
        Raises: ValueError when there are neither new tokens nor hits.
        """
        if num_new_tokens == 0 and num_new_computed_tokens == 0:
            raise ValueError(
                "num_new_tokens must be greater than 0 when there are no computed tokens to adopt"
            )
        coordinator, request_id = self.coordinator, request.request_id
        hits = (new_computed_blocks or self.empty_kv_cache_blocks).blocks
        num_computed_tokens = min(request.num_computed_tokens + num_new_computed_tokens, self.max_model_len)
        num_tokens_need_slot = min(
            num_computed_tokens + num_new_tokens + num_lookahead_tokens, self.max_model_len
        )
        if full_sequence_must_fit:
            num_blocks = coordinator.get_num_blocks_to_allocate(
                request_id,
                min(request.num_tokens, self.max_model_len),
                hits,
                num_computed_tokens,
                apply_admission_cap=True,
            )
            if num_blocks > self.block_pool.get_num_free_blocks():
                return None

        num_processed_tokens = max(num_computed_tokens - request.num_in_flight_tokens, 0)
        coordinator.remove_skipped_blocks(request_id, num_processed_tokens, request.num_prompt_tokens)
        num_blocks = coordinator.get_num_blocks_to_allocate(
            request_id, num_tokens_need_slot, hits, num_computed_tokens
        )
        if num_blocks > self.block_pool.get_num_free_blocks() - reserved_blocks:
            return None

        if any(hits):
            coordinator.allocate_new_computed_blocks(request_id, hits, num_computed_tokens)
        new_blocks = coordinator.allocate_new_blocks(request_id, num_tokens_need_slot)
        if not delay_cache_blocks:
            # Tokens beyond request.num_tokens are drafts, which may yet be rejected.
            self.cache_blocks(request, min(num_computed_tokens + num_new_tokens, request.num_tokens))
        return self.create_kv_cache_blocks(new_blocks)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Cache the request's full blocks among its first `num_computed_tokens` tokens."""
        if self.enable_caching:
            self.coordinator.cache_blocks(request, num_computed_tokens)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that the token after `processed_computed_tokens` no longer attends to."""
        self.coordinator.remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)

    def free(self, request: Request) -> None:
        """Free the request's blocks, last to first in each group, so that its beginning is evicted last."""
        self.coordinator.free(request.request_id)

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
        return self.create_kv_cache_blocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the ids of all blocks of a request, for each group."""
        return tuple([block.block_id for block in group] for group in self.get_blocks(request_id).blocks)

    def create_kv_cache_blocks(self, blocks: tuple[Sequence[KVCacheBlock], ...]) -> KVCacheBlocks:
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks
