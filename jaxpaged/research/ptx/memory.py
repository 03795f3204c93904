"""Global memory of a launch: buffers with gaps between them, and what may be done to them."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.races import Clocks, Shadow
from jaxpaged.research.ptx.registers import Array

BASE, GAP, ALIGNMENT = 0x7F0000000000, 4096, 256
PARAMETERS = 0x7E0000000000  # where a parameter of tensor maps lies
CELL = 2  # bytes of global memory whose accesses are ordered together


@dataclasses.dataclass
class Buffer:
    """An array of the kernel. Bytes that nothing has written may not be read."""

    name: str
    address: int
    data: Array
    is_writable: bool
    is_written: Array
    shadow: Shadow | None = None


class Memory:
    """Buffers at their addresses."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._end = BASE + GAP

    def add(self, name: str, array: Array, *, is_writable: bool = False, is_written: bool = True) -> int:
        """Place a copy of an array; return its address."""
        data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).copy()
        address = -(-self._end // ALIGNMENT) * ALIGNMENT
        written = np.full(data.size, is_written)
        self.buffers.append(Buffer(name, address, data, is_writable, written))
        self._end = address + data.size + GAP
        return address

    def watch(self, clocks: Clocks, agents: range, report: Callable[[str], None]) -> None:
        """Look for races in the buffers that the kernel may write."""
        for buffer in self.buffers:
            if buffer.is_writable:
                buffer.shadow = Shadow(buffer.data.size, CELL, clocks, agents, report)

    def find(self, addresses: Array, width: int, what: str) -> list[tuple[Buffer, Array, Array]]:
        """Return buffers, the accesses that are in them, and where these begin.

        Raises Fault for an access that is not aligned, or not in a buffer.
        """
        if width & (width - 1) == 0 and (addresses % width).any():
            raise Fault(f"{what} of {width} bytes must be aligned: {int(addresses[0]):#x}")
        left, parts = np.arange(len(addresses)), []
        for buffer in self.buffers:
            offsets = addresses[left] - buffer.address
            inside = (offsets >= 0) & (offsets + width <= buffer.data.size)
            if inside.any():
                parts.append((buffer, left[inside], offsets[inside]))
                left = left[~inside]
            if not len(left):
                return parts
        raise Fault(f"{what} of {width} bytes at {int(addresses[left[0]]):#x} is in no buffer")

    def load(self, addresses: Array, width: int, what: str, seen: "Seen | None" = None) -> Array:
        """Return bytes of accesses, [accesses, width]. Raises Fault for those that nothing has written."""
        data = np.empty((len(addresses), width), np.uint8)
        for buffer, which, offsets in self.find(addresses, width, what):
            at = offsets[:, None] + np.arange(width)
            if not buffer.is_written[at].all():
                raise Fault(f"{what} of bytes of {buffer.name} that nothing has written")
            data[which] = buffer.data[at]
            if buffer.shadow is not None and seen is not None:
                seen.read(buffer.shadow, which, buffer.shadow.cells(offsets, width))
        return data

    def store(self, addresses: Array, data: Array, what: str, seen: "Seen | None" = None) -> None:
        """Write bytes, [accesses, width]. Raises Fault for an array that the kernel may only read."""
        width = data.shape[1]
        for buffer, which, offsets in self.find(addresses, width, what):
            if not buffer.is_writable:
                raise Fault(f"{what} to {buffer.name}, which is an input")
            at = offsets[:, None] + np.arange(width)
            is_same = bool(buffer.is_written[at].all() and (buffer.data[at] == data[which]).all())
            if buffer.shadow is not None and seen is not None:
                seen.write(buffer.shadow, which, buffer.shadow.cells(offsets, width), is_same=is_same)
            buffer.data[at] = data[which]
            buffer.is_written[at] = True

    def array(self, name: str, dtype: object, shape: tuple[int, ...]) -> Array:
        """Return a buffer's content. Raises Fault if the kernel has left bytes unwritten."""
        [buffer] = [buffer for buffer in self.buffers if buffer.name == name]
        if not buffer.is_written.all():
            raise Fault(f"{int((~buffer.is_written).sum())} bytes of {name} were never written")
        return buffer.data.view(dtype).reshape(shape)  # type: ignore[call-overload]


@dataclasses.dataclass
class Seen:
    """An access as the detector of races sees it: whose, by which proxy, and by which lanes of a warp."""

    agent: int
    is_generic: bool = True
    lanes: Array | None = None
    turn: int = 0

    def read(self, shadow: Shadow, which: Array, cells: Array) -> None:
        if not self.is_generic:
            shadow.check_fenced(cells)
        shadow.read(self.agent, cells, None if self.lanes is None else self.lanes[which], self.turn)

    def write(self, shadow: Shadow, which: Array, cells: Array, *, is_same: bool = False) -> None:
        lanes = None if self.lanes is None else self.lanes[which]
        shadow.write(self.agent, cells, lanes, self.turn, is_generic=self.is_generic, is_same=is_same)
