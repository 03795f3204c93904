"""Attention of decode steps in plain jax.numpy: for CPUs and older GPUs, and a second opinion on the kernels.

Attention streams over the cache: a chunk of a few hundred tokens of every row is gathered, its softmax is
joined to the running one, and the next chunk takes its place. The loop ends with the longest live row, so
neither time nor temporary memory follows the capacity of the block table. With a sliding window, or where
attention is chunked, each row begins where it begins to see: the loop takes the turns that the bound needs,
wherever the rows are. A row's result does not depend on how long the others are: for a row, a chunk outside
its tokens multiplies by one and adds zero.

`ops` has checked the arguments, and documents their shapes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import Pool
from pallas_kernels.support import Batch, Options, first_seen

CHUNK_TOKENS = 256  # tokens of each row that are gathered at a time
LOWEST = -1e30  # stands for minus infinity as a maximum: its differences are not NaN


class Softmax(NamedTuple):
    """A softmax under way, for each row and query head."""

    out: jax.Array  # [num_seqs, num_kv_heads, group_size, head_dim] float32, sum of exp(s - max) * v
    max: jax.Array  # [num_seqs, num_kv_heads, group_size] largest s so far
    sum: jax.Array  # [num_seqs, num_kv_heads, group_size] sum of exp(s - max)


def paged_attention_v1(arrays: Batch, options: Options) -> jax.Array:
    """Compute attention with all tokens of a row in one running softmax."""
    state = _attend(arrays, 0, jnp.max(arrays.seq_lens, initial=0), options)
    return finish(state, arrays.q, options)


def paged_attention_v2(arrays: Batch, options: Options, partition_size: int) -> jax.Array:
    """Compute attention with one softmax per partition of a row, then merge a row's partitions."""
    q, pool, block_tables, seq_lens, _ = arrays
    max_partitions = max(1, -(-block_tables.shape[1] * pool.sizes.block_size // partition_size))

    def one_partition(p: jax.Array, partials: Softmax) -> Softmax:
        part = _attend(arrays, p * partition_size, (p + 1) * partition_size, options)
        return jax.tree.map(
            lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, p, 0), partials, part
        )

    # Partitions past the longest row keep what they start with: nothing.
    partials = jax.tree.map(lambda x: jnp.repeat(x[None], max_partitions, 0), _nothing(q, pool))
    num_live = -(-jnp.max(seq_lens, initial=0) // partition_size)
    partials = lax.fori_loop(0, num_live, one_partition, partials)

    return finish(merge(partials), q, options)


def merge(partials: Softmax) -> Softmax:
    """Merge the softmaxes of partitions, which lie along the first axis."""
    largest = jnp.max(partials.max, axis=0)
    weight = jnp.exp(partials.max - largest)
    return Softmax(
        out=jnp.sum(weight[..., None] * partials.out, axis=0),
        max=largest,
        sum=jnp.sum(weight * partials.sum, axis=0),
    )


def _attend(arrays: Batch, first_token: jax.Array | int, end_token: jax.Array, options: Options) -> Softmax:
    """Compute the softmax over tokens [first_token, end_token) of every row; first_token starts a block."""
    q, pool, block_tables, seq_lens, _ = arrays
    num_seqs, num_q_heads, _ = q.shape
    _, block_size, num_kv_heads, head_dim = pool.sizes
    queries = q.reshape(num_seqs, num_kv_heads, -1, head_dim).astype(jnp.float32) * options.scale
    if options.k_scale is not None:
        queries = queries * options.k_scale[:, None, None]
    chunk_blocks = max(1, CHUNK_TOKENS // block_size)
    end_token = jnp.minimum(end_token, jnp.max(seq_lens, initial=0))
    first_block, num_chunks = _chunks(first_token, end_token, seq_lens, options, block_size, chunk_blocks)

    def one_chunk(chunk: jax.Array, state: Softmax) -> Softmax:
        column = (
            first_block + chunk * chunk_blocks + jnp.arange(chunk_blocks)
        )  # [num_seqs or 1, chunk_blocks]
        token = column[..., None] * block_size + jnp.arange(block_size)
        seen = _visible(token, seq_lens, num_q_heads, num_kv_heads, options)
        seen &= (token < end_token)[:, None, None]
        # A block without a visible token is not looked up: block 0 replaces it, and is masked as well.
        is_needed = jnp.any(seen, axis=(1, 2, 4))
        entry = jnp.minimum(column, block_tables.shape[1] - 1)
        in_step = first_block.shape[0] == 1  # all rows read the same columns
        entries = block_tables[:, entry[0]] if in_step else jnp.take_along_axis(block_tables, entry, axis=1)
        block_ids = jnp.where(is_needed, entries, 0)
        k, v = pool.read(block_ids, jnp.dtype("float32"))
        s = jnp.einsum("skgd,snbkd->skgnb", queries, k, precision=lax.Precision.HIGHEST)
        if options.soft_cap is not None:
            s = options.soft_cap * jnp.tanh(s / options.soft_cap)
        if options.alibi_slopes is not None:
            distance = (token - seq_lens[:, None, None] + 1)[:, None, None]
            s += options.alibi_slopes.reshape(num_kv_heads, -1, 1, 1) * distance
        s = jnp.where(seen, s, LOWEST)
        largest = jnp.maximum(state.max, jnp.max(s, axis=(3, 4)))
        weight = jnp.where(seen, jnp.exp(s - largest[..., None, None]), 0)
        # Zero times NaN is NaN: V must be zero where no query sees it, not only have no weight.
        v = jnp.where(jnp.any(seen, axis=(1, 2))[:, :, :, None, None], v, 0)
        rescale = jnp.exp(state.max - largest)
        out = jnp.einsum("skgnb,snbkd->skgd", weight, v, precision=lax.Precision.HIGHEST)
        return Softmax(
            out=state.out * rescale[..., None] + out,
            max=largest,
            sum=state.sum * rescale + jnp.sum(weight, axis=(3, 4)),
        )

    return lax.fori_loop(0, num_chunks, one_chunk, _nothing(q, pool))


def _chunks(
    first_token: jax.Array | int,
    end_token: jax.Array,
    seq_lens: jax.Array,
    options: Options,
    block_size: int,
    chunk_blocks: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the first block that each row reads, [num_seqs, 1] or [1, 1], and the most chunks of a row.

    A row's chunks lie on multiples of their length from `first_token` on, wherever it begins.
    """
    length = chunk_blocks * block_size
    start = first_seen(seq_lens - 1, options.sliding_window, options.attention_chunk)
    if start is None:
        first = jnp.reshape(jnp.asarray(first_token // block_size), (1, 1))
        return first, -(-(end_token - first_token) // length)
    skipped = jnp.maximum(start - first_token, 0) // length
    ends = jnp.minimum(seq_lens, end_token) - first_token
    num_chunks = jnp.max(-(-ends // length) - skipped, initial=0)
    return (first_token // block_size + skipped * chunk_blocks)[:, None], num_chunks


def _visible(
    token: jax.Array, seq_lens: jax.Array, num_q_heads: int, num_kv_heads: int, options: Options
) -> jax.Array:
    """Return whether a head sees a token: [num_seqs, num_kv_heads or 1, group_size or 1, *token.shape[1:]].

    token: [num_seqs or 1, blocks, block_size].
    """
    seq_len = seq_lens.reshape(-1, 1, 1, 1, 1)
    token = token[:, None, None]
    seen = token < seq_len
    start = first_seen(seq_len - 1, options.sliding_window, options.attention_chunk)
    if start is not None:
        seen &= token >= start
    if options.layer_kind is not None:
        seen &= options.layer_kind.sees(seq_len - 1, token)
    if options.block_sparse is not None:
        sparse = options.block_sparse
        head = jnp.arange(num_q_heads).reshape(num_kv_heads, -1, 1, 1)
        if sparse.head_sliding_step >= 0:
            position = sparse.tp_rank * num_q_heads + head
        else:
            position = sparse.tp_rank * num_kv_heads + head // (num_q_heads // num_kv_heads)
        offset = 1 + abs(sparse.head_sliding_step) * position
        block, own_block = token // sparse.block_size, (seq_len - 1) // sparse.block_size
        is_vertical = (block + offset) % sparse.vertical_stride == 0
        seen = seen & (is_vertical | (block > own_block - sparse.local_blocks))
    return seen


def _nothing(q: jax.Array, pool: Pool) -> Softmax:
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads = pool.sizes.num_kv_heads
    shape = (num_seqs, num_kv_heads, num_q_heads // num_kv_heads)
    return Softmax(
        out=jnp.zeros((*shape, head_dim), jnp.float32),
        max=jnp.full(shape, LOWEST, jnp.float32),
        sum=jnp.zeros(shape, jnp.float32),
    )


def finish(state: Softmax, q: jax.Array, options: Options) -> jax.Array:
    """Add the sinks and divide; a head that sees no token keeps its zeros."""
    out, largest, total = state
    sees_nothing = total == 0
    if options.sinks is not None:
        sinks = options.sinks.reshape(largest.shape[1:])
        with_sink = jnp.maximum(largest, sinks)
        rescale = jnp.exp(largest - with_sink)
        out = out * rescale[..., None]
        total = total * rescale + jnp.exp(sinks - with_sink)
    if options.v_scale is not None:
        out = out * options.v_scale[:, None, None]
    out = out / jnp.where(sees_nothing, 1, total)[..., None]
    return out.reshape(q.shape).astype(q.dtype)
