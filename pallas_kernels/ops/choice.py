"""The choice of an implementation: by default for the device, and by what serves a call."""

import functools
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


@functools.cache
def default_implementation() -> Implementation:
    """Return what None stands for: "mosaic_gpu" if kernels serve all operations on the default device's
    target, else "xla".
    """
    target = targets.target_of(jax.devices()[0])
    return "mosaic_gpu" if target is not None and target.is_served else "xla"


def default_attention_implementation() -> Implementation:
    """Return what None stands for in attention, which has kernels on more targets than products."""
    target = targets.target_of(jax.devices()[0])
    has_kernel = target is not None and "prompts" in target.serves
    return "mosaic_gpu" if has_kernel else default_implementation()


def default_tiled_implementation(dtype: jnp.dtype, tile_len: int) -> TiledImplementation:
    """Return what None stands for in `tiled_paged_attention`: a kernel of this device if one serves."""
    if native.serves(dtype):
        return "native"
    return default_attention_implementation() if tile_len <= TILE_LENS[-1] else "xla"


def for_attention(
    implementation: Implementation | None, batch: Batch, options: Options, *, interpret: bool
) -> Implementation:
    """Choose the implementation of an attention call; None stands for the default one.

    XLA is the default for what the kernels do not serve, on a target where products are XLA's too.

    Raises: ValueError for an unknown one; NotImplementedError if it does not serve the call.
    """
    is_default = implementation is None and not interpret
    if implementation is None:
        implementation = "mosaic_gpu" if interpret else default_attention_implementation()
    is_mosaic(implementation, interpret=interpret)
    pool = batch.pool
    cache, view = pool.sizes, pool.layout.view()
    try:
        refuse_unserved(
            implementation,
            dtype=batch.q.dtype,
            cache_dtype=batch.q.dtype if view is None else pool.arrays[view.k.array].dtype,
            head_dim=cache.head_dim,
            block_size=cache.block_size,
            group_size=batch.q.shape[1] // cache.num_kv_heads,
            options=options,
            architecture=None if interpret else architecture(),
        )
    except NotImplementedError:
        if is_default and default_implementation() == "xla":
            return "xla"
        raise
    return implementation


def architecture() -> str | None:
    """Return the default device's target as ptxas names it; None for a CPU, or an unknown GPU."""
    target = targets.target_of(jax.devices()[0])
    return None if target is None else target.architecture


def why_no_products() -> str | None:
    """Return why our kernels multiply nothing on the default device; None if they do, or it is unknown."""
    target = targets.target_of(jax.devices()[0])
    if target is None or "products" in target.serves:
        return None
    return f"there is none for {target.architecture}, which has no wgmma"


def is_mosaic(implementation: Implementation, *, interpret: bool) -> bool:
    """Return whether it is "mosaic_gpu". Raise ValueError if it is unknown, or cannot be interpreted."""
    if implementation not in ("mosaic_gpu", "xla"):
        raise ValueError(f"{implementation=} must be 'mosaic_gpu', 'xla' or None")
    if interpret and implementation != "mosaic_gpu":
        raise ValueError(f"{interpret=} needs implementation='mosaic_gpu', not {implementation!r}")
    return implementation == "mosaic_gpu"
