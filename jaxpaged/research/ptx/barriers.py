"""Barriers: those of a thread block that have numbers, and those in shared memory, of arrivals and bytes."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.program import Instruction
from jaxpaged.research.ptx.registers import Array

if TYPE_CHECKING:
    from jaxpaged.research.ptx.machine import Machine, Step
    from jaxpaged.research.ptx.warps import Warp


@dataclasses.dataclass
class NamedBarrier:
    """A barrier by number: threads that have come, and the warps that wait."""

    threads: int = 0
    phase: int = 0
    warps: "list[Warp]" = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class MemoryBarrier:
    """An mbarrier: arrivals of a phase, arrivals and bytes that are to come, phases that are over.

    Who arrives gives what it knows to those that wait for this phase.
    """

    arrivals: int
    pending: int
    knowledge: Array  # of those that have arrived in this phase
    num_bytes: int = 0
    phase: int = 0
    released: Array | None = None  # of the phase before

    @staticmethod
    def at(barriers: "dict[int, MemoryBarrier]", address: int) -> "MemoryBarrier":
        """Return the barrier at an address."""
        if address not in barriers:
            raise Fault(f"no barrier is at {address} of shared memory")
        return barriers[address]

    def arrive(self, count: int, knowledge: Array | None = None) -> None:
        """Count arrivals; the phase ends with the last of them and of its bytes."""
        if knowledge is not None:
            np.maximum(self.knowledge, knowledge, out=self.knowledge)
        self.pending -= count
        if self.pending < 0:
            raise Fault(f"more arrivals at a barrier than its {self.arrivals}")
        self.end_if_complete()

    def complete(self, num_bytes: int, knowledge: Array) -> None:
        """Count bytes that a copy has brought."""
        np.maximum(self.knowledge, knowledge, out=self.knowledge)
        self.num_bytes -= num_bytes
        self.end_if_complete()

    def end_if_complete(self) -> None:
        """End the barrier's phase if no arrivals and no bytes are missing."""
        if self.pending == 0 and self.num_bytes == 0:
            self.pending = self.arrivals
            self.phase += 1
            self.released, self.knowledge = self.knowledge, np.zeros_like(self.knowledge)


def compile_named(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of bar.sync, bar.arrive and bar.warp.sync."""
    if one.operation in ("bar.warp.sync",):
        return _warp_barrier(machine, one)
    kind = next((part for part in one.parts if part in ("sync", "arrive")), None)
    if kind is None:
        raise Fault(f"no instruction {one}")
    number = machine.operands.value(one.operands[0], "u32")
    whole = -(-machine.program.num_threads // 32) * 32
    count = machine.operands.value(one.operands[1] if len(one.operands) > 1 else str(whole), "u32")

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        if not warp.is_whole(lanes):
            raise Fault(f"{one} by lanes {np.nonzero(lanes)[0].tolist()} alone")
        barrier = warp.block.named.setdefault(int(number(warp)[0]), NamedBarrier())
        needed = int(count(warp)[0])
        barrier.threads += 32
        barrier.warps.append(warp)
        warp.turn += 1
        if barrier.threads > needed:
            raise Fault(f"{one}: {barrier.threads} threads came where {needed} should")
        if barrier.threads == needed:
            machine.clocks.meet([other.agent() for other in barrier.warps])
            for other in barrier.warps:
                other.turn += 1
            barrier.threads, barrier.warps = 0, []
            barrier.phase += 1
        elif kind == "sync":
            warp.waits_for = barrier, barrier.phase

    return step


def _warp_barrier(machine: "Machine", one: Instruction) -> "Step":
    mask = machine.operands.value(one.operands[0], "u32")

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        named = (mask(warp)[lanes][0] >> np.arange(32)) & 1 != 0
        if not (lanes == (named & warp.is_alive)).all():
            raise Fault(f"{one} by other lanes than it names")
        warp.turn += 1

    return step


def compile_memory(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of an mbarrier instruction."""
    kind = one.parts[1]
    made = {"init": _init, "inval": _invalidate, "arrive": _arrive, "expect_tx": _expect}
    made |= {"test_wait": _test, "try_wait": _test}
    if kind not in made:
        raise Fault(f"no instruction {one}")
    return made[kind](machine, one)


def _init(machine: "Machine", one: Instruction) -> "Step":
    address, count = machine.operands.address(one.operands[0]), machine.operands.value(one.operands[1], "u32")

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        shadow = warp.block.shadow
        for at, arrivals in zip(address(warp)[lanes].tolist(), count(warp)[lanes].tolist(), strict=True):
            machine.check_shared(np.array([at]), 8, one)
            shadow.write(warp.agent(), shadow.cells(np.array([at]), 8))
            warp.block.barriers[at] = MemoryBarrier(arrivals, arrivals, machine.no_knowledge())

    return step


def _invalidate(machine: "Machine", one: Instruction) -> "Step":
    address = machine.operands.address(one.operands[0])

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        for at in set(address(warp)[lanes].tolist()):
            warp.block.barrier(at)
            del warp.block.barriers[at]

    return step


def _arrive(machine: "Machine", one: Instruction) -> "Step":
    parts, operands = one.parts, one.operands
    address = machine.operands.address(operands[1])
    number = machine.operands.value(operands[2] if len(operands) > 2 else "1", "u32")
    set_state = machine.operands.setter(operands[0])
    is_relaxed = "relaxed" in parts

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        agent, shadow = warp.agent(), warp.block.shadow
        knowledge = None if is_relaxed else machine.clocks.release(agent)
        addresses = address(warp)
        state = np.zeros(32, np.uint64)
        for lane in np.nonzero(lanes)[0].tolist():
            at = int(addresses[lane])
            barrier, count = warp.block.barrier(at), int(number(warp)[lane])
            shadow.synchronise(agent, shadow.cells(np.array([at]), 8))
            if "expect_tx" in parts:
                barrier.num_bytes += count
                count = 1
            if "noComplete" in parts and barrier.pending <= count:
                raise Fault(f"{one} ends a phase")
            state[lane] = barrier.phase
            barrier.arrive(count, knowledge)
        set_state(warp, lanes, state)

    return step


def _expect(machine: "Machine", one: Instruction) -> "Step":
    address, number = (
        machine.operands.address(one.operands[0]),
        machine.operands.value(one.operands[1], "u32"),
    )

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        for at, count in zip(address(warp)[lanes].tolist(), number(warp)[lanes].tolist(), strict=True):
            warp.block.barrier(at).num_bytes += count

    return step


def _test(machine: "Machine", one: Instruction) -> "Step":
    """Return a poll: whether the phase of that parity is over, or the phase that a state names."""
    operands: Any = machine.operands
    put, address = operands.setter(one.operands[0]), operands.address(one.operands[1])
    has_parity = "parity" in one.parts
    which = operands.value(one.operands[2], "u32" if has_parity else "u64")

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        addresses, wanted = address(warp), which(warp)
        done = np.zeros(32, bool)
        agent, shadow = warp.agent(), warp.block.shadow
        for lane in np.nonzero(lanes)[0].tolist():
            at = int(addresses[lane])
            barrier = warp.block.barrier(at)
            if has_parity:
                done[lane] = barrier.phase % 2 != int(wanted[lane]) % 2
            else:
                done[lane] = barrier.phase > int(wanted[lane])
        for at in set(addresses[lanes].tolist()):
            shadow.synchronise(agent, shadow.cells(np.array([at]), 8))
            released = warp.block.barrier(at).released
            if released is not None and done[lanes & (addresses == at)].all():
                machine.clocks.learn(agent, released)
        put(warp, lanes, done)
        warp.has_polled = not done[lanes].all()

    return step
