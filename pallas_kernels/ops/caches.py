"""Operations that write to caches, and copy between their blocks."""

from collections.abc import Sequence

import jax

from pallas_kernels import layouts
from pallas_kernels.layouts import Layout, Pool
from pallas_kernels.ops import checks
from pallas_kernels.xla import caches as xla


def reshape_and_cache(
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    kv_layout: str | Layout = layouts.TOKEN_MAJOR,
) -> tuple[jax.Array, jax.Array]:
    """Write new tokens to a cache of two arrays; in place where they are donated to the surrounding jit.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], any floating type.
        slot_mapping: [num_tokens] int32, slot = block_id * block_size + offset. A slot outside the cache
            (-1, say) is padding and goes to slot 0, in the null block. Other slots must be distinct.

    Returns: the new k_cache and v_cache. A quantised cache stores x / scale, saturated (int8: rounded).
    Raises: ValueError on wrong shapes or types.
    """
    pool = checks.pool_of(k_cache, v_cache, kv_layout)
    k_scale, v_scale = checks.check_scales(k_scale, v_scale, k_cache.dtype, pool.sizes.num_kv_heads)
    checks.check_new(pool, k, v, slot_mapping)
    k, v = xla.quantise(k, k_scale, k_cache.dtype), xla.quantise(v, v_scale, k_cache.dtype)
    new = xla.write(pool, k, v, slot_mapping).arrays
    return new["k"], new["v"]


def write(pool: Pool, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> Pool:
    """Write new tokens to their slots; in place where the pool is donated to the surrounding jit.

    One implementation, XLA's scatter: compiled for a GPU it has no temporary and no copy, so there is
    nothing for a kernel to save.

    Args: as those of `reshape_and_cache`; tokens of a sequence in their order, next to each other.
    Returns: the new pool. Raises: ValueError on wrong shapes or types.
    """
    checks.check_new(pool, k, v, slot_mapping)
    return xla.write(pool, k, v, slot_mapping)


def copy_blocks(caches: Sequence[jax.Array], pairs: jax.Array) -> list[jax.Array]:
    """Copy block pairs[i, 0] onto block pairs[i, 1] in every cache, as if one pair came after the other.

    Args:
        caches: arrays [num_blocks, ...] with one num_blocks, such as the k and v of every layer.
        pairs: [num_pairs, 2] int32. Chains and repeated targets are fine. (0, 0), or a pair that names a
            block outside the cache, is padding and changes nothing.

    Returns: the new caches, in place where they are donated.
    Raises: ValueError on wrong shapes or types.
    """
    checks.check_int32("pairs", pairs, (pairs.shape[0] if pairs.ndim else 0, 2))
    for i, cache in enumerate(caches):
        if cache.shape[0] != (num_blocks := caches[0].shape[0]):
            raise ValueError(f"caches[{i}].shape={cache.shape} must begin with {num_blocks=}")
    return xla.copy_blocks(caches, pairs) if caches else []


def swap_blocks(source: jax.Array, target: jax.Array, pairs: jax.Array, axis: int = 0) -> jax.Array:
    """Copy block pairs[i, 0] of one pool onto block pairs[i, 1] of another, between device and host memory.

    Each pool may lie in device memory or in the host's (`jax.device_put(pool, jax.memory.Space.Host)`);
    only the named blocks travel. Call it under jit, with the target donated to have it written in place.

    Args:
        source, target: [num_blocks, ...] with equal block shapes and types; num_blocks may differ. Blocks may
            be counted along another `axis`.
        pairs: [num_pairs, 2] int32, done in order. A pair with a block outside its pool changes nothing.

    Returns: the new target, in target's memory.
    Raises: ValueError on wrong shapes or types.
    """
    checks.check_int32("pairs", pairs, (pairs.shape[0] if pairs.ndim else 0, 2))
    shapes = [(*pool.shape[:axis], *pool.shape[axis + 1 :]) for pool in (source, target)]
    if shapes[0] != shapes[1] or source.dtype != target.dtype:
        raise ValueError(
            f"source {source.dtype}{source.shape} must hold blocks like target's {target.dtype}{target.shape}"
        )
    return xla.swap_blocks(source, target, pairs, axis)
