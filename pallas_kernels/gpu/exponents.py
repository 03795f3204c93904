"""Powers of two on floating-point units, for GPUs whose exponent units are slower than their tensor cores.

    2^x = 2^n p(x - n)        n: the integer nearest to x;  p: a polynomial of degree 3 close to 2^f in
                              [-1/2, 1/2], with p(0) = 1

p is off by up to 1.02e-4 of its value: a nineteenth of what rounding to bfloat16 may add.
"""

import jax
import jax.numpy as jnp
from jax import lax

COLUMNS = 8  # that a vector of registers has
COEFFICIENTS = (0.6932829, 0.24221097, 0.05500906)  # of f, f^2 and f^3: the least error relative to 2^f
# Added to a number, it leaves the nearest integer in the lower bits; subtracted again, that integer.
ROUNDER = 1.5 * 2**23
LOWEST = -127.0  # 2^-127 has no bits set: it is zero here
MANTISSA_BITS = 23


def exp2(x: jax.Array, one_in: int) -> jax.Array:
    """Return 2^x: of so many groups of eight columns the last one by polynomial, if one_in is not 0."""
    width = one_in * COLUMNS
    if not width or x.shape[1] % width:
        return jnp.exp2(x)
    pieces = []
    for first in range(0, x.shape[1], width):
        last = first + width - COLUMNS
        pieces += [jnp.exp2(x[:, first:last]), by_polynomial(x[:, last : last + COLUMNS])]
    return lax.concatenate(pieces, 1)


def by_polynomial(x: jax.Array) -> jax.Array:
    """Return 2^x for x up to 127, in float32; zero for x up to -127."""
    x = jnp.maximum(x, LOWEST)
    shifted = x + ROUNDER
    if jax.__version_info__ < (0, 12):  # there XLA takes adding and subtracting for nothing, on a CPU
        shifted = lax.optimization_barrier(shifted)
    f = x - (shifted - ROUNDER)
    linear, square, cube = COEFFICIENTS
    power = ((cube * f + square) * f + linear) * f + 1.0
    exponent = lax.bitcast_convert_type(shifted, jnp.int32) << MANTISSA_BITS
    return lax.bitcast_convert_type(lax.bitcast_convert_type(power, jnp.int32) + exponent, jnp.float32)
