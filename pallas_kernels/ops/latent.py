"""Latent attention: all heads of a token read one vector, which is key and value."""

from typing import Unpack

import jax

from pallas_kernels.layouts import Pool
from pallas_kernels.ops.attention import ragged_paged_attention
from pallas_kernels.ops.checks import TiledOptions
from pallas_kernels.ops.choice import TiledImplementation


def latent_attention(
    q: jax.Array,
    pool: Pool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_query_lens: jax.Array,
    *,
    v_dim: int,
    scale: float,
    max_query_len: int | None = None,
    implementation: TiledImplementation | None = None,
    interpret: bool = False,
    **options: Unpack[TiledOptions],
) -> jax.Array:
    """Compute causal latent attention of a flat batch, absorbed: prompts, steps and drafts together.

    An entry of the pool is a token's latent, and behind it its rotated key: the key of every head. Its first
    `v_dim` numbers are the value. Queries are absorbed: of a head `[k_up @ q, rotated q]`, where `k_up` makes
    keys of latents. One form serves prompts and steps, so a token has the same bits in both.

    Args:
        q: [num_tokens, num_heads, dim] float16, bfloat16 or float32.
        pool: blocks with one head of `dim` numbers, of layout `layouts.Latent`, or of another whose V is not
            read but for its first `v_dim` numbers.
        v_dim: numbers of an entry that are the value.
        others: see `ragged_paged_attention`.

    Returns: [num_tokens, num_heads, v_dim] of q's type.
    Raises: ValueError on wrong shapes, types or options; NotImplementedError for what the implementation
        does not serve.
    """
    if pool.sizes.num_kv_heads != 1:
        raise ValueError(f"{pool.sizes.num_kv_heads=} must be 1 for latent attention")
    if not 1 <= v_dim <= pool.sizes.head_dim:
        raise ValueError(f"{v_dim=} must be an int of [1, {pool.sizes.head_dim}], the numbers of an entry")
    out = ragged_paged_attention(
        *(q, pool, None, block_tables, seq_lens, cu_query_lens),
        scale=scale,
        max_query_len=max_query_len,
        implementation=implementation,
        interpret=interpret,
        **options,
    )
    return out[..., :v_dim]
