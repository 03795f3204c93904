"""Warps and thread blocks: what each holds while a kernel runs."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpaged.research.ptx import races
from jaxpaged.research.ptx.barriers import MemoryBarrier, NamedBarrier
from jaxpaged.research.ptx.memory import Seen
from jaxpaged.research.ptx.registers import LANES, Array, bits_of

if TYPE_CHECKING:
    from jaxpaged.research.ptx.machine import Machine

WARP_SIZE = 32


@dataclasses.dataclass
class Group:
    """Lanes that run together: where they meet others again, their next instruction, and which they are."""

    meeting: int
    next: int
    lanes: Array


class Warp:
    """32 lanes: registers, the lanes that parted, and what was started and is not done."""

    def __init__(self, block: "Block", number: int) -> None:
        machine = block.machine
        self.block, self.number = block, number
        self.registers = {
            name: machine.random_bits(WARP_SIZE, bits_of(kind))
            for name, kind in machine.program.registers.items()
        }
        self.threads = number * WARP_SIZE + LANES
        self.is_alive = self.threads < machine.program.num_threads
        self.groups = [Group(-1, 0, self.is_alive.copy())]
        self.waits_for: tuple[NamedBarrier, int] | None = None  # and its phase
        self.has_polled = False  # in vain: others may go on
        self.turn = 0  # barriers of the warp so far: what orders its lanes
        self.copies: list[Any] = []  # of cp.async, oldest first
        self.num_copy_groups = 0
        self.stores: list[Any] = []  # bulk copies out of shared memory
        self.store_groups: list[Array] = []  # what each committed group's agents knew
        self.products: list[Any] = []  # of a warpgroup, oldest first
        self.product_groups: list[Array] = []
        self.sums: dict[tuple[str, ...], Any] = {}  # that registers lack until they are waited for
        self.may_multiply = False
        self.acquired: Array | None = None  # by atomics, for the next fence
        self.fenced: Array | None = None  # what a fence lets atomics release

    @property
    def role(self) -> int:
        """Return the number of its warpgroup."""
        return self.number // 4

    def agent(self, kind: int = races.WARP) -> int:
        """Return the number of an agent of this warp."""
        return self.block.agents.start + kind * len(self.block.warps) + self.number

    def seen(self, lanes: Array) -> Seen:
        """Return how the detector sees an access of these lanes, [lanes] numbers."""
        return Seen(self.agent(), lanes=lanes, turn=self.turn)

    def group(self) -> Group | None:
        """Return the lanes that run now; None if all have ended. Those that met are one again."""
        while True:
            top = self.groups[-1]
            top.lanes = top.lanes & self.is_alive
            if len(self.groups) > 1 and (top.next == top.meeting or not top.lanes.any()):
                self.groups.pop()
            else:
                return top if top.lanes.any() else None

    def is_whole(self, lanes: Array) -> bool:
        """Return whether these are all lanes that have not ended."""
        return bool((lanes == self.is_alive).all())


class Block:
    """A thread block: shared memory, which begins random, its barriers and warps."""

    def __init__(self, machine: "Machine", index: tuple[int, int, int], agents: range) -> None:
        self.machine, self.index, self.agents = machine, index, agents
        self.bytes = machine.rng.integers(0, 256, machine.shared_bytes, dtype=np.uint8)
        self.named: dict[int, NamedBarrier] = {}
        self.barriers: dict[int, MemoryBarrier] = {}  # by their address
        self.loads: list[Any] = []  # rows of tensor copies on their way here, in no order
        self.warps: list[Warp] = []
        self.shadow: Any = races.NoShadow()
        if machine.finds_races:
            self.shadow = races.Shadow(
                machine.shared_bytes, machine.cell, machine.clocks, agents, machine.report
            )
        for number in range(machine.num_warps):
            self.warps.append(Warp(self, number))

    def barrier(self, address: int) -> MemoryBarrier:
        """Return the barrier at an address of shared memory."""
        return MemoryBarrier.at(self.barriers, address)
