"""The layout `token`."""

import jax.numpy as jnp

from pallas_kernels.layouts.dense import Dense


class Token(Dense):
    """A token a block, as in token attention: no place is wasted, and any token may lie anywhere."""

    axes = ("block", "head", "dim")

    def why_not(self, block_size: int, head_dim: int, dtype: jnp.dtype) -> str | None:
        return None if block_size == 1 else "block_size must be 1"
