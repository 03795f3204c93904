"""Operations on paged key and value caches: plain arrays in and out, usable without jaxpaged.

`ops` is the public face. Implementations: Mosaic GPU kernels for Hopper GPUs, kernels in C++ for CPUs
(`native`, products with weights among them), and XLA for everything else.
"""
