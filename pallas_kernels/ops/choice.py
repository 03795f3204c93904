"""Which implementation an operation is to have, where it is not told."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.gpu.prompt import attention as mosaic_prompts

Implementation = Literal["mosaic_gpu", "xla"]
TiledImplementation = Literal["mosaic_gpu", "native", "xla"]
ProductImplementation = Literal["mosaic_gpu", "native", "xla"]


@functools.cache
def default_implementation() -> Implementation:
    """What implementation=None stands for: "mosaic_gpu" if the default device is a Hopper GPU, else "xla"."""
    device = jax.devices()[0]
    is_hopper = device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"
    return "mosaic_gpu" if is_hopper else "xla"


def default_tiled_implementation(dtype: jnp.dtype, tile_len: int) -> TiledImplementation:
    """What None stands for in `tiled_paged_attention`: a kernel of this device if one serves, else "xla"."""
    if native.serves(dtype):
        return "native"
    return default_implementation() if tile_len <= mosaic_prompts.TILE_LENS[-1] else "xla"


def is_mosaic(implementation: Implementation, *, interpret: bool) -> bool:
    """Whether it is that of the two. Raises ValueError if it is none, or cannot be interpreted."""
    if implementation not in ("mosaic_gpu", "xla"):
        raise ValueError(f"{implementation=} must be 'mosaic_gpu', 'xla' or None")
    if interpret and implementation != "mosaic_gpu":
        raise ValueError(f"{interpret=} needs implementation='mosaic_gpu', not {implementation!r}")
    return implementation == "mosaic_gpu"
