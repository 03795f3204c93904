"""Groups of layers that read a window or a chunk (vLLM 0.33, `v1/core/single_type_kv_cache_manager.py`)."""

from collections.abc import Sequence

from .block_pool import BlockPool
from .kv_cache_utils import BlockHash, resolve_block_hashes
from .single_type import Hits, SingleTypeKVCacheManager
from .specs import AttentionSpec, ChunkedLocalAttentionSpec, SlidingWindowSpec, cdiv


def num_window_blocks(kv_cache_spec: SlidingWindowSpec, use_eagle: bool) -> int:
    """Return how many neighbouring cached blocks a hit ends with.

    They are ceil((window - 1) / block_size), at least 1. With EAGLE one more, which the hit then drops.
    """
    return max(cdiv(kv_cache_spec.sliding_window - 1, kv_cache_spec.block_size) + use_eagle, 1)


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Only the window's tokens are read, so a hit is an unbroken run long enough to fill the window."""

    kv_cache_spec: SlidingWindowSpec

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        # The next token attends to itself and the `sliding_window - 1` tokens before it.
        return max(num_computed_tokens - (self.kv_cache_spec.sliding_window - 1), 0)

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
        """Return the last run of cached blocks that fills the window and ends at an aligned place.

        A run from the first block may be shorter than the window. With EAGLE the place is that of the run
        without its last block. vLLM rounds a short run down twice, before it drops that block and after.
        """
        assert isinstance(kv_cache_spec, SlidingWindowSpec), f"{kv_cache_spec=} must have a sliding window"
        block_size = kv_cache_spec.block_size
        alignment = alignment_tokens or block_size
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        cached = [
            block_pool.get_cached_block(block_hash, kv_cache_group_ids)
            for block_hash in hashes[: max_length // block_size]
        ]

        def aligned(num_blocks: int) -> int:
            while num_blocks * block_size % alignment:
                num_blocks -= 1
            return num_blocks

        num_run_blocks = num_window_blocks(kv_cache_spec, drop_eagle_block)
        num_hit_blocks = start = 0
        for end in range(len(cached), 0, -1):
            start = max(end - num_run_blocks, 0)
            if aligned(end - drop_eagle_block) != end - drop_eagle_block or None in cached[start:end]:
                continue
            num_hit_blocks = end if end >= num_run_blocks else aligned(end)
            num_hit_blocks = aligned(max(num_hit_blocks - drop_eagle_block, 0))
            break

        hits = [blocks for blocks in cached[start:num_hit_blocks] if blocks is not None]
        nulls = [block_pool.null_block] * min(start, num_hit_blocks)
        hits_by_group = tuple(nulls + [blocks[i] for blocks in hits] for i in range(len(kv_cache_group_ids)))
        return hits_by_group, num_hit_blocks * block_size

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
        """Return whether each block is among the last of a hit: the window's blocks before some boundary.

        Boundaries are all multiples of `retention_interval`, or of `alignment_tokens` when that is None, and
        with an interval also `reachable_boundaries`, rounded down to a multiple of `alignment_tokens`. With
        EAGLE the block behind each boundary counts too. None, for all blocks, also when blocks and
        alignment do not fit.
        """
        assert isinstance(kv_cache_spec, SlidingWindowSpec), f"{kv_cache_spec=} must have a sliding window"
        block_size = kv_cache_spec.block_size
        if alignment_tokens is None or alignment_tokens % block_size:
            return None
        num_run_blocks = num_window_blocks(kv_cache_spec, use_eagle)
        reachable: set[int] = set()
        interval = alignment_tokens if retention_interval is None else retention_interval
        if interval:
            per_segment = interval // block_size
            if num_run_blocks >= per_segment:
                return None
            reachable.update(
                block
                for block in range(max(start_block, int(use_eagle)), end_block)
                if (block - use_eagle) % per_segment >= per_segment - num_run_blocks
            )
            if final_segment_end_block is not None and not use_eagle:
                segment_start = final_segment_end_block - final_segment_end_block % per_segment
                run_start = max(segment_start, final_segment_end_block - num_run_blocks)
                reachable.update(range(run_start, final_segment_end_block))
        if retention_interval is not None:
            for boundary in reachable_boundaries:
                end = boundary // alignment_tokens * alignment_tokens // block_size + use_eagle
                reachable.update(range(end - num_run_blocks, end))
        return [block in reachable for block in range(start_block, end_block)]

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0  # the first blocks are null blocks, which nobody reads


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Only the tokens of the next token's chunk are read; a hit looks up nothing before it."""

    kv_cache_spec: ChunkedLocalAttentionSpec

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        chunk_size = self.kv_cache_spec.attention_chunk_size
        return num_computed_tokens // chunk_size * chunk_size

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
        """Return null blocks up to the chunk that holds token `max_length`, and the cached blocks behind it.

        Raises: AssertionError with EAGLE, or with an alignment that is not the block size.
        """
        assert isinstance(kv_cache_spec, ChunkedLocalAttentionSpec), f"{kv_cache_spec=} must have chunks"
        block_size, chunk_size = kv_cache_spec.block_size, kv_cache_spec.attention_chunk_size
        assert not drop_eagle_block, "chunked local attention does not drop a block for EAGLE"
        assert alignment_tokens in (None, block_size), f"{alignment_tokens=} must be {block_size=}"
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        start = max_length // chunk_size * chunk_size // block_size
        hits_by_group: Hits = tuple([block_pool.null_block] * start for _ in kv_cache_group_ids)
        for block_hash in hashes[start : max_length // block_size]:
            cached_blocks = block_pool.get_cached_block(block_hash, kv_cache_group_ids)
            if cached_blocks is None:
                break
            for blocks, block in zip(hits_by_group, cached_blocks, strict=True):
                blocks.append(block)
        return hits_by_group, len(hits_by_group[0]) * block_size

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0  # the first blocks are null blocks, which nobody reads
