"""Matrix instructions of one warp: ldmatrix, stmatrix, mma.sync."""

import re
from typing import TYPE_CHECKING

import numpy as np

from jaxpaged.research.ptx import fragments
from jaxpaged.research.ptx.accesses import write_shared
from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.program import Instruction
from jaxpaged.research.ptx.registers import Array, names_of

if TYPE_CHECKING:
    from jaxpaged.research.ptx.machine import Machine, Step
    from jaxpaged.research.ptx.warps import Warp

# k of an instruction m16n8 -> registers of A and B, by bytes of an element
SHAPES = {(16, 2): (4, 2), (8, 2): (2, 1), (32, 1): (4, 2), (16, 1): (2, 1)}


def need_whole_warp(lanes: Array, one: Instruction) -> None:
    """Raise Fault where lanes of a warp are missing."""
    if not lanes.all():
        raise Fault(f"{one} by part of a warp: lanes {np.nonzero(lanes)[0].tolist()}")


def compile_load(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of ldmatrix: 8 rows of 16 bytes for each register, at the addresses of 8 lanes."""
    _check_tiles(one)
    puts = [machine.operands.setter(name) for name in names_of(one.operands[0])]
    address, is_transposed = machine.operands.address(one.operands[1]), "trans" in one.parts

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        need_whole_warp(lanes, one)
        rows = address(warp)[: 8 * len(puts)]
        machine.check_shared(rows, 16, one)
        shadow = warp.block.shadow
        shadow.read(warp.agent(), shadow.cells(rows, 16), np.full(len(rows), -2, np.int8), warp.turn)
        for n, put in enumerate(puts):
            at = rows[8 * n : 8 * n + 8]
            machine.counts.see_shared("ldmatrix", machine.at, at, 16)
            tile = np.ascontiguousarray(warp.block.bytes[at[:, None] + np.arange(16)]).view(np.uint16)
            put(warp, lanes, fragments.register_of(tile.T if is_transposed else tile))

    return step


def compile_store(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of stmatrix, the reverse of ldmatrix."""
    _check_tiles(one)
    address, is_transposed = machine.operands.address(one.operands[0]), "trans" in one.parts
    gets = [machine.operands.value(name, "b32") for name in names_of(one.operands[1])]

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        need_whole_warp(lanes, one)
        rows = address(warp)[: 8 * len(gets)]
        machine.check_shared(rows, 16, one)
        for n, get in enumerate(gets):
            at, tile = rows[8 * n : 8 * n + 8], fragments.tile_of(get(warp))
            machine.counts.see_shared("stmatrix", machine.at, at, 16)
            data = np.ascontiguousarray(tile.T if is_transposed else tile).view(np.uint8)
            write_shared(machine, warp, at, data, np.full(8, -2, np.int8))

    return step


def _check_tiles(one: Instruction) -> None:
    if "m8n8" not in one.parts or one.parts[-1] != "b16":
        raise Fault(f"no instruction {one}")


def compile_product(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of mma.sync.m16n8: sums in float64, rounded once an instruction; exact for integers."""
    shape = re.search(r"m16n8k(\d+)", one.operation)
    kinds = one.parts[-4:]
    result, left, right, added = kinds
    is_integer = result == "s32"
    if (
        shape is None
        or "row" not in one.parts
        or "col" not in one.parts
        or result != added
        or "satfinite" in one.parts
    ):
        raise Fault(f"no instruction {one}")
    size = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}.get(left)
    numbers = SHAPES.get((int(shape.group(1)), size or 0))
    if numbers is None or result not in ("f32", "s32"):
        raise Fault(f"no instruction {one}")
    names = [names_of(operand) for operand in one.operands]
    if [len(each) for each in names] != [4, *numbers, 4]:
        raise Fault(f"{one} must have {numbers[0]} and {numbers[1]} registers of A and B")
    puts = [machine.operands.setter(name) for name in names[0]]
    a, b, c = (
        [machine.operands.value(name, kind) for name in each]
        for each, kind in zip(names[1:], ("b32", "b32", result), strict=True)
    )

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        need_whole_warp(lanes, one)
        rows = fragments.left_operand([get(warp) for get in a], left).astype(np.float64)
        columns = fragments.right_operand([get(warp) for get in b], right).astype(np.float64)
        product = rows @ columns
        sums = [fragments.accumulator(product, n) + get(warp) for n, get in enumerate(c)]
        for put, total in zip(puts, sums, strict=True):
            put(
                warp,
                lanes,
                total.astype(np.int64).astype(np.int32) if is_integer else total.astype(np.float32),
            )

    return step
