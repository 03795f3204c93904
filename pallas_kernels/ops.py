"""The public operations: check the shapes, choose an implementation, call it.

Shapes share these names everywhere: the caches are `[num_blocks, block_size, num_kv_heads, head_dim]`, a
block table line names a sequence's blocks in order, and a slot is `block_id * block_size + offset`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import xla


def default_implementation() -> tuple[str, str]:
    """The implementation that is used on this machine's default device, and why."""
    return "xla", "the only implementation there is yet"


def paged_attention(
    q: Float[Array, "num_seqs num_q_heads head_dim"],
    k_cache: Num[Array, "num_blocks block_size num_kv_heads head_dim"],
    v_cache: Num[Array, "num_blocks block_size num_kv_heads head_dim"],
    block_tables: Int[Array, "num_seqs max_blocks_per_seq"],
    seq_lens: Int[Array, " num_seqs"],
    *,
    scale: float,
) -> Float[Array, "num_seqs num_q_heads head_dim"]:
    """Decode attention: one new token a sequence looks at all `seq_lens[s]` tokens, itself the last.

    `out[s, h] = softmax(scale * q[s, h] @ K[s, :seq_lens[s], h // group].T) @ V[...]`, summed in float32,
    in q's dtype. A sequence of length 0 gives zeros. Time follows the longest sequence, not the table's
    width.
    """
    out = tiled_paged_attention(
        q[:, None], k_cache, v_cache, block_tables, seq_lens - 1, seq_lens, scale=scale
    )
    return out[:, 0]


def tiled_paged_attention(
    q: Float[Array, "num_tiles tile_len num_q_heads head_dim"],
    k_cache: Num[Array, "num_blocks block_size num_kv_heads head_dim"],
    v_cache: Num[Array, "num_blocks block_size num_kv_heads head_dim"],
    block_tables: Int[Array, "num_tiles max_blocks_per_seq"],
    query_starts: Int[Array, " num_tiles"],
    seq_lens: Int[Array, " num_tiles"],
    *,
    scale: float,
) -> Float[Array, "num_tiles tile_len num_q_heads head_dim"]:
    """Causal attention of tiles of neighbouring queries, each over its own line of the block table.

    Query i of tile t stands at position `query_starts[t] + i` and looks at the positions up to its own that
    are below `seq_lens[t]`. K and V of the queries themselves are already in the cache. Queries that may look
    at nothing (`seq_lens[t] == 0`) give zeros; those beyond `seq_lens[t]` are padding and give numbers
    without meaning. Table entries beyond a length are not used.
    """
    check_cache(k_cache, v_cache)
    num_tiles, _, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    if head_dim != k_cache.shape[3]:
        raise ValueError(f"{q.shape=} must end with the cache's head_dim, {k_cache.shape=}")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
    for name, array, ndim in (
        ("block_tables", block_tables, 2),
        ("query_starts", query_starts, 1),
        ("seq_lens", seq_lens, 1),
    ):
        if array.ndim != ndim or array.shape[0] != num_tiles:
            raise ValueError(f"{name}.shape={array.shape} must have {ndim} dimensions, the first {num_tiles}")
        if array.dtype != jnp.int32:
            raise ValueError(f"{name}.dtype={array.dtype} must be int32")
    return xla.tiled_paged_attention(q, k_cache, v_cache, block_tables, query_starts, seq_lens, scale=scale)


def reshape_and_cache(
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    k_cache: Num[Array, "num_blocks block_size num_kv_heads head_dim"],
    v_cache: Num[Array, "num_blocks block_size num_kv_heads head_dim"],
    slot_mapping: Int[Array, " num_tokens"],
) -> tuple[
    Num[Array, "num_blocks block_size num_kv_heads head_dim"],
    Num[Array, "num_blocks block_size num_kv_heads head_dim"],
]:
    """Write each token's K and V to its slot, cast to the cache's dtype; in place if the caches are donated.

    Slots must lie in the cache; padding tokens name one of the null block, in any order.
    """
    check_cache(k_cache, v_cache)
    for name, array in (("k", k), ("v", v)):
        if array.shape != (slot_mapping.shape[0], *k_cache.shape[2:]):
            raise ValueError(
                f"{name}.shape={array.shape} must be {slot_mapping.shape=} followed by {k_cache.shape[2:]=}"
            )
    return xla.reshape_and_cache(k, v, k_cache, v_cache, slot_mapping)


def check_cache(k_cache: Num[Array, "..."], v_cache: Num[Array, "..."]) -> None:
    if k_cache.ndim != 4:
        raise ValueError(f"{k_cache.shape=} must be [num_blocks, block_size, num_kv_heads, head_dim]")
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"{v_cache.shape=} must equal {k_cache.shape=}")
    if v_cache.dtype != k_cache.dtype:
        raise ValueError(f"{v_cache.dtype=} must equal {k_cache.dtype=}")
