"""All groups of layers together: one pool, a table a group, hits that every group can serve.

vLLM 0.33, `v1/core/kv_cache_coordinator.py`. Left out: hits that end inside of a block, which need Mamba;
look-ups by single groups, for connectors; what several draft modules keep back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .block_pool import BlockPool
from .kv_cache_utils import BlockHash, KVCacheBlock, Request
from .local_attention import ChunkedLocalAttentionManager, SlidingWindowManager
from .single_type import FullAttentionManager, Hits, RSWAManager, SingleTypeKVCacheManager
from .specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    RSWASpec,
    SlidingWindowSpec,
    cdiv,
    scheduling_spec,
)

# The manager of each kind of layer; the first that fits counts.
MANAGERS: dict[type[AttentionSpec], type[SingleTypeKVCacheManager]] = {
    RSWASpec: RSWAManager,
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
}


def get_manager_class(kv_cache_spec: AttentionSpec) -> type[SingleTypeKVCacheManager]:
    """Return the manager's class for a kind of layer.

    Raises: NotImplementedError for a kind that has none.
    """
    for spec_class, manager_class in MANAGERS.items():
        if isinstance(kv_cache_spec, spec_class):
            return manager_class
    raise NotImplementedError(f"{kv_cache_spec=} must be one of {[kind.__name__ for kind in MANAGERS]}")


def replay_boundaries(num_prompt_tokens: int, scheduler_block_size: int, use_eagle: bool) -> tuple[int, ...]:
    """Return the tokens at which a hit by a prompt sent again may end, before rounding down.

    The last token is always computed, so this is one before the prompt's end. With EAGLE a hit needs a block
    more than it keeps. The end is then a block earlier, both for the prompt alone and for one that goes on.
    """
    if not use_eagle:
        return (num_prompt_tokens - 1,)
    last_blocks = ((num_prompt_tokens - 1) // scheduler_block_size, num_prompt_tokens // scheduler_block_size)
    return tuple(sorted({max(block - 1, 0) * scheduler_block_size for block in last_blocks}))


def check_retention_interval(interval: int | None, scheduler_block_size: int, config: KVCacheConfig) -> None:
    """Check that the interval is 0 or a multiple of the scheduler's block size, and that it has any effect.

    Raises: ValueError.
    """
    if interval is None:
        return
    specs = [scheduling_spec(group) for group in config.kv_cache_groups]
    if not any(isinstance(spec, SlidingWindowSpec) for spec in specs):
        if interval != 0:
            raise ValueError(f"prefix_cache_retention_interval={interval} must be 0: no group has a window")
    elif interval < 0 or interval % scheduler_block_size:
        raise ValueError(
            f"prefix_cache_retention_interval={interval} must be non-negative and a multiple of "
            f"scheduler_block_size={scheduler_block_size}"
        )


class KVCacheCoordinator:
    """The managers of all groups, and their pool. This class itself is for engines without a prefix cache.

    scheduler_block_size: tokens at whose multiples hits end; a multiple of all block sizes.
    hash_block_size: tokens per entry of `Request.block_hashes`; it divides the scheduler's block size.
    max_in_flight_tokens: tokens scheduled and not yet processed, over all steps under way.
    use_eagle: whether a draft model needs hidden states, so that hits drop a block: in groups that are marked
        `is_eagle_group`, or in all if none is.
    pool_options: further arguments of `BlockPool`.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        max_in_flight_tokens: int,
        use_eagle: bool,
        enable_caching: bool,
        scheduler_block_size: int,
        hash_block_size: int,
        **pool_options: Any,
    ) -> None:
        groups = kv_cache_config.kv_cache_groups
        assert scheduler_block_size % hash_block_size == 0, (
            f"{hash_block_size=} must divide {scheduler_block_size=}"
        )
        for block_size in (group.kv_cache_spec.block_size for group in groups):
            assert scheduler_block_size % block_size == 0, (
                f"{scheduler_block_size=} must be a multiple of {block_size=}"
            )
        self.kv_cache_config = kv_cache_config
        self.scheduler_block_size = scheduler_block_size
        self.hash_block_size = hash_block_size
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks, enable_caching, hash_block_size, **pool_options
        )
        self.eagle_group_ids = {i for i, group in enumerate(groups) if use_eagle and group.is_eagle_group}
        if use_eagle and not self.eagle_group_ids:
            self.eagle_group_ids = set(range(len(groups)))
        self.single_type_managers = tuple(
            get_manager_class(spec)(
                spec,
                block_pool=self.block_pool,
                enable_caching=enable_caching,
                kv_cache_group_id=i,
                scheduler_block_size=scheduler_block_size,
                max_admission_blocks_per_request=spec.max_admission_blocks_per_request(
                    max_in_flight_tokens, max_model_len
                ),
            )
            for i, spec in enumerate(map(scheduling_spec, groups))
        )
        self.retention_interval = kv_cache_config.prefix_cache_retention_interval
        check_retention_interval(self.retention_interval, scheduler_block_size, kv_cache_config)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        total_computed_tokens: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Return how many blocks would leave the free queue, over all groups."""
        return sum(
            manager.get_num_blocks_to_allocate(
                request_id, num_tokens, blocks, total_computed_tokens, apply_admission_cap
            )
            for manager, blocks in zip(self.single_type_managers, new_computed_blocks, strict=True)
        )

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_computed_tokens: int,
    ) -> None:
        """Start a new request's tables with the blocks it hit."""
        for manager, blocks in zip(self.single_type_managers, new_computed_blocks, strict=True):
            manager.allocate_new_computed_blocks(request_id, blocks, num_computed_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> tuple[list[KVCacheBlock], ...]:
        """Extend the request's tables, first group first. Return the new blocks."""
        return tuple(
            manager.allocate_new_blocks(request_id, num_tokens) for manager in self.single_type_managers
        )

    def get_num_cacheable_tokens(self, num_computed_tokens: int, kv_cache_group_id: int) -> int:
        """Return how many of the computed tokens a later hit may reach in this group."""
        return num_computed_tokens

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Cache the request's full blocks among its first `num_computed_tokens` tokens, in each group."""
        boundaries: tuple[int, ...] = ()
        if self.retention_interval is not None:
            boundaries = replay_boundaries(
                request.num_prompt_tokens, self.scheduler_block_size, bool(self.eagle_group_ids)
            )
        for group_id, manager in enumerate(self.single_type_managers):
            manager.cache_blocks(
                request,
                self.get_num_cacheable_tokens(num_computed_tokens, group_id),
                self.retention_interval,
                replay_boundaries=boundaries,
            )

    def free(self, request_id: str) -> None:
        """Free the request's blocks, first group first, each group's last block first."""
        for manager in self.single_type_managers:
            manager.free(request_id)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that attention reads no more, in each group."""
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)

    def get_blocks(self, request_id: str) -> Hits:
        """Return the request's table in each group."""
        return tuple(manager.req_to_blocks.get(request_id) or [] for manager in self.single_type_managers)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[Hits, int, int]:
        """Return the blocks that a prompt can begin with, by group; their tokens; and what else was found.

        The third number: by how many tokens a group's own prefix was longer than that of all groups.
        """
        return tuple([] for _ in self.single_type_managers), 0, 0


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group with a prefix cache. With EAGLE the block to drop is one of the hit's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        [manager] = self.single_type_managers
        hash_block_size, block_size = self.hash_block_size, manager.block_size
        assert hash_block_size == block_size, f"{hash_block_size=} must be {block_size=}"
        manager.use_eagle = 0 in self.eagle_group_ids

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[Hits, int, int]:
        [manager] = self.single_type_managers
        hits, length = manager.find_longest_cache_hit(
            block_hashes,
            max_cache_hit_length,
            [0],
            self.block_pool,
            manager.kv_cache_spec,
            drop_eagle_block=manager.use_eagle,
            alignment_tokens=manager.block_size,
        )
        return hits, length, 0


@dataclass
class SpecGroup:
    """Groups of one spec, looked up together: a block counts as cached when all of them have it."""

    spec: AttentionSpec
    group_ids: list[int]
    use_eagle: bool


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups with a prefix cache. With EAGLE the block to drop lies behind the hit's end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hash_block_size = self.hash_block_size
        for manager in self.single_type_managers:
            assert manager.block_size % hash_block_size == 0, (
                f"{hash_block_size=} must divide {manager.block_size=}"
            )
        self.spec_groups: list[SpecGroup] = []
        for group_id, manager in enumerate(self.single_type_managers):
            spec, use_eagle = manager.kv_cache_spec, group_id in self.eagle_group_ids
            for group in self.spec_groups:
                if group.spec == spec:
                    group.group_ids.append(group_id)
                    group.use_eagle |= use_eagle
                    break
            else:
                self.spec_groups.append(SpecGroup(spec, [group_id], use_eagle))
        self.spec_groups.sort(key=lambda group: not isinstance(group.spec, FullAttentionSpec))
        for group in self.spec_groups:
            for group_id in group.group_ids:
                self.single_type_managers[group_id].use_eagle = group.use_eagle

    def get_num_cacheable_tokens(self, num_computed_tokens: int, kv_cache_group_id: int) -> int:
        """Return the tokens rounded down to where a hit may end; with EAGLE a block more, if computed."""
        aligned = num_computed_tokens - num_computed_tokens % self.scheduler_block_size
        manager = self.single_type_managers[kv_cache_group_id]
        if manager.use_eagle and aligned:
            return min(num_computed_tokens, aligned + manager.block_size)
        return aligned

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[Hits, int, int]:
        """Search for the longest prefix that all groups have, as a fixed point.

        Each spec in turn, full attention first, says how much of the candidate it has. When one shortens it,
        all are asked again, until none does. Full attention is asked once: a part of its prefix is one too.
        With full attention and one other spec, one round is enough. With EAGLE each spec looks for a block
        more, and drops it, once for each candidate.
        """
        tables: list[list[KVCacheBlock]] = [[] for _ in self.single_type_managers]
        full_length: dict[int, int] = {}  # by first group id
        has_dropped: set[int] = set()
        length, longest = max_cache_hit_length, 0
        one_round = len(self.spec_groups) == 2 and isinstance(self.spec_groups[0].spec, FullAttentionSpec)
        while True:
            candidate = length
            for group in self.spec_groups:
                first = group.group_ids[0]
                if first in full_length:
                    candidate = min(candidate, full_length[first])
                    continue
                drop = group.use_eagle and first not in has_dropped
                hits, hit_length = get_manager_class(group.spec).find_longest_cache_hit(
                    block_hashes,
                    min(candidate + group.spec.block_size, len(block_hashes) * self.hash_block_size)
                    if drop
                    else candidate,
                    group.group_ids,
                    self.block_pool,
                    group.spec,
                    drop_eagle_block=drop,
                    alignment_tokens=self.scheduler_block_size,
                )
                if drop:
                    has_dropped.add(first)
                elif hit_length < candidate:
                    has_dropped.clear()
                candidate = hit_length
                longest = max(longest, hit_length)
                for group_id, blocks in zip(group.group_ids, hits, strict=True):
                    tables[group_id] = blocks
                if isinstance(group.spec, FullAttentionSpec):
                    full_length[first] = hit_length
            if candidate >= length:
                break
            length = candidate
            if one_round:
                break
        for group in self.spec_groups:
            if isinstance(group.spec, FullAttentionSpec):
                for group_id in group.group_ids:
                    del tables[group_id][cdiv(length, group.spec.block_size) :]
        return tuple(tables), length, longest - length


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig, *, enable_caching: bool, **options: Any
) -> KVCacheCoordinator:
    """Return the coordinator for the number of groups; one without look-up when nothing is cached."""
    kind: type[KVCacheCoordinator] = KVCacheCoordinator
    if enable_caching:
        one_group = len(kv_cache_config.kv_cache_groups) == 1
        kind = UnitaryKVCacheCoordinator if one_group else HybridKVCacheCoordinator
    return kind(kv_cache_config, enable_caching=enable_caching, **options)
