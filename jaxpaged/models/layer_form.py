"""The form of a decoder's layers: which implementation multiplies, and whether layers are in a loop."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.gpu import dense_product
from pallas_kernels.ops import ProductImplementation, choice


@dataclasses.dataclass(frozen=True)
class LayerForm:
    """The form of layers, chosen once for all of a model's weights that are not quantised.

    In a loop over layers, and over experts, a product must be told which of a stack of weights it is to read.
    XLA's cannot be: it copies the weights out of the stack in every turn; or, on a GPU, reads their place on
    the host, and then the serving loop is no CUDA graph (LOG.md).
    """

    own: ProductImplementation  # product with a weight in its own array
    stacked: ProductImplementation  # product with a weight of a stack, whose index may be traced
    loops: bool  # whether the program loops over layers, with all weights stacked
    differentiable: bool = False  # whether each loop has a length that is known when it is compiled


def form_of(dtype: jnp.dtype, loop_over_layers: bool | None = None) -> LayerForm:
    """Choose the form for this machine and this weight dtype; `loop_over_layers` as in `EngineConfig`."""
    if native.serves(dtype):
        return LayerForm("native", "native", loop_over_layers is not False)
    by_kernel = choice.default_implementation() == "mosaic_gpu" and dtype.name in dense_product.DTYPES
    return LayerForm("xla", "mosaic_gpu" if by_kernel else "xla", bool(loop_over_layers))
