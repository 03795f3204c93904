"""Operations on paged key and value caches: plain arrays in and out, usable without jaxpaged.

`ops` is the public face; `xla` holds every operation in plain jax.numpy.
"""
