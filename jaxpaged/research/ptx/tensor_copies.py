"""Bulk copies: tensors into shared memory, landing line by line, and out of it, read and written late."""

import dataclasses
import re
from typing import TYPE_CHECKING

import numpy as np

from jaxpaged.research.ptx import races
from jaxpaged.research.ptx.copies import POISON
from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.memory import Seen
from jaxpaged.research.ptx.program import Instruction
from jaxpaged.research.ptx.registers import Array
from jaxpaged.research.ptx.tensor_maps import TensorMap

if TYPE_CHECKING:
    from jaxpaged.research.ptx.machine import Machine, Step
    from jaxpaged.research.ptx.warps import Block, Warp


@dataclasses.dataclass
class Line:
    """One line of a box that is being copied into shared memory."""

    at: Array
    addresses: Array
    inside: Array
    barrier: int
    agent: int
    knowledge: Array


@dataclasses.dataclass
class Store:
    """A copy out of shared memory: its bytes, once they are read."""

    at: Array
    addresses: Array
    group: int
    data: Array | None = None


def compile_bulk(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of a cp.async.bulk instruction."""
    kind = one.parts[3]
    if kind == "commit_group":
        return lambda warp, lanes, here: _commit(machine, warp)
    if kind == "wait_group":
        return _wait(machine, one)
    if any("multicast" in part or "cta_group" in part or "im2col" in part for part in one.parts):
        raise Fault(f"no instruction {one}")
    if kind == "tensor":
        return _tensor(machine, one)
    spaces = [part for part in one.parts if part.startswith(("global", "shared"))]
    if spaces == ["global", "shared::cta"]:
        return _store(machine, one)
    if spaces[1] == "global" and "mbarrier::complete_tx::bytes" in one.operation:
        return _load(machine, one)
    raise Fault(f"no instruction {one}")


def _tensor(machine: "Machine", one: Instruction) -> "Step":
    is_load = one.parts[5].startswith("shared")
    where = one.operands[1] if is_load else one.operands[0]
    split = re.fullmatch(r"\[\s*(\S+?)\s*,\s*\{(.*)\}\s*\]", where)
    if split is None or "reduce" in one.parts:
        raise Fault(f"no instruction {one}")
    which = machine.operands.value(split.group(1), "u64")
    coordinates = [machine.operands.value(x.strip(), "s32") for x in split.group(2).split(",")]
    if one.parts[4] != f"{len(coordinates)}d":
        raise Fault(f"{one} must have as many coordinates as it says")
    shared = machine.operands.address(one.operands[0] if is_load else one.operands[1])
    barrier = machine.operands.address(one.operands[2]) if is_load else None

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        for lane in np.nonzero(lanes)[0].tolist():
            tensor = machine.map_at(int(which(warp)[lane]))
            start = [int(get(warp)[lane]) for get in reversed(coordinates)]
            if len(start) != len(tensor.box):
                raise Fault(f"{one} of a tensor map of {len(tensor.box)} dimensions")
            at = int(shared(warp)[lane])
            machine.check_shared(np.array([at]), tensor.num_bytes, one, 128)
            lines = list(tensor.lines(start, at))
            if barrier is not None:
                _start_load(machine, warp, lines, int(barrier(warp)[lane]), one)
            else:
                at_all, addresses_all = (
                    np.concatenate([each[n][each[2]] for each in lines]) for n in range(2)
                )
                _start_store(machine, warp, at_all, addresses_all, one)

    return step


def _load(machine: "Machine", one: Instruction) -> "Step":
    shared, source, barrier = (machine.operands.address(one.operands[n]) for n in (0, 1, 3))
    size = machine.operands.value(one.operands[2], "u32")

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        for lane in np.nonzero(lanes)[0].tolist():
            to, at, count = int(shared(warp)[lane]), int(source(warp)[lane]), int(size(warp)[lane])
            _check_bulk(machine, to, at, count, one)
            line = to + np.arange(count), at + np.arange(count), np.ones(count, bool)
            _start_load(machine, warp, [line], int(barrier(warp)[lane]), one)

    return step


def _store(machine: "Machine", one: Instruction) -> "Step":
    target, shared = (machine.operands.address(one.operands[n]) for n in (0, 1))
    size = machine.operands.value(one.operands[2], "u32")

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        for lane in np.nonzero(lanes)[0].tolist():
            to, at, count = int(target(warp)[lane]), int(shared(warp)[lane]), int(size(warp)[lane])
            if count:
                _check_bulk(machine, at, to, count, one)
                _start_store(machine, warp, at + np.arange(count), to + np.arange(count), one)

    return step


def _check_bulk(machine: "Machine", shared: int, address: int, count: int, one: Instruction) -> None:
    if address % 16 or count % 16:
        raise Fault(f"{one}: {address=:#x} and {count=} must be multiples of 16")
    machine.check_shared(np.array([shared]), count, one, 16)


def _start_load(
    machine: "Machine", warp: "Warp", lines: list[tuple[Array, Array, Array]], barrier: int, one: Instruction
) -> None:
    block, agent = warp.block, warp.agent(races.COPIES_IN)
    block.barrier(barrier)
    shadow = block.shadow
    machine.clocks.follow(agent, warp.agent())
    word = shadow.cells(np.array([barrier]), 8)
    shadow.synchronise(agent, word)
    shadow.check_fenced(word)
    everything = np.concatenate([at for at, _, _ in lines])
    shadow.write(agent, shadow.cells(everything[:: shadow.cell], 1), is_generic=False)
    block.bytes[everything] = POISON
    knowledge = machine.clocks.release(agent)
    for at, addresses, inside in lines:
        if inside.any():
            machine.counts.see_global("tensor copies", addresses[inside])
            machine.memory.find(addresses[inside], 1, str(one))
        block.loads.append(Line(at, addresses, inside, barrier, agent, knowledge))


def _start_store(machine: "Machine", warp: "Warp", at: Array, addresses: Array, one: Instruction) -> None:
    agent, shadow = warp.agent(races.COPIES_OUT), warp.block.shadow
    machine.memory.find(addresses, 1, str(one))
    machine.counts.see_global("bulk stores", addresses)
    machine.clocks.follow(agent, warp.agent())
    machine.clocks.follow(warp.agent(races.STORES_OUT), warp.agent())
    cells = shadow.cells(at[:: shadow.cell], 1)
    shadow.check_fenced(cells)
    shadow.read(agent, cells)
    seen = Seen(warp.agent(races.STORES_OUT), is_generic=False)
    for buffer, which, offsets in machine.memory.find(addresses, 1, str(one)):
        if buffer.shadow is not None:
            seen.write(buffer.shadow, which, buffer.shadow.cells(offsets, 1))
    warp.stores.append(Store(at, addresses, len(warp.store_groups)))


def _commit(machine: "Machine", warp: "Warp") -> None:
    kinds = (races.COPIES_OUT, races.STORES_OUT)
    warp.store_groups.append(np.stack([machine.clocks.release(warp.agent(kind)) for kind in kinds]))


def _wait(machine: "Machine", one: Instruction) -> "Step":
    keep, only_reads = int(one.operands[0]), "read" in one.parts

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        num_done = len(warp.store_groups) - keep
        for store in list(warp.stores):
            if store.group < num_done:
                if store.data is None:
                    advance(machine, warp, store)
                if not only_reads:
                    advance(machine, warp, store)
        if num_done > 0:
            reads, writes = warp.store_groups[num_done - 1]
            machine.clocks.learn(warp.agent(), reads if only_reads else np.maximum(reads, writes))

    return step


def advance(machine: "Machine", warp: "Warp", store: Store) -> None:
    """Read a store's bytes, or write them if they have been read."""
    if store.data is None:
        store.data = warp.block.bytes[store.at].copy()
    else:
        machine.memory.store(store.addresses, store.data[:, None], "a bulk store")
        warp.stores.remove(store)


def land(machine: "Machine", warp: "Warp", chance: float) -> None:
    """Complete some lines of the block's loads, in any order, and advance the warp's stores."""
    block, rng = warp.block, machine.rng
    for _ in range(len(block.loads) if chance >= 1 else min(8, len(block.loads))):
        if chance < 1 and rng.random() >= chance:
            break
        land_line(machine, block, block.loads.pop(int(rng.integers(len(block.loads)))))
    while warp.stores and (chance >= 1 or rng.random() < chance):
        advance(machine, warp, warp.stores[int(rng.integers(len(warp.stores)))])


def land_line(machine: "Machine", block: "Block", line: Line) -> None:
    """Write a line, zeros where it is outside of the tensor, and count its bytes."""
    data = np.zeros(len(line.at), np.uint8)
    if line.inside.any():
        seen = Seen(line.agent, is_generic=False)
        data[line.inside] = machine.memory.load(line.addresses[line.inside], 1, "a tensor copy", seen)[:, 0]
    block.bytes[line.at] = data
    block.barrier(line.barrier).complete(len(line.at), line.knowledge)


__all__ = ["TensorMap", "compile_bulk", "land"]
