"""Layouts from outside: one that keeps numbers as they are, and one that rounds them to six bits."""

import jax
import jax.numpy as jnp

from jaxpaged.contracts import Layout


class ColumnsOfK(Layout):
    """K transposed within a block: a channel's tokens side by side. V as it comes."""

    contract = 1

    def arrays(self, num_blocks, block_size, num_kv_heads, head_dim, dtype):
        return {
            "k": jax.ShapeDtypeStruct((num_blocks, num_kv_heads, head_dim, block_size), dtype),
            "v": jax.ShapeDtypeStruct((num_blocks, block_size, num_kv_heads, head_dim), dtype),
        }

    def write(self, arrays, sizes, k, v, slots):
        block, offset = jnp.divmod(slots, sizes.block_size)
        return {
            "k": arrays["k"].at[block, :, :, offset].set(k.astype(arrays["k"].dtype)),
            "v": arrays["v"].at[block, offset].set(v.astype(arrays["v"].dtype)),
        }

    def read(self, arrays, sizes, block_ids, dtype):
        k = jnp.moveaxis(arrays["k"][block_ids], -1, -3)
        return k.astype(dtype), arrays["v"][block_ids].astype(dtype)


class SixBits(Layout):
    """Numbers as round(x / scale) of six bits, in bytes, where a scale makes a token's head reach 31."""

    contract = 1
    tolerance = 2.0**-5

    def arrays(self, num_blocks, block_size, num_kv_heads, head_dim, dtype):
        shape = (num_blocks, block_size, num_kv_heads)
        codes = jax.ShapeDtypeStruct((*shape, head_dim), jnp.int8)
        scales = jax.ShapeDtypeStruct(shape, jnp.float32)
        return {"k": codes, "v": codes, "k_scale": scales, "v_scale": scales}

    def write(self, arrays, sizes, k, v, slots):
        block, offset = jnp.divmod(slots, sizes.block_size)
        new = {}
        for name, x in (("k", k), ("v", v)):
            x = x.astype(jnp.float32)
            scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) / 31, 1e-30)
            codes = jnp.rint(x / scale[..., None]).astype(jnp.int8)
            new[name] = arrays[name].at[block, offset].set(codes)
            new[f"{name}_scale"] = arrays[f"{name}_scale"].at[block, offset].set(scale)
        return new

    def read(self, arrays, sizes, block_ids, dtype):
        k, v = (
            (arrays[name][block_ids] * arrays[f"{name}_scale"][block_ids][..., None]).astype(dtype)
            for name in "kv"
        )
        return k, v
