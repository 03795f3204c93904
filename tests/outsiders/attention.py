"""Attention from outside: for decode steps, for prompts, for flat batches of both, and in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.contracts import Attention, Support, attention

ALL = ("alibi_slopes", "attention_chunk", "sinks", "sliding_window", "soft_cap")


def attend(
    q, k, v, positions, seq_len, *,
    scale, sliding_window=None, attention_chunk=None, soft_cap=None, alibi_slopes=None, sinks=None,
):  # fmt: skip
    """Compute attention of one sequence's queries, q [n, heads, dim] at `positions`; k, v [tokens, ...]."""
    group = q.shape[1] // k.shape[1]
    token = jnp.arange(k.shape[0])
    seen = (token <= positions[:, None]) & (token < seq_len)
    if sliding_window is not None:
        seen &= token > positions[:, None] - sliding_window
    if attention_chunk is not None:
        seen &= token // attention_chunk == positions[:, None] // attention_chunk
    used = jnp.any(seen, axis=0)[:, None, None]  # what nobody sees may be NaN
    k, v = (jnp.where(used, x.astype(jnp.float32), 0) for x in (k, v))
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    scores = scale * jnp.einsum("nhd,thd->hnt", q.astype(jnp.float32), k)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if alibi_slopes is not None:
        scores += alibi_slopes[:, None, None] * (token - positions[:, None])
    scores = jnp.where(seen, scores, -1e30)
    largest = scores.max(-1, keepdims=True)
    if sinks is not None:
        largest = jnp.maximum(largest, sinks[:, None, None])
    weights = jnp.where(seen, jnp.exp(scores - largest), 0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks[:, None, None] - largest)
    out = jnp.einsum("hnt,thd->nhd", weights / jnp.maximum(total, 1e-30), v)
    return out.astype(q.dtype)


def gathered(cache, block_table):
    """Return a sequence's tokens [tokens, heads, dim]; blocks that are not there give anything."""
    found = cache.at[block_table].get(mode="clip")
    return found.reshape(-1, *cache.shape[2:])


@attention("prompts", Support(options=ALL), contract=1)
def tiles(q, k_cache, v_cache, block_tables, query_starts, seq_lens, *, scale, **options):
    """Compute tiles one after the other, so that a tile's bits depend on nothing else."""

    def one(tile):
        q, table, start, length = tile
        k, v = (gathered(cache, table) for cache in (k_cache, v_cache))
        positions = start + jnp.arange(q.shape[0])
        return attend(q, k, v, positions, length, scale=scale, **options)

    return jax.lax.map(one, (q, block_tables, query_starts, seq_lens))


@attention("decode", Support(options=ALL), contract=1)
def decode(q, k_cache, v_cache, block_tables, seq_lens, *, scale=None, **options):
    """Compute one query a sequence, its last token."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = tiles(q[:, None], k_cache, v_cache, block_tables, seq_lens - 1, seq_lens, scale=scale, **options)
    return out[:, 0]


BOTH = Attention(decode=decode, prompts=tiles, support=Support(options=ALL), contract=1)


@attention("ragged", Support(options=ALL), contract=1)
def ragged(q, k_cache, v_cache, block_tables, seq_lens, cu_query_lens, *, scale, **options):
    """Compute a flat batch token by token, each as a tile of its own."""
    token = jnp.arange(q.shape[0])
    seq = jnp.minimum(jnp.sum(token[:, None] >= cu_query_lens[1:], axis=1), len(seq_lens) - 1)
    position = seq_lens[seq] - (cu_query_lens[seq + 1] - token)
    is_query = token < cu_query_lens[-1]
    out = tiles(
        q[:, None], k_cache, v_cache, block_tables[seq], position, jnp.where(is_query, seq_lens[seq], 0),
        scale=scale, **options,
    )  # fmt: skip
    return jnp.where(is_query[:, None, None], out[:, 0], 0)


def on_host(q, k_cache, v_cache, block_tables, seq_lens, scale):
    """Compute one query a sequence in NumPy."""
    out = np.zeros(q.shape, np.float32)
    for row, length in enumerate(seq_lens):
        blocks = block_tables[row, : -(-int(length) // k_cache.shape[1])]
        k, v = (x[blocks].reshape(-1, *x.shape[2:])[:length] for x in (k_cache, v_cache))
        for head in range(q.shape[1]):
            its = head * k.shape[1] // q.shape[1]
            scores = scale * k[:, its] @ q[row, head] if length else np.zeros(0, np.float32)
            weights = np.exp(scores - scores.max(initial=-1e30))
            out[row, head] = weights @ v[:, its] / max(weights.sum(), 1e-30)
    return out.astype(q.dtype)


@attention("decode", Support(dtypes=("float32",), platforms=("cpu",)), contract=1)
def by_callback(q, k_cache, v_cache, block_tables, seq_lens, *, scale=None):
    """Compute decode attention on the host, outside of XLA."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    spec = jax.ShapeDtypeStruct(q.shape, q.dtype)
    arrays = (q, k_cache, v_cache, block_tables, seq_lens)
    return jax.pure_callback(lambda *arrays: on_host(*map(np.asarray, arrays), scale), spec, *arrays)


@attention("decode", Support(head_dims=(64, 128), dtypes=("bfloat16",)), contract=1)
def for_large_heads(q, *arrays, **options):
    """Serve calls that no tiny model makes."""
    raise AssertionError("it must be refused before it is called")


@attention("decode", Support(), contract=2)
def of_the_future(q, *arrays, **options):
    """Declare a version of the contract that there is not yet."""
    raise AssertionError("it must be refused before it is called")
