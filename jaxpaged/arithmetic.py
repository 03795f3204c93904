"""Arithmetic that every part may use: it imports nothing."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Array


def cdiv[T: (int, Array)](a: T, b: int) -> T:
    """`a / b`, rounded up."""
    return -(-a // b)
