"""Arithmetic that every part may use: it imports nothing."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from jax import Array


def cdiv[T: (int, Array, np.ndarray)](a: T, b: int) -> T:
    """Return `a / b`, rounded up."""
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    """Return the least power of two that is not below `n`."""
    return 1 << max(0, n - 1).bit_length()
