"""The public operations on a paged KV cache: each checks its arguments, and calls an implementation.

Wrong arguments raise ValueError while tracing. An implementation that cannot serve a combination raises
NotImplementedError, which names those that can; none is ever replaced in silence. `support.SUPPORT` lists
what each one serves.

Shared by all operations:

* A block is `block_size` neighbouring slots of a cache. A cache is a `layouts.Pool`, in any layout, with None
  for v_cache; or two arrays in a layout of an array of K and one of V: kv_layout
  "token_major", the default, is [num_blocks, block_size, num_kv_heads, head_dim], "head_major"
  [num_blocks, num_kv_heads, block_size, head_dim].
* Block 0 is the null block: no sequence owns it, padding may be written into it, its content means nothing.
* Two arrays of a quantised type (float8_e4m3fn, float8_e5m2, int8) hold x / scale, with a float32 scale for
  all heads, shape (), or per kv head, shape [num_kv_heads]. Another cache takes no scale; a pool has its own.
* implementation: "mosaic_gpu" (NVIDIA GPUs since Ampere), "xla" (anything), or None: the kernel where the
  default device has one, XLA otherwise. interpret=True runs the Mosaic kernel in Pallas' GPU interpreter, on
  the CPU.
"""

from pallas_kernels.ops.attention import (
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
    plan_of_tiles,
    ragged_paged_attention,
    tiled_paged_attention,
)
from pallas_kernels.ops.caches import copy_blocks, reshape_and_cache, swap_blocks, write
from pallas_kernels.ops.choice import Implementation, ProductImplementation, TiledImplementation
from pallas_kernels.ops.latent import latent_attention
from pallas_kernels.ops.products import product, quantised_product

__all__ = [
    "Implementation",
    "ProductImplementation",
    "TiledImplementation",
    "copy_blocks",
    "latent_attention",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "plan_of_tiles",
    "product",
    "quantised_product",
    "ragged_paged_attention",
    "reshape_and_cache",
    "swap_blocks",
    "tiled_paged_attention",
    "write",
]
