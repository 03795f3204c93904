"""Operations in plain jax.numpy: for CPUs and older GPUs, and a second opinion on the kernels.

Attention streams over the cache: a chunk of a few hundred tokens of every row is gathered, its softmax is
    joined to the running one, and the next chunk takes its place. The loop ends with the longest live row, so
    neither time nor temporary memory follows the capacity of the block table. A row's result does not depend
    on how long the others are: for a row, a chunk outside its tokens multiplies by one and adds zero.

`ops` has checked the arguments, and documents their shapes.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import Pool
from pallas_kernels.support import Batch, Options

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
    return _finish(state, arrays.q, options)


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

    return _finish(merge(partials), q, options)


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
    chunk_tokens = chunk_blocks * block_size
    end_token = jnp.minimum(end_token, jnp.max(seq_lens, initial=0))

    def one_chunk(chunk: jax.Array, state: Softmax) -> Softmax:
        column = first_token // block_size + chunk * chunk_blocks + jnp.arange(chunk_blocks)
        token = column[:, None] * block_size + jnp.arange(block_size)
        seen = _visible(token, seq_lens, num_q_heads, num_kv_heads, options) & (token < end_token)
        # A block without a visible token is not looked up: block 0 stands in for it, and is masked as well.
        is_needed = jnp.any(seen, axis=(1, 2, 4))
        entry = jnp.minimum(column, block_tables.shape[1] - 1)
        block_ids = jnp.where(is_needed, block_tables[:, entry], 0)
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
        # Zero times NaN is NaN: what nobody sees must be zero, not only weightless.
        v = jnp.where(jnp.any(seen, axis=(1, 2))[:, :, :, None, None], v, 0)
        rescale = jnp.exp(state.max - largest)
        out = jnp.einsum("skgnb,snbkd->skgd", weight, v, precision=lax.Precision.HIGHEST)
        return Softmax(
            out=state.out * rescale[..., None] + out,
            max=largest,
            sum=state.sum * rescale + jnp.sum(weight, axis=(3, 4)),
        )

    first_chunk: jax.Array | int = 0
    if options.sliding_window is not None:
        # Rows without tokens do not hold the loop back.
        starts = jnp.where(seq_lens > 0, seq_lens - options.sliding_window, end_token)
        first_chunk = jnp.maximum(jnp.min(starts, initial=end_token) - first_token, 0) // chunk_tokens
    num_chunks = -(-(end_token - first_token) // chunk_tokens)
    return lax.fori_loop(first_chunk, num_chunks, one_chunk, _nothing(q, pool))


def _visible(
    token: jax.Array, seq_lens: jax.Array, num_q_heads: int, num_kv_heads: int, options: Options
) -> jax.Array:
    """Return whether a head sees a token: [num_seqs, num_kv_heads or 1, group_size or 1, *token.shape]."""
    seq_len = seq_lens.reshape(-1, 1, 1, 1, 1)
    token = token[None, None, None]
    seen = token < seq_len
    if options.sliding_window is not None:
        seen &= token >= seq_len - options.sliding_window
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


def _finish(state: Softmax, q: jax.Array, options: Options) -> jax.Array:
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


def write(pool: Pool, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> Pool:
    """Write new tokens to their slots; in place where the pool is donated."""
    if slot_mapping.shape[0] == 1:
        # A scatter of one index becomes an update that XLA does not do in place on a CPU: write it twice.
        k, v, slot_mapping = (jnp.concatenate([x, x]) for x in (k, v, slot_mapping))
    block_size = pool.sizes.block_size
    is_padding = (slot_mapping < 0) | (slot_mapping >= pool.num_blocks * block_size)
    slots = jnp.where(is_padding, 0, slot_mapping)
    if pool.blocks is not None:
        slots = pool.places(slots // block_size) * block_size + slots % block_size
    return dataclasses.replace(pool, arrays=pool.layout.write(pool.arrays, pool.sizes, k, v, slots))


def quantise(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Return the stored form of x [..., num_kv_heads, head_dim]; quantised types saturate.

    scale: [num_kv_heads], or None for a type that is not quantised.
    """
    if scale is None:
        return x.astype(dtype)
    scaled = x.astype(jnp.float32) / scale[:, None]
    if dtype == jnp.int8:
        return jnp.clip(jnp.rint(scaled), -128, 127).astype(jnp.int8)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(scaled, -largest, largest).astype(dtype)


def copy_blocks(caches: Sequence[jax.Array], pairs: jax.Array) -> list[jax.Array]:
    """Find where the content of each target comes from in the end, then gather once and scatter once."""
    source, target = _final_copies(pairs, caches[0].shape[0])
    return [cache.at[target].set(cache[source]) for cache in caches]


def _final_copies(pairs: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array]:
    """Return pairs that, copied all at once, do what `pairs` do one after the other.

    Several pairs may have one target; they then have one source too. Pairs out of range become (0, 0).
    """
    in_range = jnp.all((pairs >= 0) & (pairs < num_blocks), axis=1)
    source, target = jnp.where(in_range[:, None], pairs, 0).T
    index = jnp.arange(len(pairs))
    # writer[i]: the last pair before i whose target is i's source, else i itself.
    wrote = (target[None, :] == source[:, None]) & (index[None, :] < index[:, None])
    writer = jnp.max(jnp.where(wrote, index[None, :], -1), axis=1, initial=-1)
    writer = jnp.where(writer < 0, index, writer)
    for _ in range(max(1, len(pairs) - 1).bit_length()):  # each round doubles the steps followed
        writer = writer[writer]
    last = jnp.max(jnp.where(target[None, :] == target[:, None], index[None, :], -1), axis=1, initial=-1)
    return source[writer][last], target


def swap_blocks(source: jax.Array, target: jax.Array, pairs: jax.Array, axis: int) -> jax.Array:
    """Copy blocks one after the other, so that a target named twice keeps the last source.

    Single slices are what XLA moves between two memories in place, and inside a CUDA graph. A scatter into a
    pool in the host's memory would take the whole pool through the device's.
    """
    target_space = jax.typeof(target).memory_space
    in_range = jnp.all((pairs >= 0) & (pairs < jnp.array([source.shape[axis], target.shape[axis]])), axis=1)
    (moves,) = jnp.nonzero(in_range, size=len(pairs), fill_value=0)

    def move(i: jax.Array, target: jax.Array) -> jax.Array:
        from_block, to_block = pairs[moves[i]]
        block = lax.dynamic_slice_in_dim(source, from_block, 1, axis)
        return lax.dynamic_update_slice_in_dim(target, jax.device_put(block, target_space), to_block, axis)

    return lax.fori_loop(0, jnp.sum(in_range), move, target)


def product(x: jax.Array, kernel: jax.Array, contract: int) -> jax.Array:
    """Multiply x [num_rows, in_features] by a matrix: [num_rows, out_features] float32.

    contract: the axis of `kernel` that counts inputs, 0 or 1.
    """
    num_rows = x.shape[0]
    if num_rows == 1 and x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        # One row of bfloat16 runs at 2 GFLOP/s there, two at 40.
        x = jnp.concatenate([x, x])
    dimensions = (((1,), (contract,)), ((), ()))
    return lax.dot_general(x, kernel, dimensions, preferred_element_type=jnp.float32)[:num_rows]
