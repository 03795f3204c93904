"""Low-rank additions to products on CPUs: `low_rank.h`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.native.library import registered


def add_low_rank(
    y: Float[Array, "num_rows out_features"],
    x: Float[Array, "num_rows in_features"],
    a: Float[Array, "num_layers num_choices a_panels in_features panel_width"],
    b: Float[Array, "num_layers num_choices b_panels rank panel_width"],
    choices: Int[Array, " num_rows"],
    layer: int | Int[Array, ""],
    widths: tuple[int, ...],
) -> Float[Array, "num_rows out_features"]:
    """Compute `ops.low_rank.add` with a choice for each row, where `serves(x.dtype, "low_rank")`. y is
    changed in place.

    The matrices that rows have chosen are read once for up to four rows. A row's bits do not depend on the
    other rows, and rows without a choice keep y's.

    Raises: TypeError if x is not of a's and b's dtype.
    """
    if not x.dtype == a.dtype == b.dtype:
        raise TypeError(f"{x.dtype=} must be that of a and b, {a.dtype} and {b.dtype}")
    result = jax.ShapeDtypeStruct(y.shape, jnp.float32)
    call = jax.ffi.ffi_call(registered("low_rank", x.dtype), result, input_output_aliases={0: 0})
    of_layer = jnp.asarray(layer, jnp.int32)
    return call(y, x, a, b, choices, of_layer, widths=np.array(widths, np.int64))
