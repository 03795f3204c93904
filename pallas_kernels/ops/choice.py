"""The choice of an implementation: by default for the device, and by what serves a call."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.gpu import targets
from pallas_kernels.gpu.prompt.program import TILE_LENS
from pallas_kernels.support import Batch, Options, refuse_unserved

Implementation = Literal["mosaic_gpu", "xla"]
TiledImplementation = Literal["mosaic_gpu", "native", "xla"]
ProductImplementation = Literal["mosaic_gpu", "native", "xla"]


def default_implementation() -> Implementation:
    """Return the implementation for None: "mosaic_gpu" if the default device is a target of kernels, else
    "xla".
    """
    return "xla" if targets.target_of(jax.devices()[0]) is None else "mosaic_gpu"


def default_tiled_implementation(dtype: jnp.dtype, tile_len: int) -> TiledImplementation:
    """Return the implementation that `tiled_paged_attention` takes for None: a kernel of this device if one
    serves.
    """
    if native.serves(dtype):
        return "native"
    return default_implementation() if tile_len <= TILE_LENS[-1] else "xla"


def for_attention(
    implementation: Implementation | None, batch: Batch, options: Options, *, interpret: bool
) -> Implementation:
    """Choose the implementation of an attention call; None stands for the default one.

    Raises: ValueError for an unknown one; NotImplementedError if it does not serve the call.
    """
    if implementation is None:
        implementation = "mosaic_gpu" if interpret else default_implementation()
    is_mosaic(implementation, interpret=interpret)
    pool = batch.pool
    cache, view = pool.sizes, pool.layout.view()
    refuse_unserved(
        implementation,
        dtype=batch.q.dtype,
        cache_dtype=batch.q.dtype if view is None else pool.arrays[view.k.array].dtype,
        head_dim=cache.head_dim,
        block_size=cache.block_size,
        group_size=batch.q.shape[1] // cache.num_kv_heads,
        options=options,
    )
    return implementation


def is_mosaic(implementation: Implementation, *, interpret: bool) -> bool:
    """Return whether it is "mosaic_gpu". Raise ValueError if it is unknown, or cannot be interpreted."""
    if implementation not in ("mosaic_gpu", "xla"):
        raise ValueError(f"{implementation=} must be 'mosaic_gpu', 'xla' or None")
    if interpret and implementation != "mosaic_gpu":
        raise ValueError(f"{interpret=} needs implementation='mosaic_gpu', not {implementation!r}")
    return implementation == "mosaic_gpu"
