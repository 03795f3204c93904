"""Kernels in C++ for CPUs, where XLA's own code takes two to three times as long.

One source serves AVX-512, AVX2, SSE2 and NEON. Compiled programs call the kernels through JAX's foreign
function interface. They are optional: without a C++ compiler, or with `JAXPAGED_NATIVE=0`, XLA does their
work. `JAXPAGED_NATIVE=avx2` selects another target than the processor's fastest.
"""

from pallas_kernels.native.attention import tiled_paged_attention, why_not_cache, why_not_layout
from pallas_kernels.native.library import instructions, prepare, serves, why_not
from pallas_kernels.native.low_rank import add_low_rank
from pallas_kernels.native.product import pack, product
from pallas_kernels.native.quantised_product import quantised_function, quantised_product

__all__ = [
    "add_low_rank",
    "instructions",
    "pack",
    "prepare",
    "product",
    "quantised_function",
    "quantised_product",
    "serves",
    "tiled_paged_attention",
    "why_not",
    "why_not_cache",
    "why_not_layout",
]
