"""A layout of 8-bit numbers with a scale for each token and head; K and V side by side in a block."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import Layout


class Scaled(Layout):
    """K and V as int8, each token's head divided by its largest magnitude over 127."""

    tolerance = 1 / 253

    def arrays(self, num_blocks, block_size, num_kv_heads, head_dim, dtype):
        shape = num_blocks, 2, block_size, num_kv_heads
        return {
            "numbers": jax.ShapeDtypeStruct((*shape, head_dim), jnp.int8),
            "units": jax.ShapeDtypeStruct(shape, jnp.float32),
        }

    def write(self, arrays, sizes, k, v, slots):
        block, offset = jnp.divmod(slots, sizes.block_size)
        numbers, units = arrays["numbers"], arrays["units"]
        for which, x in enumerate((k, v)):
            x = x.astype(jnp.float32)
            scale = jnp.maximum(abs(x).max(axis=-1), 1e-30) / 127
            rounded = jnp.rint(x / scale[..., None]).astype(jnp.int8)
            numbers = numbers.at[block, which, offset].set(rounded)
            units = units.at[block, which, offset].set(scale)
        return {"numbers": numbers, "units": units}

    def read(self, arrays, sizes, block_ids, dtype):
        numbers, units = (arrays[name][block_ids].astype(dtype) for name in ("numbers", "units"))
        both = numbers * units[..., None]
        return both[..., 0, :, :, :], both[..., 1, :, :, :]
