"""Products with weights by XLA's dot."""

import jax
import jax.numpy as jnp
from jax import lax


def product(x: jax.Array, kernel: jax.Array, contract: int) -> jax.Array:
    """Multiply x [*num_heads, num_rows, in_features] by a matrix, or each head's rows by a matrix of the
    head's own: [*num_heads, num_rows, out_features] float32.

    contract: the axis of `kernel` that counts inputs, 0 or 1, without the heads in front.
    """
    heads, num_rows = tuple(range(x.ndim - 2)), x.shape[-2]
    if num_rows == 1 and x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        # One row of bfloat16 runs at 2 GFLOP/s there, two at 40.
        x = jnp.concatenate([x, x], axis=-2)
    dimensions = (((x.ndim - 1,), (len(heads) + contract,)), (heads, heads))
    return lax.dot_general(x, kernel, dimensions, preferred_element_type=jnp.float32)[..., :num_rows, :]
