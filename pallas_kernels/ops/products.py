"""Products with a layer's weights, in their own type or of few bits."""

import jax
from jax import lax

from pallas_kernels import native
from pallas_kernels.gpu import dense_product as mosaic_products
from pallas_kernels.gpu import quantised_product as mosaic_quantised
from pallas_kernels.ops import choice
from pallas_kernels.ops.choice import Implementation, ProductImplementation
from pallas_kernels.quantised import PANEL_WIDTH, Halfwords, Quantised
from pallas_kernels.xla import products as xla


def product(
    x: jax.Array,
    weights: jax.Array,
    layer: int | jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute `x @ weights`, [num_rows, num_outputs] float32.

    With "mosaic_gpu" only the layer's weights of a stack are read; "xla" may copy them first, if the layer is
    traced. With "mosaic_gpu" a row's bits depend on no other row, nor on how many there are.

    x: [num_rows, num_inputs] float16, bfloat16 or float32.
    weights: of x's type, [num_inputs, num_outputs]; with a layer [num_layers, num_inputs, num_outputs].
    layer: which weights of a stack; None if there is no stack.
    implementation: "mosaic_gpu" serves 16 bits, and numbers of inputs and of outputs that are multiples of 8,
        before Hopper of 64, and 64 or more. None chooses it on a GPU if it serves the weights, else "xla".
    """
    sizes = "[num_inputs, num_outputs]" if layer is None else "[num_layers, num_inputs, num_outputs]"
    if weights.ndim != 2 + (layer is not None):
        raise ValueError(f"{weights.shape=} must be {sizes} with {layer=}")
    if x.ndim != 2 or not x.shape[0] or x.shape[1] != weights.shape[-2]:
        raise ValueError(f"{x.shape=} must be [num_rows, num_inputs={weights.shape[-2]}], one row or more")
    if x.dtype != weights.dtype:
        raise ValueError(f"{x.dtype=} must be {weights.dtype=}")
    if isinstance(layer, int) and not 0 <= layer < weights.shape[0]:
        raise ValueError(f"{layer=} must be one of {weights.shape[0]} layers, counted from 0")
    why_not = mosaic_products.why_not(x.dtype, *weights.shape[-2:])
    if implementation is None:
        chosen = "mosaic_gpu" if interpret else choice.default_implementation()
        implementation = "xla" if why_not and not interpret else chosen
    if choice.is_mosaic(implementation, interpret=interpret):
        if why_not:
            raise NotImplementedError(f"mosaic_gpu products: {why_not}. Use implementation='xla'.")
        return mosaic_products.product(x, weights, layer, interpret=interpret)
    one = weights if layer is None else lax.dynamic_index_in_dim(weights, layer, keepdims=False)
    return xla.product(x, one, contract=0)


def quantised_product(
    x: jax.Array,
    weight: Quantised | Halfwords,
    layer: int | jax.Array | None = None,
    *,
    implementation: ProductImplementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute `x @ weight.T` for a weight of few bits, [num_rows, out_features] float32.

    x: [num_rows, in_features] bfloat16, float16 or float32. Inputs that the weight has beyond x's are zeros.
    weight: `Halfwords` for "mosaic_gpu", which serves up to 256 rows in bfloat16; `Quantised`, in panels, for
        "native". "xla" takes either: it widens the weight in the program, and multiplies numbers of x's type.
    layer: which weight of a stack; None if there is no stack.
    implementation: None chooses the one that the weight is packed for, if it serves x, else "xla".
    """
    if x.ndim != 2 or x.shape[1] > weight.in_features:
        raise ValueError(f"{x.shape=} must be [num_rows, in_features], at most {weight.in_features} of them")
    why_not = _why_no_product_kernel(x, weight)
    if implementation is None:
        in_panels = isinstance(weight, Quantised) and weight.panel_width == PANEL_WIDTH
        function = native.quantised_function(weight.bits, is_float=weight.is_float)
        is_native = in_panels and native.serves(x.dtype, function)
        implementation = "native" if is_native else "xla" if why_not else "mosaic_gpu"
    if implementation == "mosaic_gpu":
        if why_not or isinstance(weight, Quantised):
            raise NotImplementedError(f"mosaic_gpu products: {why_not}. Use implementation='xla'.")
        return mosaic_quantised.product(x, weight, layer, interpret=interpret)
    if implementation == "native":
        if not isinstance(weight, Quantised):
            raise NotImplementedError(
                "native products: the weight must be packed in panels. Use implementation='xla'."
            )
        return native.quantised_product(x, weight, 0 if layer is None else layer)
    one = weight if layer is None else weight.of_layer(layer)
    wide, scales = one.factors(x.dtype)
    y = xla.product(x, wide[:, : x.shape[1]], contract=1)
    return y if scales is None else y * scales


def _why_no_product_kernel(x: jax.Array, weight: Quantised | Halfwords) -> str | None:
    if not isinstance(weight, Halfwords):
        return "the weight must be packed as halfwords"
    if x.shape[0] > mosaic_quantised.MAX_ROWS:
        return f"{x.shape[0]} rows must be at most {mosaic_quantised.MAX_ROWS}"
    return mosaic_quantised.why_not(x.dtype, weight.bits, weight.group_size, is_float=weight.is_float)
