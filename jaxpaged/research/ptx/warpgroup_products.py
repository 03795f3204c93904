"""wgmma: products of a warpgroup, of tiles in shared memory, done late, and in registers once waited for."""

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from jaxpaged.research.ptx import fragments, races, rounding
from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.matrices import need_whole_warp
from jaxpaged.research.ptx.program import Instruction
from jaxpaged.research.ptx.registers import Array, Set, names_of
from jaxpaged.research.ptx.tensor_maps import swizzled

if TYPE_CHECKING:
    from jaxpaged.research.ptx.machine import Machine, Step
    from jaxpaged.research.ptx.warps import Warp

LINES = {1: 128, 2: 64, 3: 32}  # a descriptor's swizzle -> bytes of a line
INVERTED = {"1": 1, "-1": -1}


@dataclasses.dataclass
class Sums:
    """Accumulators that registers lack until they are waited for."""

    setters: list[Set]
    values: list[Array]
    group: int


@dataclasses.dataclass
class Product:
    """A product that is not done: the warp's 16 rows, and the columns."""

    names: tuple[str, ...]
    rows: Callable[[], Array]
    columns: Callable[[], Array]
    is_added: bool
    group: int
    is_integer: bool


def compile_warpgroup(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of a wgmma instruction."""
    kind = one.parts[1]
    if kind == "fence":
        return _fence
    if kind == "commit_group":
        return lambda warp, lanes, here: _commit(machine, warp)
    if kind == "wait_group":
        return _wait(machine, one)
    if kind != "mma_async" or "sp" in one.parts:
        raise Fault(f"no instruction {one}")
    return _product(machine, one)


def _fence(warp: "Warp", lanes: Array, here: Array) -> None:
    warp.may_multiply = True


def _commit(machine: "Machine", warp: "Warp") -> None:
    warp.product_groups.append(machine.clocks.release(warp.agent(races.PRODUCTS)))


def _wait(machine: "Machine", one: Instruction) -> "Step":
    keep = int(one.operands[0])

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        num_done = len(warp.product_groups) - keep
        while warp.products and warp.products[0].group < num_done:
            advance(warp)
        for names, sums in list(warp.sums.items()):
            if sums.group < num_done:
                for put, values in zip(sums.setters, sums.values, strict=True):
                    put(warp, lanes, values)
                del warp.sums[names]
        if num_done > 0:
            machine.clocks.learn(warp.agent(), warp.product_groups[num_done - 1])
        warp.may_multiply = bool(warp.sums)

    return step


def advance(warp: "Warp") -> None:
    """Do a warp's oldest product."""
    product = warp.products.pop(0)
    matrix = product.rows().astype(np.float64) @ product.columns().astype(np.float64)
    values = warp.sums[product.names].values
    for n in range(len(values)):
        total = fragments.accumulator(matrix, n) + (values[n] if product.is_added else 0)
        values[n] = (
            total.astype(np.int64).astype(np.int32) if product.is_integer else total.astype(np.float32)
        )


def land(machine: "Machine", warp: "Warp", chance: float) -> None:
    """Let some products be done, in their order."""
    while warp.products and (chance >= 1 or machine.rng.random() < chance):
        advance(warp)


def _product(machine: "Machine", one: Instruction) -> "Step":
    shape = re.search(r"m64n(\d+)k(\d+)", one.operation)
    result, left, right = one.parts[5:8]
    if (
        shape is None
        or result not in ("f32", "s32")
        or left not in rounding.BYTES
        or right not in rounding.BYTES
    ):
        raise Fault(f"no instruction {one}")
    num_columns, depth = int(shape.group(1)), int(shape.group(2))
    size = rounding.BYTES[left]
    if depth * size != 32 or rounding.BYTES[right] != size:
        raise Fault(f"no instruction {one}")
    names = tuple(names_of(one.operands[0]))
    if len(names) != num_columns // 2:
        raise Fault(f"{one} must have {num_columns // 2} registers of sums")
    setters = [machine.operands.setter(name) for name in names]
    olds = [machine.operands.value(name, result) for name in names]
    in_registers = one.operands[1].startswith("{")
    is_added = machine.operands.value(one.operands[3], "pred")
    flags = one.operands[4:]
    signs = [INVERTED[flag] for flag in flags[:2]] if result == "f32" else [1, 1]
    transposed = [flag == "1" for flag in flags[2:]] if size == 2 else []
    transposed = [False] * (2 - len(transposed)) + transposed
    registers = [machine.operands.value(x, "b32") for x in names_of(one.operands[1])] if in_registers else []
    descriptors = [
        machine.operands.value(x, "u64")
        for x in one.operands[0 if in_registers else 1 : 3][-(1 if in_registers else 2) :]
    ]
    poison = np.full(32, np.nan, np.float32) if result == "f32" else np.full(32, -0x55555556, np.int32)

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        need_whole_warp(lanes, one)
        agent, shadow, group = warp.agent(races.PRODUCTS), warp.block.shadow, len(warp.product_groups)
        machine.clocks.follow(agent, warp.agent())
        if names not in warp.sums:
            if not warp.may_multiply:
                raise Fault(f"{one} without wgmma.fence since the last wait")
            used = {name for other in warp.sums for name in other}
            if used & set(names):
                raise Fault(f"{one}: registers of another product that is not done")
            warp.sums[names] = Sums(setters, [get(warp).copy() for get in olds], group)
            for put in setters:
                put(warp, lanes, poison)
        warp.sums[names].group = group

        def operand(
            number: int, first: int, count: int, kind: str, sign: int, is_transposed: bool
        ) -> Callable[[], Array]:
            descriptor = int(descriptors[number](warp)[0])
            at = element_addresses(descriptor, first, count, depth, size, is_transposed)
            if (at < 0).any() or (at + size > machine.shared_bytes).any():
                raise Fault(f"{one}: an operand is outside of shared memory")
            cells = shadow.cells(at.reshape(-1), size)
            shadow.check_fenced(cells)
            shadow.read(agent, cells)
            everywhere = at[..., None] + np.arange(size)

            def read() -> Array:
                data = np.ascontiguousarray(warp.block.bytes[everywhere])
                return sign * rounding.numbers(data.reshape(-1), kind).reshape(at.shape)

            return read

        if in_registers:
            given = [get(warp).copy() for get in registers]

            def rows() -> Array:
                if any((get(warp) != value).any() for get, value in zip(registers, given, strict=True)):
                    raise Fault(f"{one}: registers of A were written before the product was waited for")
                return signs[0] * fragments.left_operand(given, left)

        else:
            rows = operand(0, 16 * (warp.number % 4), 16, left, signs[0], transposed[0])
        columns = operand(len(descriptors) - 1, 0, num_columns, right, signs[1], transposed[1])
        is_plus = bool(is_added(warp)[0])
        warp.products.append(Product(names, rows, lambda: columns().T, is_plus, group, result == "s32"))

    return step


def element_addresses(
    descriptor: int, first: int, count: int, depth: int, size: int, is_transposed: bool
) -> Array:
    """Return where an operand's elements begin: rows of A or columns of B from `first` on, [count, depth].

    A descriptor's bits: 0 to 13 address / 16, 16 to 29 leading and 32 to 45 stride offset / 16, 49 to 51 base
    offset, 62 and 63 the swizzle.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise Fault("a wgmma operand with a base offset")
    mode = descriptor >> 62
    across, along = np.arange(first, first + count)[:, None], np.arange(depth)[None, :]
    if mode == 0:  # core matrices of 8 lines of 16 bytes, 128 bytes each
        line, unit = (along, across) if is_transposed else (across, along)
        per = 16 // size
        if is_transposed:
            return start + unit // per * stride + line // 8 * leading + line % 8 * 16 + unit % per * size
        return start + line // 8 * stride + unit // per * leading + line % 8 * 16 + unit % per * size
    width = LINES[mode]
    if is_transposed:  # lines are along the rows or columns
        per = width // size
        at = start + across // per * leading + along // 8 * stride + along % 8 * width + across % per * size
    else:
        at = start + across // 8 * stride + across % 8 * width + along * size
    return swizzled(at, width)
