"""NumPy arrays that JAX takes over without a copy on a CPU."""

import math

import jax
import numpy as np
from jaxtyping import Array, Num

_ALIGNMENT = 64


def placed(array: Num[Array | np.ndarray, "..."]) -> Num[Array, "..."]:
    """Copy an array of NumPy to the device; JAX's stays as it is."""
    if not isinstance(array, np.ndarray):
        return array
    target = aligned(array.shape, array.dtype)
    put(target, array)
    return jax.device_put(target)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an empty array aligned as JAX needs on a CPU, so that JAX takes it over without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def put(target: np.ndarray, values: np.ndarray) -> None:
    """Copy values into `target`, two numbers of two bytes at a time where possible: twice as fast."""
    if values.itemsize == 2 and values.ndim and values.shape[-1] % 2 == 0 and values.strides[-1] == 2:
        target, values = target.view(np.uint32), values.view(np.uint32)
    target[...] = values
