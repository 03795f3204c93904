"""A digest of arrays: few bits that tell whether two have the same numbers."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Num, UInt32


def digest(arrays: Sequence[Num[Array, "..."] | Bool[Array, "..."]]) -> UInt32[Array, "2"]:
    """Return two sums over all bits of these arrays, each bit mixed with its index.

    Equal arrays have equal sums, however they lie on devices; others have so by a chance of 2**-64. The
    digest is not cryptographic: two arrays that agree are easily made.
    """
    total = jnp.zeros(2, jnp.uint32)
    for number, x in enumerate(arrays):
        whole = x.astype(jnp.uint8) if x.dtype == bool else x
        bits = lax.bitcast_convert_type(whole, jnp.dtype(f"uint{8 * whole.dtype.itemsize}")).astype(
            jnp.uint32
        )
        place = jnp.full(x.shape, number, jnp.uint32) * jnp.uint32(0x85EBCA77)
        for axis in range(x.ndim):
            place = place * jnp.uint32(0x9E3779B1) + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        words = []
        for odd in (0x7FEB352D, 0x846CA68B):
            mixed = (bits ^ (place * jnp.uint32(odd))) * jnp.uint32(0xC2B2AE3D)
            mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(odd)
            words.append(jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32))
        total += jnp.stack(words)
    return total
