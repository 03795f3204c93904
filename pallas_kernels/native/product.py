"""Products with weights on CPUs: `product.h`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.native.library import registered

PANEL_WIDTH = 32  # columns that lie side by side in a packed kernel


def pack[A: Array | np.ndarray](weight: A) -> A:
    """Return a weight [out_features, in_features] as `product` reads it: [num_panels, num_steps, panel_width,
    values].

    A panel holds 32 outputs. A step of it holds the next input of each output in float32, the next two in
    bfloat16. Missing outputs and inputs are zeros. A NumPy weight without missing ones is not copied but
    viewed.
    """
    values = 4 // weight.dtype.itemsize
    out_features, in_features = weight.shape
    whole: Any = weight
    missing = ((0, -out_features % PANEL_WIDTH), (0, -in_features % values))
    if missing != ((0, 0), (0, 0)):
        whole = np.pad(weight, missing) if isinstance(weight, np.ndarray) else jnp.pad(weight, missing)
    panels = whole.reshape(-1, PANEL_WIDTH, whole.shape[1] // values, values)
    return panels.transpose(0, 2, 1, 3)


def product(
    x: Float[Array, "*num_heads num_rows in_features"],
    packed: Float[Array, "*num_layers num_panels num_steps panel_width values"],
    out_features: int,
    layer: int | Int[Array, ""] = 0,
) -> Float[Array, "*num_heads num_rows out_features"]:
    """Compute `x @ weight.T` in float32, for `packed = pack(weight)`, where `serves(x.dtype)`.

    layer: which weight of a stack, `packed[i] = pack(weights[i])`. A loop over layers then copies no weight.

    With heads each head's rows have a weight of their own: `packed[layer, head]`, or `packed[head]` without
    layers.

    A row's bits do not depend on the other rows, nor on how many there are. Rows of zeros give zeros and take
    no time.

    Raises: TypeError if x is not of the packed weight's dtype, ValueError if shapes do not fit.
    """
    if x.dtype != packed.dtype:
        raise TypeError(f"{x.dtype=} must be the packed weight's {packed.dtype}")
    num_panels, num_steps, _, values = packed.shape[-4:]
    missing = num_steps * values - x.shape[-1]
    if not (0 <= missing < values and 0 <= num_panels * PANEL_WIDTH - out_features < PANEL_WIDTH):
        raise ValueError(f"a weight of {packed.shape=} does not take rows of {x.shape[-1]} to {out_features}")
    x = jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, missing)))
    stack = packed.reshape(-1, *packed.shape[-4:])
    result = jax.ShapeDtypeStruct((*x.shape[:-1], out_features), jnp.float32)
    layer = jnp.asarray(layer, jnp.int32)
    return jax.ffi.ffi_call(registered("product", x.dtype), result)(x, stack, layer)
