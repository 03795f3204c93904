"""Communication between the shards of a model, inside a compiled program."""

import functools
import operator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Num

from jaxpaged.config import Sums
from jaxpaged.digest import digest

DATA, MODEL = "data", "model"  # the axes of a mesh


@dataclass(frozen=True)
class Shards:
    """Equal shards of a model, one on each device along the mesh's axis "model".

    sums: "fast" lets XLA add up, in whatever order the devices' library does. "ordered" adds in the shards'
    order, whatever the library, and moves `size / 2` times as many bytes: each device gets all summands.
    """

    size: int
    sums: Sums = "fast"

    def total(self, part: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Return the sum of all shards' arrays, on each shard."""
        if self.size == 1:
            return part
        if self.sums == "fast":
            return lax.psum(part, MODEL)
        parts = lax.all_gather(part, MODEL)
        return functools.reduce(operator.add, [parts[i] for i in range(self.size)])

    def mean(self, part: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Return the mean of all shards' arrays, on each shard."""
        return self.total(part) / self.size

    def joined(self, part: Float[Array, "n width"], width: int) -> Float[Array, "n all_widths"]:
        """Return all shards' columns side by side, the first `width` of them."""
        if self.size == 1:
            return part[:, :width]
        return lax.all_gather(part, MODEL, axis=1, tiled=True)[:, :width]

    def mine(self, whole: Num[Array, "n"]) -> Num[Array, "its_share"]:
        """Return this shard's equal part of an array that all shards have, in their order."""
        count = whole.shape[0] // self.size
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(MODEL) * count, count)

    def agree(self, tree: object) -> Bool[Array, ""]:
        """Return whether all shards have the same numbers, compared by a digest of them."""
        mine = digest(jax.tree.leaves(tree))
        return jnp.all(lax.pmin(mine, MODEL) == lax.pmax(mine, MODEL))
