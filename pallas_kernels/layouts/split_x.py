"""The layout `split_x`."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts.base import Arrays, Layout, Sizes

CHUNK_BYTES = 16  # bytes that a CUDA thread loads at once


class SplitX(Layout):
    """The layout of vLLM's CUDA kernels: K in chunks of x = 16 bytes, each side by side for all tokens; V by
    columns.

    K is [num_blocks, num_kv_heads, head_dim / x, block_size, x], V is [num_blocks, num_kv_heads, head_dim,
    block_size].
    """

    def arrays(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
    ) -> dict[str, jax.ShapeDtypeStruct]:
        x = _numbers(dtype)
        k = (num_blocks, num_kv_heads, head_dim // x, block_size, x)
        v = (num_blocks, num_kv_heads, head_dim, block_size)
        return {"k": jax.ShapeDtypeStruct(k, dtype), "v": jax.ShapeDtypeStruct(v, dtype)}

    def write(
        self, arrays: Arrays, sizes: Sizes, k: jax.Array, v: jax.Array, slots: jax.Array
    ) -> dict[str, jax.Array]:
        block, offset = jnp.divmod(slots, sizes.block_size)
        old_k, old_v = arrays["k"], arrays["v"]
        chunks = k.reshape(*k.shape[:2], *old_k.shape[2::2]).astype(old_k.dtype)
        return {
            "k": old_k.at[block, :, :, offset].set(chunks),
            "v": old_v.at[block, :, :, offset].set(v.astype(old_v.dtype)),
        }

    def read(
        self, arrays: Arrays, sizes: Sizes, block_ids: jax.Array, dtype: jnp.dtype
    ) -> tuple[jax.Array, jax.Array]:
        k, v = arrays["k"][block_ids], arrays["v"][block_ids]
        k = jnp.moveaxis(k, -2, -4).reshape(*block_ids.shape, *sizes[1:])
        return k.astype(dtype), jnp.moveaxis(v, -1, -3).astype(dtype)

    def why_not(self, block_size: int, head_dim: int, dtype: jnp.dtype) -> str | None:
        x = _numbers(dtype)
        return f"head_dim must be a multiple of {x}" if head_dim % x else None


def _numbers(dtype: jnp.dtype) -> int:
    return CHUNK_BYTES // jnp.dtype(dtype).itemsize
