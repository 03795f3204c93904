"""Tensor maps of TMA: which elements of an array a box is, and where shared memory takes them."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.registers import Array

SWIZZLES = {16: 0, 32: 1, 64: 3, 128: 7}  # bytes of a line -> mask of its 16-byte units that move


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """An array as cuTensorMapEncodeTiled describes it. Lists are outermost first.

    strides: in elements; the innermost is 1.
    swizzle: bytes of a line whose 16-byte units are permuted; 16: none.
    """

    base: int
    element: int  # bytes
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 16

    def __post_init__(self) -> None:
        line = self.box[-1] * self.element
        if self.swizzle not in SWIZZLES:
            raise Fault(f"swizzle={self.swizzle} must be one of {list(SWIZZLES)}")
        if self.swizzle > 16 and line > self.swizzle:
            raise Fault(f"a box of {line} bytes a line must be at most its {self.swizzle=}")
        if line % 16 or self.strides[-1] != 1 or max(self.box) > 256 or self.base % 16:
            raise Fault(f"no tensor map: {self}")
        if any(stride * self.element % 16 for stride in self.strides[:-1]):
            raise Fault(f"a tensor map's strides must be multiples of 16 bytes: {self}")

    @property
    def num_bytes(self) -> int:
        """Return the size of a box in bytes."""
        return int(np.prod(self.box)) * self.element

    def lines(self, start: list[int], shared: int) -> Iterator[tuple[Array, Array, Array]]:
        """Yield for each line of a box the positions of its bytes in shared memory, their addresses in the
        array, and whether each is inside of the array.
        """
        width = self.box[-1] * self.element
        columns = start[-1] + np.arange(self.box[-1])
        is_column = np.repeat((columns >= 0) & (columns < self.sizes[-1]), self.element)
        for number, index in enumerate(np.ndindex(*self.box[:-1])):
            at = swizzled(shared + number * width + np.arange(width), self.swizzle)
            where = [first + step for first, step in zip(start, index, strict=False)]
            is_inside = all(0 <= a < size for a, size in zip(where, self.sizes, strict=False))
            offset = sum(a * stride for a, stride in zip(where, self.strides, strict=False)) + start[-1]
            yield at, self.base + offset * self.element + np.arange(width), is_column & is_inside


def swizzled(addresses: Array, swizzle: int) -> Array:
    """Return where bytes of shared memory lie: in each 1,024 bytes (512, 256) 16-byte units are permuted.

    Bits 4 to 6 (5, 4) of an address are exclusive-ored with bits 7 to 9 (8, 7).
    """
    return addresses ^ ((addresses >> 7 & SWIZZLES[swizzle]) << 4)
