"""Copies by cp.async: each lane's own, landing late and in any order."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from jaxpaged.research.ptx import races
from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.memory import Seen
from jaxpaged.research.ptx.program import Instruction
from jaxpaged.research.ptx.registers import LANES, Array

if TYPE_CHECKING:
    from jaxpaged.research.ptx.machine import Machine, Step
    from jaxpaged.research.ptx.warps import Warp

POISON = 0xFF  # NaN in every type: what a copy under way has not brought


@dataclasses.dataclass
class Copy:
    """A copy of some lanes that has not landed everywhere."""

    source: Array
    target: Array
    width: int
    num_read: Array  # bytes that are read; the others become zero
    left: Array  # lanes whose bytes are under way
    group: int


@dataclasses.dataclass
class Arrival:
    """An arrival at a barrier that waits for a lane's copies before it."""

    address: Array
    is_counted: bool  # among the barrier's own
    left: Array
    knowledge: Array


def compile_copy(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of a cp.async instruction that is not of the bulk kind."""
    if "mbarrier" in one.parts:
        return _arrival(machine, one)
    if one.parts[2] == "commit_group":
        return _commit
    if one.parts[2] in ("wait_group", "wait_all"):
        return _wait(machine, one)
    if one.parts[2] not in ("ca", "cg") or any(part.startswith("L2::cache_hint") for part in one.parts):
        raise Fault(f"no instruction {one}")
    to, source = (machine.operands.address(operand) for operand in one.operands[:2])
    width = int(one.operands[2])
    size = machine.operands.value(one.operands[3] if len(one.operands) > 3 else str(width), "u32")

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        target, addresses = to(warp), source(warp)
        machine.check_shared(target[lanes], width, one)
        num_read = np.minimum(size(warp), width).astype(np.int64)
        reading = lanes & (num_read > 0)
        if reading.any():
            machine.memory.find(addresses[reading], width, str(one))
            machine.counts.see_global("cp.async", addresses[reading], width)
        machine.counts.see_shared("cp.async", machine.at, target[lanes], width)
        agent, shadow = warp.agent(races.COPIES_IN), warp.block.shadow
        machine.clocks.follow(agent, warp.agent())
        shadow.write(agent, shadow.cells(target[lanes], width), LANES[lanes], warp.turn)
        warp.block.bytes[target[lanes][:, None] + np.arange(width)] = POISON
        copy = Copy(addresses.copy(), target.copy(), width, num_read, lanes.copy(), warp.num_copy_groups)
        warp.copies.append(copy)

    return step


def _commit(warp: "Warp", lanes: Array, here: Array) -> None:
    warp.num_copy_groups += 1


def _wait(machine: "Machine", one: Instruction) -> "Step":
    keep = int(one.operands[0]) if one.operands else 0
    is_all = one.parts[2] == "wait_all"

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        due = [
            copy
            for copy in warp.copies
            if isinstance(copy, Copy) and (is_all or copy.group < warp.num_copy_groups - keep)
        ]
        for copy in due:
            _land(machine, warp, copy, copy.left & lanes)
        _drop(warp)
        if not any(isinstance(copy, Copy) for copy in warp.copies):
            machine.clocks.learn(warp.agent(), machine.clocks.release(warp.agent(races.COPIES_IN)))

    return step


def _arrival(machine: "Machine", one: Instruction) -> "Step":
    address = machine.operands.address(one.operands[0])
    is_counted = "noinc" in one.parts

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        agent = warp.agent(races.COPIES_IN)
        machine.clocks.follow(agent, warp.agent())
        if not is_counted:
            for at in address(warp)[lanes].tolist():
                warp.block.barrier(at).pending += 1
        warp.copies.append(
            Arrival(address(warp).copy(), is_counted, lanes.copy(), machine.clocks.release(agent))
        )

    return step


def _land(machine: "Machine", warp: "Warp", copy: Copy, lanes: Array) -> None:
    """Complete a copy of these lanes."""
    agent = warp.agent(races.COPIES_IN)
    for size in set(copy.num_read[lanes].tolist()):
        chosen = lanes & (copy.num_read == size)
        data = np.zeros((int(chosen.sum()), copy.width), np.uint8)
        if size:
            data[:, :size] = machine.memory.load(copy.source[chosen], copy.width, "cp.async", Seen(agent))[
                :, :size
            ]
        warp.block.bytes[copy.target[chosen][:, None] + np.arange(copy.width)] = data
    copy.left &= ~lanes


def _drop(warp: "Warp") -> None:
    warp.copies = [each for each in warp.copies if each.left.any()]


def land(machine: "Machine", warp: "Warp", chance: float) -> None:
    """Complete some copies, and the arrivals of lanes whose earlier copies are complete."""
    if not warp.copies:
        return
    under_way, waiting = np.zeros(32, bool), np.zeros(32, bool)
    for each in warp.copies:
        lanes = each.left if chance >= 1 else each.left & (machine.rng.random(32) < chance)
        if isinstance(each, Copy):
            lanes = lanes & ~waiting  # copies after an arrival may land too, but then later
            if lanes.any():
                _land(machine, warp, each, lanes)
            under_way |= each.left
        else:
            lanes = lanes & ~under_way & ~waiting
            for lane in np.nonzero(lanes)[0].tolist():
                warp.block.barrier(int(each.address[lane])).arrive(1, each.knowledge)
            each.left &= ~lanes
            waiting |= each.left
    _drop(warp)
