"""Writes to caches, and copies between their blocks, in plain jax.numpy."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import Pool


def write(pool: Pool, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> Pool:
    """Write new tokens to their slots; in place where the pool is donated."""
    if slot_mapping.shape[0] == 1:
        # A scatter of one index becomes an update that XLA does not do in place on a CPU: write it twice.
        k, v, slot_mapping = (jnp.concatenate([x, x]) for x in (k, v, slot_mapping))
    block_size = pool.sizes.block_size
    is_padding = (slot_mapping < 0) | (slot_mapping >= pool.num_blocks * block_size)
    slots = jnp.where(is_padding, 0, slot_mapping)
    if pool.blocks is not None:
        slots = pool.array_blocks(slots // block_size) * block_size + slots % block_size
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
    """Return pairs of blocks that, copied all at once, have the effect of `pairs` copied one after the other.

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
