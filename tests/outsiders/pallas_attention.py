"""Attention from outside as a Pallas kernel, interpreted: decode steps, block by block."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxpaged.contracts import Support, attention


def kernel(table, length, q, k_cache, v_cache, out, *, scale):
    """Compute one row: q and out [1, heads, dim], table [1, blocks], length [1], the caches whole."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    queries = q[0].astype(jnp.float32)
    group = queries.shape[0] // num_kv_heads

    def of_block(index, carry):
        largest, total, weighted = carry
        block = pl.ds(table[0, index], 1)
        token = index * block_size + jnp.arange(block_size)
        seen = token < length[0]
        k, v = (
            jnp.repeat(cache[block][0].astype(jnp.float32), group, axis=1) for cache in (k_cache, v_cache)
        )
        k, v = (jnp.where(seen[:, None, None], x, 0) for x in (k, v))  # a stale slot may hold NaN
        scores = jnp.where(seen, scale * jnp.einsum("hd,thd->ht", queries, k), -1e30)
        now = jnp.maximum(largest, scores.max(axis=1))
        weights = jnp.where(seen, jnp.exp(scores - now[:, None]), 0)
        factor = jnp.exp(largest - now)
        total = total * factor + weights.sum(axis=1)
        return now, total, weighted * factor[:, None] + jnp.einsum("ht,thd->hd", weights, v)

    start = jnp.full(queries.shape[0], -1e30), jnp.zeros(queries.shape[0]), jnp.zeros(queries.shape)
    num_blocks = (length[0] + block_size - 1) // block_size
    _, total, weighted = jax.lax.fori_loop(0, num_blocks, of_block, start)
    out[0] = (weighted / jnp.maximum(total, 1e-30)[:, None]).astype(out.dtype)


@attention("decode", Support(), contract=1)
def by_pallas(q, k_cache, v_cache, block_tables, seq_lens, *, scale=None):
    """Compute one query a sequence by a program a row."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    row = pl.BlockSpec((1, *q.shape[1:]), lambda i: (i, 0, 0))
    whole = pl.BlockSpec(k_cache.shape, lambda i: (0, 0, 0, 0))
    return pl.pallas_call(
        functools.partial(kernel, scale=scale),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(q.shape[0],),
        in_specs=[
            pl.BlockSpec((1, block_tables.shape[1]), lambda i: (i, 0)),
            pl.BlockSpec((1,), lambda i: (i,)),
            row,
            whole,
            whole,
        ],
        out_specs=row,
        interpret=True,
    )(block_tables, seq_lens, q, k_cache, v_cache)
