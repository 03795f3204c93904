"""Kernels in C++ for CPUs with AVX-512, where XLA's own code takes two to three times as long.

They are called from compiled programs through JAX's foreign function interface. Nothing depends on them:
without AVX-512 or a C++ compiler, and with `JAXPAGED_NATIVE=0`, XLA does what they would do.
"""

from pallas_kernels.native.attention import tiled_paged_attention
from pallas_kernels.native.library import serves, why_not
from pallas_kernels.native.product import pack, product

__all__ = ["pack", "product", "serves", "tiled_paged_attention", "why_not"]
