"""Attention of tiles of query tokens: `attention.h`."""

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.native.library import registered


def tiled_paged_attention(
    q: Float[Array, "num_tiles tile_len num_q_heads head_dim"],
    k_cache: Float[Array, "num_blocks block_size num_kv_heads head_dim"],
    v_cache: Float[Array, "num_blocks block_size num_kv_heads head_dim"],
    block_tables: Int[Array, "num_tiles max_blocks_per_seq"],
    query_starts: Int[Array, " num_tiles"],
    seq_lens: Int[Array, " num_tiles"],
    *,
    scale: float,
    sliding_window: int | None,
) -> Float[Array, "num_tiles tile_len num_q_heads head_dim"]:
    """As `ops.tiled_paged_attention`, where `serves(q.dtype)`. Queries at or beyond seq_lens get zeros."""
    window = np.iinfo(np.int32).max if sliding_window is None else sliding_window
    call = jax.ffi.ffi_call(registered("attention"), jax.ShapeDtypeStruct(q.shape, q.dtype))
    arrays = (q, k_cache, v_cache, block_tables, query_starts, seq_lens)
    return call(*arrays, scale=np.float32(scale), window=np.int64(window))
