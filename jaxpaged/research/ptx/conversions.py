"""cvt: between types of registers."""

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from jaxpaged.research.ptx import rounding
from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.program import Instruction
from jaxpaged.research.ptx.registers import TYPES, Array

if TYPE_CHECKING:
    from jaxpaged.research.ptx.machine import Machine, Step
    from jaxpaged.research.ptx.warps import Warp

EIGHT_BITS = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}
TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def compile_conversion(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of a cvt."""
    target, source = one.parts[-2:]
    put = machine.operands.setter(one.operands[0])
    if "satfinite" in one.parts and target not in EIGHT_BITS:
        raise Fault(f"no instruction {one}")
    if len(one.operands) == 3:
        return _pair(machine, one, target)
    get = machine.operands.value(one.operands[1], "b16" if source in EIGHT_BITS else source)

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        put(warp, lanes, convert(get(warp), target, source, one))

    return step


def convert(x: Array, target: str, source: str, one: Instruction) -> Array:
    """Return numbers of one type as another's."""
    if source in EIGHT_BITS:
        wide = np.ascontiguousarray(x).view(EIGHT_BITS[source])
        if target != "f16x2":
            raise Fault(f"no instruction {one}")
        return np.ascontiguousarray(wide.astype(np.float16)).view(np.uint32)
    if target in EIGHT_BITS and source == "f16x2":
        return _eight_bits(np.ascontiguousarray(x).view(np.float16).astype(np.float64), target)
    if source == "bf16":
        x = rounding.from_bfloat16(x)
    dtype = np.dtype(TYPES[target])
    if "ftz" in one.parts:
        x = rounding.flushed(x)
    if target == "bf16":
        if x.dtype.kind != "f":
            raise Fault(f"no instruction {one}")
        if "rz" in one.parts:
            return (np.ascontiguousarray(x.astype(np.float32)).view(np.uint32) >> np.uint32(16)).astype(
                np.uint16
            )
        return rounding.to_bfloat16(x)
    modes = [TO_INTEGER[part] for part in one.parts if part in TO_INTEGER]
    if x.dtype.kind == "f" and dtype.kind in "iu":
        whole, limits = modes[0](x.astype(np.float64)), np.iinfo(dtype)
        whole = np.where(np.isnan(whole), 0, whole)
        low, high = float(limits.min), float(limits.max)
        inside = np.clip(whole, low, np.nextafter(high, 0) if dtype.itemsize == 8 else high).astype(dtype)
        return np.where(whole >= high, limits.max, inside).astype(dtype)
    if x.dtype.kind == "f" and dtype.kind == "f":
        return modes[0](x).astype(dtype) if modes else x.astype(dtype)
    if "sat" in one.parts:
        limits = np.iinfo(dtype)
        return np.clip(x.astype(np.int64), limits.min, limits.max).astype(dtype)
    return x.astype(dtype)


def _eight_bits(x: Array, target: str) -> Array:
    """Return pairs of numbers rounded to 8 bits; what is too large becomes the largest."""
    eight = EIGHT_BITS[target]
    largest = float(ml_dtypes.finfo(eight).max)
    clipped = np.where(np.isnan(x), np.nan, np.clip(x, -largest, largest))
    return np.ascontiguousarray(clipped.astype(eight)).view(np.uint16)


def _pair(machine: "Machine", one: Instruction, target: str) -> "Step":
    """Return a conversion of two float32 into a register: the first operand is its upper part."""
    put = machine.operands.setter(one.operands[0])
    upper, lower = (machine.operands.value(x, "f32") for x in one.operands[1:])
    if target not in ("bf16x2", "f16x2", *EIGHT_BITS) or "rz" in one.parts or "relu" in one.parts:
        raise Fault(f"no instruction {one}")

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        pair = np.stack([lower(warp), upper(warp)], 1)
        if target in EIGHT_BITS:
            bits = _eight_bits(pair.astype(np.float64), target)[:, 0]
        else:
            halves = rounding.to_bfloat16(pair) if target == "bf16x2" else rounding.to_float16(pair)
            bits = np.ascontiguousarray(halves).view(np.uint32)[:, 0]
        put(warp, lanes, bits)

    return step
