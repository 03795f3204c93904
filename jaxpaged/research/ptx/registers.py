"""Registers of a warp as NumPy arrays of its 32 lanes, and operands of instructions by their text."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpaged.research.ptx.faults import Fault

if TYPE_CHECKING:
    from jaxpaged.research.ptx.warps import Warp

Array = np.ndarray[Any, Any]
Get = Callable[["Warp"], Array]  # a value for each lane
Set = Callable[["Warp", Array, Array], None]  # (warp, lanes, a value for each lane)
Address = Callable[["Warp"], Array]  # an int64 for each lane

LANES = np.arange(32)
# A type of an instruction as NumPy has it. Numbers of bfloat16, of 8 bits and pairs are their bits.
TYPES: dict[str, Any] = {
    "pred": np.bool_,
    **dict.fromkeys(("b8", "u8"), np.uint8),
    "s8": np.int8,
    **dict.fromkeys(("b16", "u16", "bf16", "e4m3x2", "e5m2x2"), np.uint16),
    "s16": np.int16,
    "f16": np.float16,
    **dict.fromkeys(("b32", "u32", "f16x2", "bf16x2", "tf32"), np.uint32),
    "s32": np.int32,
    "f32": np.float32,
    **dict.fromkeys(("b64", "u64", "f32x2"), np.uint64),
    "s64": np.int64,
    "f64": np.float64,
}
BITS = {"b8": 16, "u8": 16, "s8": 16}  # a register of 8 bits is kept in one of 16
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits_of(kind: str) -> int:
    """Return the bits of a register of a type."""
    if kind == "pred":
        return 1
    return BITS.get(kind, 8 * np.dtype(TYPES[kind]).itemsize)


def storage_of(kind: str) -> Any:
    """Return the type in which a register is kept."""
    return np.bool_ if kind == "pred" else UNSIGNED[bits_of(kind) // 8]


def names_of(operand: str) -> list[str]:
    """Return the members of a vector in braces, or the operand alone."""
    return [name.strip() for name in operand.strip("{}").split(",")]


class Operands:
    """Readers and writers of a kernel's operands."""

    def __init__(self, registers: dict[str, str], shared: dict[str, int], special: dict[str, Get]) -> None:
        self._registers, self._special = registers, special
        self._symbols, at = {}, 0
        for name, size in shared.items():
            self._symbols[name], at = at, at + -(-size // 16) * 16

    def value(self, operand: str, kind: str) -> Get:
        """Return a reader of an operand as numbers of a type."""
        dtype = np.dtype(TYPES[kind])
        if operand in self._registers:
            return self._register(operand, dtype)
        if operand in self._special:
            get = self._special[operand]
            return lambda warp: get(warp).astype(dtype)
        constant = np.broadcast_to(self._constant(operand, dtype), 32)
        return lambda warp: constant

    def _register(self, name: str, dtype: Any) -> Get:
        kind = self._registers[name]
        if kind == "pred":
            return lambda warp: warp.registers[name]
        size = np.dtype(storage_of(kind)).itemsize
        if dtype.itemsize == size:
            return lambda warp: warp.registers[name].view(dtype)
        narrow = UNSIGNED[dtype.itemsize]
        return lambda warp: warp.registers[name].astype(narrow).view(dtype)

    def _constant(self, operand: str, dtype: Any) -> Array:
        if operand in self._symbols:
            return np.array([self._symbols[operand]], np.int64).astype(dtype)
        if operand == "WARP_SZ":
            return np.array([32]).astype(dtype)
        if bits := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})", operand):
            single = np.array([int(bits.group(1), 16)], np.uint32).view(np.float32)
            return (
                single if dtype.itemsize == 4 and dtype.kind == "f" else single.view(np.uint32).astype(dtype)
            )
        if bits := re.fullmatch(r"0[dD]([0-9A-Fa-f]{16})", operand):
            return np.array([int(bits.group(1), 16)], np.uint64).view(dtype)
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", operand):
            number = int(operand.rstrip("U"), 0)
            if dtype.kind == "b":
                return np.array([number != 0])
            bits_only = number & ((1 << 8 * dtype.itemsize) - 1)
            return np.array([bits_only], UNSIGNED[dtype.itemsize]).view(dtype)
        raise Fault(f"no operand {operand!r}")

    def setter(self, operand: str) -> Set:
        """Return a writer of a register; of `_`, one that does nothing."""
        if operand == "_":
            return lambda warp, lanes, values: None
        if operand not in self._registers:
            raise Fault(f"no register {operand!r}")
        kind = self._registers[operand]
        if kind == "pred":
            return lambda warp, lanes, values: np.copyto(warp.registers[operand], values, where=lanes)
        storage = np.dtype(storage_of(kind))

        def put(warp: "Warp", lanes: Array, values: Array) -> None:
            if values.dtype.itemsize != storage.itemsize:  # sign or zero extended, or cut
                values = values.astype(f"{'i' if values.dtype.kind == 'i' else 'u'}{storage.itemsize}")
            np.copyto(warp.registers[operand], values.view(storage), where=lanes)

        return put

    def address(self, operand: str) -> Address:
        """Return a reader of an address in brackets."""
        split = re.fullmatch(r"\[\s*([%\w$#.]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if split is None:
            raise Fault(f"no address {operand!r}")
        base, offset = split.group(1), int(split.group(2) or 0)
        is_narrow = base in self._registers and bits_of(self._registers[base]) == 32
        get = self.value(base, "u32" if is_narrow else "s64")
        return lambda warp: get(warp).astype(np.int64) + offset
