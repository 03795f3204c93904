"""Operations on paged key and value caches: plain arrays in and out, usable without jaxpaged.

`ops` has the public operations, `layouts` the ways in which a cache may lie in memory. Implementations: `gpu`
(Mosaic GPU kernels for NVIDIA GPUs), `native` (C++ for CPUs) and `xla` (plain JAX, everywhere). `support` has
the records of an attention call, and the table of what serves which call.
"""
