"""The machine that runs a kernel: all thread blocks of a launch, warp by warp, in an order by a seed."""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpaged.research.ptx import flow, instructions, races
from jaxpaged.research.ptx.counts import Counts
from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.memory import PARAMETERS, Memory
from jaxpaged.research.ptx.program import Instruction, Program
from jaxpaged.research.ptx.registers import LANES, UNSIGNED, Array, Get, Operands
from jaxpaged.research.ptx.tensor_maps import TensorMap
from jaxpaged.research.ptx.warps import Block, Warp

Step = Callable[[Warp, Array, Array], None]  # (warp, lanes that do it, lanes of the warp that are here)
MAP_BYTES = 128
TURN = 60  # a warp runs fewer instructions than this before another does


class Machine:
    """Interpreter of one kernel: its memories, warps and clocks.

    memory: the buffers; arguments: an address, a number or a list of `TensorMap` for each parameter.
    grid: thread blocks in x, y and z.
    shared_bytes: of dynamic shared memory, of each block.
    lateness: the chance that a copy or product under way is not done at a turn. At 0 all is done at once.
    """

    def __init__(
        self,
        program: Program,
        memory: Memory,
        arguments: list[Any],
        *,
        grid: tuple[int, int, int] = (1, 1, 1),
        shared_bytes: int = 0,
        seed: int = 0,
        lateness: float = 0.7,
        finds_races: bool = True,
        max_steps: int = 20_000_000,
    ) -> None:
        self.program, self.memory, self.arguments, self.grid = program, memory, arguments, grid
        self.rng, self.lateness, self.finds_races = np.random.default_rng(seed), lateness, finds_races
        self.max_steps = max_steps
        self.shared_bytes = max(shared_bytes, sum(-(-size // 16) * 16 for size in program.shared.values()))
        self.num_warps = -(-program.num_threads // 32)
        self.counts, self.races = Counts(), collections.Counter[tuple[str, int]]()
        self.at = 0  # the instruction that runs
        self.chosen_lane = int(self.rng.integers(32)) if program.is_asynchronous else 0  # by elect.sync
        self.operands = Operands(program.registers, program.shared, self._special())
        self.meetings = flow.meeting_points(program)
        self.cell = instructions.smallest_access(program)
        self.maps = next((each for each in arguments if isinstance(each, list)), [])
        num_blocks, each = int(np.prod(grid)), races.NUM_KINDS * self.num_warps
        self.clocks = races.Clocks(num_blocks * each)
        if finds_races:
            memory.watch(self.clocks, range(num_blocks * each), self.report)
        self.released: dict[int, Array] = {}  # by address: what atomics have released
        self.steps = [instructions.compile_step(self, one) for one in program.code]
        self.blocks = []
        for number in range(num_blocks):
            x, rest = number % grid[0], number // grid[0]
            agents = range(number * each, number * each + each)
            self.blocks.append(Block(self, (x, rest % grid[1], rest // grid[1]), agents))

    def _special(self) -> dict[str, Get]:
        zeros, ones = np.zeros(32, np.uint32), np.ones(32, np.uint32)
        special: dict[str, Get] = {"%laneid": lambda warp: LANES, "%tid.x": lambda warp: warp.threads}
        special |= {"%tid.y": lambda warp: zeros, "%tid.z": lambda warp: zeros}
        special |= {"%ntid.y": lambda warp: ones, "%ntid.z": lambda warp: ones}
        special["%ntid.x"] = lambda warp: ones * self.program.num_threads
        special["%warpid"] = lambda warp: ones * warp.number
        special["%cluster_ctarank"] = lambda warp: zeros
        for axis, name in enumerate("xyz"):
            special[f"%ctaid.{name}"] = lambda warp, axis=axis: ones * warp.block.index[axis]  # type: ignore[misc]
            special[f"%nctaid.{name}"] = lambda warp, axis=axis: ones * self.grid[axis]  # type: ignore[misc]
            special[f"%cluster_ctaid.{name}"] = lambda warp: zeros
        return special

    def run(self) -> Counts:
        """Run all blocks to their ends. Raises Fault for what PTX forbids, and for a deadlock."""
        live = [warp for block in self.blocks for warp in block.warps]
        idle = 0
        with np.errstate(all="ignore"):
            while live:
                warp = live[self.rng.integers(len(live))]
                has_advanced = self._turn(warp)
                instructions.land(self, warp, 1 - self.lateness)
                if not warp.is_alive.any():
                    live.remove(warp)
                    instructions.finish(self, warp)
                    idle = 0
                    continue
                idle = 0 if has_advanced else idle + 1
                if idle == 50 * len(live):
                    for other in live:
                        instructions.land(self, other, 1.0)
                if idle > 150 * len(live):
                    raise Fault(f"deadlock: {'; '.join(map(self._where, live[:8]))}")
                if self.counts.steps > self.max_steps:
                    raise Fault(f"no end after {self.counts.steps} instructions")
        for block in self.blocks:
            if block.loads:
                raise Fault("a block ends before a tensor copy into it has landed")
        return self.counts

    def _where(self, warp: Warp) -> str:
        at = warp.groups[-1].next
        return f"block {warp.block.index} warp {warp.number} at {at}: {self.program.code[at]}"

    def _turn(self, warp: Warp) -> bool:
        """Run a warp for some instructions. Return whether it got anywhere: polling does not count."""
        if warp.waits_for is not None:
            barrier, phase = warp.waits_for
            if barrier.phase == phase:
                return False
            warp.waits_for = None
        has_advanced = False
        code, executed = self.program.code, self.counts.instructions
        for _ in range(int(self.rng.integers(1, TURN))):
            group = warp.group()
            if group is None:
                return True
            here, at = group.lanes, group.next
            if at >= len(code):
                warp.is_alive[here] = False
                return True
            one, lanes = code[at], here
            if one.guard is not None:
                guard = warp.registers[one.guard]
                lanes = here & (~guard if one.guard_is_negated else guard)
            self.at, group.next, warp.has_polled = at, at + 1, False
            self.counts.steps += 1
            executed[warp.role, one.operation] += 1
            if lanes.any():
                self.steps[at](warp, lanes, here)
            if warp.has_polled:
                return has_advanced
            has_advanced |= not one.operation.startswith("bra")  # a loop around a poll gets nowhere
            if warp.waits_for is not None:
                return True
        return has_advanced

    def report(self, what: str) -> None:
        """Note a race of the instruction that runs."""
        self.races[what, self.at] += 1

    def described_races(self) -> list[str]:
        """Return descriptions of the races, each with its number of occurrences and its instruction."""
        return [f"{what} ({n} times): {self.program.code[at]}" for (what, at), n in self.races.most_common()]

    def random_bits(self, size: int, bits: int) -> Array:
        """Return the random content of registers that were never written."""
        if bits == 1:
            return self.rng.integers(0, 2, size).astype(bool)
        return np.frombuffer(self.rng.bytes(size * bits // 8), UNSIGNED[bits // 8]).copy()

    def no_knowledge(self) -> Array:
        """Return the vector clock of an agent that has met no other."""
        return np.zeros(len(self.clocks.known), np.int32)

    def check_shared(
        self, addresses: Array, width: int, one: Instruction, alignment: int | None = None
    ) -> None:
        """Raise Fault unless accesses of shared memory are inside, and aligned: by default to their width."""
        if (addresses % (alignment or width)).any():
            raise Fault(f"{one}: {int(addresses[0])} must be a multiple of {alignment or width}")
        if (addresses < 0).any() or (addresses + width > self.shared_bytes).any():
            raise Fault(
                f"{one}: {int(addresses.max())} is outside of {self.shared_bytes} bytes of shared memory"
            )

    def map_at(self, address: int) -> TensorMap:
        """Return the tensor map at an address of the parameters."""
        number, rest = divmod(address - PARAMETERS, MAP_BYTES)
        if rest or not 0 <= number < len(self.maps):
            raise Fault(f"no tensor map is at {address:#x}")
        made: TensorMap = self.maps[number]
        return made
