"""Rounding of numbers as PTX has it: to nearest, ties to even, unless an instruction says otherwise."""

import ml_dtypes
import numpy as np

from jaxpaged.research.ptx.registers import Array

SMALLEST = np.float32(2.0**-126)


def flushed(x: Array) -> Array:
    """Return numbers with subnormal ones made zeros of the same sign."""
    if x.dtype != np.float32:
        return x
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Compute a * b + c, rounded once.

    A product of two float32 is exact in float64. The sum is rounded to odd there, so that the last rounding
    is right.
    """
    if a.dtype == np.float64:
        return a * b + c  # twice
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    is_even = total.view(np.uint64) & np.uint64(1) == 0
    inexact = (error != 0) & is_even & np.isfinite(total)
    total = np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    result: Array = total.astype(a.dtype)
    return result


def to_bfloat16(x: Array) -> Array:
    """Return the bits of numbers rounded to bfloat16; NaN is 0x7FFF."""
    single = _to_odd_single(x)
    bits = np.ascontiguousarray(single).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(single), np.uint16(0x7FFF), rounded.astype(np.uint16))


def _to_odd_single(x: Array) -> Array:
    """Return float32, of float64 rounded to odd, so that another rounding is right."""
    if x.dtype != np.float64:
        return x.astype(np.float32)
    single = x.astype(np.float32)
    error = x - single.astype(np.float64)
    is_even = single.view(np.uint32) & np.uint32(1) == 0
    moved = np.nextafter(single, np.where(error > 0, np.float32(np.inf), np.float32(-np.inf)))
    return np.where((error != 0) & is_even & np.isfinite(single), moved, single)


def from_bfloat16(bits: Array) -> Array:
    """Return float32 numbers of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def wide_bfloat16(bits: Array) -> Array:
    """Return float64 numbers of bfloat16 bits."""
    return from_bfloat16(bits).astype(np.float64)


def to_float16(x: Array) -> Array:
    """Return the bits of numbers rounded to float16."""
    return np.ascontiguousarray(x.astype(np.float16)).view(np.uint16)


def numbers(bits: Array, kind: str) -> Array:
    """Return the numbers that bits of a type stand for: of 8 and 16 bits in float32, integers in float64."""
    if kind == "bf16":
        return from_bfloat16(bits.view(np.uint16))
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    if kind in ("e4m3", "e5m2"):
        eight = ml_dtypes.float8_e4m3fn if kind == "e4m3" else ml_dtypes.float8_e5m2
        return bits.view(eight).astype(np.float32)
    return bits.view({"s8": np.int8, "u8": np.uint8}[kind]).astype(np.float32)


BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
