"""Loads and stores of lanes, atomics, and fences."""

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.memory import BASE
from jaxpaged.research.ptx.program import Instruction
from jaxpaged.research.ptx.registers import LANES, TYPES, Array, names_of

if TYPE_CHECKING:
    from jaxpaged.research.ptx.machine import Machine, Step
    from jaxpaged.research.ptx.warps import Warp

WIDE_SCOPES = ("gpu", "sys", "cluster")


def space_of(one: Instruction) -> str:
    """Return the space that an instruction names, or "generic"."""
    names = [part.split("::")[0] for part in one.parts]
    return next(
        (name for name in names if name in ("global", "shared", "param", "const", "local")), "generic"
    )


def compile_parameter(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of ld.param."""
    name, _, offset = one.operands[1].strip("[]").partition("+")
    number = machine.program.parameters.index(name)
    value = machine.arguments[number]
    if offset or isinstance(value, list):
        raise Fault(f"no instruction {one}: the parameter is of bytes")
    size = np.dtype(TYPES[one.parts[-1]]).itemsize
    put, full = machine.operands.setter(one.operands[0]), np.full(32, value, f"u{size}")
    return lambda warp, lanes, here: put(warp, lanes, full)


def compile_load(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of a load; in the generic space each lane's address decides the memory."""
    space = space_of(one)
    if space == "param":
        return compile_parameter(machine, one)
    width = np.dtype(TYPES[one.parts[-1]]).itemsize
    puts = [machine.operands.setter(name) for name in names_of(one.operands[0])]
    address, total = machine.operands.address(one.operands[1]), width * len(puts)
    is_strong = any(part in ("acquire", "relaxed", "volatile") for part in one.parts)

    def load(warp: "Warp", at: Array, lanes: Array, is_global: bool) -> Array:
        if is_global:
            machine.counts.see_global("ld", at, total)
            if is_strong:
                return atomic_access(machine, warp, at, total, one, None)
            return machine.memory.load(at, total, str(one), warp.seen(lanes))
        machine.check_shared(at, total, one)
        machine.counts.see_shared("ld", machine.at, at, total)
        shadow = warp.block.shadow
        shadow.read(warp.agent(), shadow.cells(at, total), lanes, warp.turn)
        return warp.block.bytes[at[:, None] + np.arange(total)]

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        data = np.zeros((32, total), np.uint8)
        addresses = address(warp)
        for is_global in (True, False):
            chosen = lanes & (
                is_global == (_is_global(addresses) if space == "generic" else space == "global")
            )
            if chosen.any():
                data[chosen] = load(warp, addresses[chosen], LANES[chosen], is_global)
        for n, put in enumerate(puts):
            column = np.ascontiguousarray(data[:, n * width : n * width + width])
            put(warp, lanes, column.view(TYPES[one.parts[-1]])[:, 0])

    return step


def _is_global(addresses: Array) -> Array:
    result: Array = addresses >= BASE
    return result


def compile_store(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of a store."""
    space, kind = space_of(one), one.parts[-1]
    width = np.dtype(TYPES[kind]).itemsize
    gets = [machine.operands.value(name, kind) for name in names_of(one.operands[1])]
    address, total = machine.operands.address(one.operands[0]), width * len(gets)
    is_strong = any(part in ("release", "relaxed", "volatile") for part in one.parts)

    def store(warp: "Warp", at: Array, data: Array, lanes: Array, is_global: bool) -> None:
        if is_global:
            machine.counts.see_global("st", at, total)
            if is_strong:
                atomic_access(machine, warp, at, total, one, data)
            else:
                machine.memory.store(at, data, str(one), warp.seen(lanes))
            return
        machine.check_shared(at, total, one)
        machine.counts.see_shared("st", machine.at, at, total)
        write_shared(machine, warp, at, data, lanes)

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        addresses = address(warp)
        data = (
            np.stack([np.ascontiguousarray(get(warp)) for get in gets], 1).view(np.uint8).reshape(32, total)
        )
        for is_global in (True, False):
            chosen = lanes & (
                is_global == (_is_global(addresses) if space == "generic" else space == "global")
            )
            if chosen.any():
                store(warp, addresses[chosen], data[chosen], LANES[chosen], is_global)

    return step


def write_shared(machine: "Machine", warp: "Warp", at: Array, data: Array, lanes: Array | None) -> None:
    """Write [accesses, width] bytes by the generic proxy. Lanes that meet must write the same."""
    shadow, where = warp.block.shadow, at[:, None] + np.arange(data.shape[1])
    is_same = bool((warp.block.bytes[where] == data).all())
    shadow.write(warp.agent(), shadow.cells(at, data.shape[1]), lanes, warp.turn, is_same=is_same)
    warp.block.bytes[where] = data
    if (warp.block.bytes[where] != data).any():
        machine.report("lanes of one store write different bytes to one address")


# ------------------------------------------------------------------ order between thread blocks


def compile_fence(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of a fence.

    A fence of the GPU's scope, and an atomic after it, release what the warp knows. What atomics before it
    have read, it acquires. A proxy fence lets writes reach the asynchronous proxy.
    """
    parts = one.parts
    if parts[:2] == ["fence", "proxy"]:
        return _proxy_fence(machine, one)
    is_wide = parts[0] == "membar" and parts[1] in ("gl", "sys")
    is_wide |= parts[0] == "fence" and any(scope in parts for scope in WIDE_SCOPES)
    if parts[1] == "mbarrier_init":
        return _proxy_fence(machine, one)

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        if is_wide:
            if warp.acquired is not None:
                machine.clocks.learn(warp.agent(), warp.acquired)
            warp.fenced = machine.clocks.release(warp.agent())

    return step


def _proxy_fence(machine: "Machine", one: Instruction) -> "Step":
    is_shared = any(part.startswith("shared") for part in one.parts) or one.parts[1] == "mbarrier_init"
    is_global = "global" in one.parts
    if one.parts[1] == "proxy" and one.parts[2] not in ("async", "alias", "tensormap::generic"):
        raise Fault(f"no instruction {one}")

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        if not is_global:
            warp.block.shadow.fence(warp.agent())
        if not is_shared:
            for buffer in machine.memory.buffers:
                if buffer.shadow is not None:
                    buffer.shadow.fence(warp.agent())

    return step


def atomic_access(
    machine: "Machine", warp: "Warp", at: Array, width: int, one: Instruction, data: Array | None
) -> Array:
    """Do a strong load, or a strong store of data; return the bytes that were there.

    By its order it releases what the warp, or its last fence, lets others know, and acquires what others have
    released there: at once, or at the warp's next fence.
    """
    parts, agent = one.parts, warp.agent()
    is_acquire = "acquire" in parts or "acq_rel" in parts
    is_release = "release" in parts or "acq_rel" in parts
    if parts[0] != "ld":  # a plain load has nothing to release
        given = machine.clocks.release(agent) if is_release else warp.fenced
    before = np.empty((len(at), width), np.uint8)
    for buffer, which, offsets in machine.memory.find(at, width, str(one)):
        where = offsets[:, None] + np.arange(width)
        if not buffer.is_written[where].all() and parts[0] != "st":
            raise Fault(f"{one} of bytes of {buffer.name} that nothing has written")
        before[which] = buffer.data[where]
        if buffer.shadow is not None:
            buffer.shadow.access_atomically(agent, buffer.shadow.cells(offsets, width))
        if data is not None:
            if not buffer.is_writable:
                raise Fault(f"{one} to {buffer.name}, which is an input")
            buffer.data[where], buffer.is_written[where] = data[which], True
    for address in at.tolist():
        known = machine.released.get(address)
        if known is not None and parts[0] != "st":
            if is_acquire:
                machine.clocks.learn(agent, known)
            else:
                warp.acquired = known.copy() if warp.acquired is None else np.maximum(warp.acquired, known)
        if parts[0] == "st":
            machine.released[address] = machine.no_knowledge() if given is None else given
        elif parts[0] != "ld" and given is not None:
            machine.released[address] = given.copy() if known is None else np.maximum(known, given)
    return before


def compile_atomic(machine: "Machine", one: Instruction) -> "Step":
    """Return the step of atom and red on global memory, lane by lane."""
    parts, kind = one.parts, one.parts[-1]
    operands = list(one.operands) if parts[0] == "atom" else ["_", *one.operands]
    functions: dict[str, Any] = {
        "add": lambda old, b, c: old + b,
        "inc": lambda old, b, c: old.dtype.type(0) if old >= b else old + old.dtype.type(1),
        "dec": lambda old, b, c: b if old == 0 or old > b else old - old.dtype.type(1),
        "exch": lambda old, b, c: b,
        "cas": lambda old, b, c: c if old == b else old,
        "min": lambda old, b, c: min(old, b),
        "max": lambda old, b, c: max(old, b),
        "and": lambda old, b, c: old & b,
        "or": lambda old, b, c: old | b,
        "xor": lambda old, b, c: old ^ b,
    }
    name = next((part for part in parts if part in functions), None)
    if name is None or space_of(one) == "shared":
        raise Fault(f"no instruction {one}")
    function, dtype = functions[name], np.dtype(TYPES[kind])
    put, address = machine.operands.setter(operands[0]), machine.operands.address(operands[1])
    b = machine.operands.value(operands[2], kind)
    c = machine.operands.value(operands[3] if len(operands) > 3 else "0", kind)

    def step(warp: "Warp", lanes: Array, here: Array) -> None:
        addresses, result = address(warp), np.zeros(32, dtype)
        for lane in np.nonzero(lanes)[0].tolist():
            at = addresses[lane : lane + 1]
            old = machine.memory.load(at, dtype.itemsize, str(one)).view(dtype)[0, 0]
            new = np.array([function(old, b(warp)[lane], c(warp)[lane])], dtype)
            atomic_access(machine, warp, at, dtype.itemsize, one, new.view(np.uint8).reshape(1, -1))
            machine.counts.see_global(parts[0], at, dtype.itemsize)
            result[lane] = old
        put(warp, lanes, result)

    return step
