"""Instructions by their names, what lands late, and what holds for a whole program."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from jaxpaged.research.ptx import (
    accesses,
    arithmetic,
    barriers,
    conversions,
    copies,
    matrices,
    tensor_copies,
    warpgroup_products,
)
from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.flow import ENDS
from jaxpaged.research.ptx.program import Instruction, Program
from jaxpaged.research.ptx.registers import TYPES, Array, names_of
from jaxpaged.research.ptx.warps import Group

if TYPE_CHECKING:
    from jaxpaged.research.ptx.machine import Machine, Step
    from jaxpaged.research.ptx.warps import Warp

LARGEST_CELL = 16


def compile_step(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of an instruction. Raises Fault if it is not known, with its name."""
    try:
        return _compile(machine, one)
    except (KeyError, ValueError, IndexError) as error:
        raise Fault(f"no instruction {one}: {error!r}") from error


def _compile(machine: "Machine", one: Instruction) -> "Step":
    name = one.parts[0]
    if name == "bra":
        return _branch(machine, one)
    if name in ENDS:
        return _end
    if name == "cp":
        return (tensor_copies.compile_bulk if one.parts[2] == "bulk" else copies.compile_copy)(machine, one)
    return COMPILERS.get(name, arithmetic.compile_function)(machine, one)


def _branch(machine: "Machine", one: Instruction) -> "Step":
    code, target = machine.program.code, machine.program.labels[one.operands[0]]

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        top = warp.groups[-1]
        if (lanes == here).all():
            top.next = target
            return
        at = machine.at
        meeting, rest = machine.meetings[at], here & ~lanes
        top.next = meeting if meeting >= 0 else len(code)
        machine.counts.num_divergent += 1
        ways = [(at + 1, rest), (target, lanes.copy())]
        if machine.rng.integers(2):
            ways.reverse()
        warp.groups += [Group(meeting, first, lanes_there) for first, lanes_there in ways if first != meeting]

    return step


def _end(warp: "Warp", lanes: Array, here: Array) -> None:
    warp.is_alive = warp.is_alive & ~lanes
    if warp.products:
        raise Fault("a warp ends before its wgmma is waited for")
    if any(store.data is None for store in warp.stores):
        raise Fault("a warp ends before its bulk store has read shared memory")


def _nothing(machine: "Machine", one: Instruction) -> "Step":
    return lambda warp, lanes, here: None


def _prefetch(machine: "Machine", one: Instruction) -> "Step":
    if "tensormap" not in one.parts:
        return _nothing(machine, one)
    address = machine.operands.address(one.operands[0])

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        machine.map_at(int(address(warp)[lanes][0]))

    return step


Compiler = Callable[["Machine", Instruction], "Step"]
COMPILERS: dict[str, Compiler] = {
    "ld": accesses.compile_load,
    "ldu": accesses.compile_load,
    "st": accesses.compile_store,
    **dict.fromkeys(("atom", "red"), accesses.compile_atomic),
    **dict.fromkeys(("fence", "membar"), accesses.compile_fence),
    **dict.fromkeys(("bar", "barrier"), barriers.compile_named),
    "mbarrier": barriers.compile_memory,
    "cvt": conversions.compile_conversion,
    "setp": arithmetic.compile_comparison,
    **dict.fromkeys(("mov", "cvta"), arithmetic.compile_move),
    "shfl": arithmetic.compile_exchange,
    **dict.fromkeys(("vote", "redux", "activemask"), arithmetic.compile_vote),
    "elect": arithmetic.compile_election,
    "ldmatrix": matrices.compile_load,
    "stmatrix": matrices.compile_store,
    "mma": matrices.compile_product,
    "wgmma": warpgroup_products.compile_warpgroup,
    "prefetch": _prefetch,
    **dict.fromkeys(("setmaxnreg", "nanosleep", "griddepcontrol", "prefetchu", "discard"), _nothing),
}


def land(machine: "Machine", warp: "Warp", chance: float) -> None:
    """Complete some of the asynchronous actions that a warp has started."""
    copies.land(machine, warp, chance)
    tensor_copies.land(machine, warp, chance)
    warpgroup_products.land(machine, warp, chance)


def finish(machine: "Machine", warp: "Warp") -> None:
    """Complete all asynchronous actions of a warp that has ended."""
    while warp.copies or warp.stores:
        copies.land(machine, warp, 1.0)
        while warp.stores:
            tensor_copies.advance(machine, warp, warp.stores[0])


def smallest_access(program: Program) -> int:
    """Return the bytes of the smallest access to shared memory, of which all others are multiples."""
    smallest = LARGEST_CELL
    for one in program.code:
        name, kind = one.parts[0], one.parts[-1]
        if name in ("ld", "st") and accesses.space_of(one) in ("shared", "generic") and kind in TYPES:
            names = one.operands[0 if name == "ld" else 1]
            smallest = min(smallest, np.dtype(TYPES[kind]).itemsize * len(names_of(names)))
        if name == "mbarrier":
            smallest = min(smallest, 8)
        if name == "cp" and (size := re.search(r", (\d+)$", str(one))) and one.parts[2] in ("ca", "cg"):
            smallest = min(smallest, int(size.group(1)))
        if name == "wgmma" and any(part in ("e4m3", "e5m2", "s8", "u8") for part in one.parts):
            smallest = min(smallest, 1)
        elif name == "wgmma" and one.parts[1] == "mma_async":
            smallest = min(smallest, 2)
    return smallest
