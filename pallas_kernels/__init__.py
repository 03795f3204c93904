"""Operations on paged key and value caches: plain arrays in and out, usable without jaxpaged.

`ops` is the public face. Implementations: Mosaic GPU kernels for Hopper GPUs, and XLA for everything else.
"""
