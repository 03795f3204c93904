"""Change: a stand-in for a weight, which has what an update gives of it. A decoder is made of changes as of
weights; then they are put into the arrays that it has.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpaged.models.host_arrays import aligned, put


class New(NamedTuple):
    """New numbers of a weight."""

    values: Any  # an array or a `QuantisedWeight`
    is_new: np.ndarray | None = None  # of the values' shape, 0 where the weight stays; None: all are new


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """Change of a weight: nothing, all of it, or some of its numbers are new. They are made when they are
    written, and not kept.
    """

    shape: tuple[int, ...]  # the weight's, before it is packed
    dtype: Any
    is_quantised: bool = False
    make: Callable[[], New] | None = None  # None: nothing is new
    is_whole: bool = False  # whether all numbers are new
    source: Any = None  # the array that the values are, where nothing is done to it

    def mapped(self, function: Callable[[Any], Any]) -> "Change":
        """Return the change of what a function makes of the weight: it only moves and pads numbers."""
        make = self.make
        if make is None:
            return self

        def made() -> New:
            new = make()
            return New(function(new.values), None if new.is_new is None else function(new.is_new))

        return dataclasses.replace(self, make=made, source=None)

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

        old: arrays, or where the change is whole shapes, which have no numbers.

        A JAX array that has its place, form and dtype already is taken as it is.
        """
        if self.make is None:
            return None
        if isinstance(self.source, jax.Array) and self.is_whole:
            is_same = self.source.shape == old.shape and self.source.dtype == old.dtype
            if is_same and isinstance(old.sharding, jax.sharding.SingleDeviceSharding):
                return jax.device_put(self.source, old.sharding)
        target = copied(old, keeps=not self.is_whole)
        self.write(target)
        return target

    def write(self, target: Any) -> None:
        """Write what is new into NumPy arrays of the weight."""
        assert self.make is not None
        new = self.make()
        for into, values in zip(jax.tree.leaves(target), jax.tree.leaves(new.values), strict=True):
            if new.is_new is None:
                put(into, np.asarray(values))
            else:
                np.copyto(into, np.asarray(values), where=new.is_new != 0)


class StackChange:
    """The changes of a weight of all layers, whose arrays lie side by side."""

    def __init__(self, each: Iterable[Change]) -> None:
        self._each = list(each)

    @property
    def is_whole(self) -> bool:
        """Whether all numbers of all layers are new."""
        return all(change.is_whole for change in self._each)

    def into(self, old: Any) -> Any:
        """Return the stack's arrays after all changes, as `Change.into` does; None: nothing changes."""
        changed = [(i, change) for i, change in enumerate(self._each) if change.make is not None]
        if not changed:
            return None
        target = copied(old, keeps=not self.is_whole)
        for i, change in changed:
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
