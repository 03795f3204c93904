"""Products with weights of 8 or 4 bits on CPUs: `quantised_product.h`."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.native.library import registered

if TYPE_CHECKING:
    from pallas_kernels.quantised import Quantised


def quantised_product(
    x: Float[Array, "num_rows in_features"], weight: "Quantised", layer: int | Int[Array, ""] = 0
) -> Float[Array, "num_rows out_features"]:
    """Compute `x @ weight.widened().T` in float32, where `serves(x.dtype)`.

    layer: which weight of a stack.

    A row's bits do not depend on the other rows, nor on how many there are. Rows of zeros give zeros and take
    no time.

    Raises: ValueError if x has more inputs than the weight.
    """
    missing = weight.in_features - x.shape[1]
    if missing < 0:
        raise ValueError(f"a weight of {weight.in_features} inputs does not take rows of {x.shape[1]}")
    x = jnp.pad(x, ((0, 0), (0, missing)))
    codes, scales = _stack(weight.codes), _stack(weight.scales)
    minima = jnp.zeros((0,) * 4, scales.dtype) if weight.minima is None else _stack(weight.minima)
    result = jax.ShapeDtypeStruct((x.shape[0], weight.out_features), jnp.float32)
    function = registered(quantised_function(weight.bits, is_float=weight.is_float), x.dtype)
    call = jax.ffi.ffi_call(function, result)
    return call(x, codes, scales, minima, jnp.asarray(layer, jnp.int32))


def quantised_function(bits: int, *, is_float: bool) -> str:
    """Return which of `library.FUNCTIONS` takes codes of these bits."""
    if not is_float:
        return "quantised_product"
    return "quantised_product_of_floats" if bits == 8 else "quantised_product_of_short_floats"


def _stack(x: Array | np.ndarray) -> Array:
    return jnp.asarray(x).reshape(-1, *x.shape[-3:])
