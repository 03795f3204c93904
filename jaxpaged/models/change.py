"""Change: a stand-in for a weight, which has what an update gives of it. A decoder is made of changes as of
weights; then they are put into the arrays that it has.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxpaged.models.host_arrays import aligned, put


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """Change of a weight: nothing, all of it, or some of its numbers are new."""

    shape: tuple[int, ...]  # the weight's, before it is packed
    dtype: Any
    is_quantised: bool = False
    values: Any = None  # an array or a `QuantisedWeight`; None: nothing
    is_new: np.ndarray | None = None  # of the values' shape, 0 where the weight stays; None: all are new
    source: Any = None  # the array that the values are, where nothing was done to it

    def mapped(self, function: Callable[[Any], Any]) -> "Change":
        """Return the change of what a function makes of the weight: it only moves and pads numbers."""
        made = None if self.values is None else function(self.values)
        is_new = None if self.is_new is None else function(self.is_new)
        return dataclasses.replace(self, values=made, is_new=is_new, source=None)

    def split(self, count: int) -> list["Change"]:
        """Return the changes of so many equal parts, along the first axis."""
        size = self.shape[0] // count
        shape = size, *self.shape[1:]
        parts = [
            self.mapped(lambda array, i=i: array[i * size : (i + 1) * size])  # type: ignore[misc]
            for i in range(count)
        ]
        return [dataclasses.replace(part, shape=shape) for part in parts]

    def __getitem__(self, _: Any) -> "Change":
        return self

    def into(self, old: Any) -> Any:
        """Return the weight's arrays as they are after the change, `old` before it; None: it changes nothing.

        A JAX array that has its place, form and dtype already is taken as it is.
        """
        if self.values is None:
            return None
        if isinstance(self.source, jax.Array) and self.is_new is None:
            is_same = self.source.shape == old.shape and self.source.dtype == old.dtype
            if is_same and isinstance(old.sharding, jax.sharding.SingleDeviceSharding):
                return jax.device_put(self.source, old.sharding)
        target = copied(old, keeps=self.is_new is not None)
        self.write(target)
        return target

    def write(self, target: Any) -> None:
        """Write what changes into NumPy arrays of the weight."""
        for into, values in zip(jax.tree.leaves(target), jax.tree.leaves(self.values), strict=True):
            if self.is_new is None:
                put(into, np.asarray(values))
            else:
                np.copyto(into, np.asarray(values), where=self.is_new != 0)


class StackChange:
    """The changes of a weight of all layers, whose arrays lie side by side. They are made one by one."""

    def __init__(self, each: Iterator[Change]) -> None:
        self._each = each

    def into(self, old: Any) -> Any:
        """Return the stack's arrays after all changes; None: nothing changes. May be called once."""
        target = None
        for i, change in enumerate(self._each):
            if change.values is None:
                continue
            if target is None:
                target = copied(old, keeps=True)
            change.write(jax.tree.map(lambda array, i=i: array[i], target))
        return target


def copied(old: Any, *, keeps: bool) -> Any:
    """Return NumPy arrays like those of a weight, with the same numbers if `keeps`.

    Shapes in place of arrays have no numbers: then all will be written.
    """

    def copy(array: Any) -> np.ndarray:
        target = aligned(array.shape, np.dtype(array.dtype))
        if keeps and not isinstance(array, jax.ShapeDtypeStruct):
            put(target, np.asarray(array))
        return target

    return jax.tree.map(copy, old)
