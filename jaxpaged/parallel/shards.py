"""What the shards of a model tell each other: all that is said between devices inside a program."""

import functools
import operator
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Num, UInt32

DATA, MODEL = "data", "model"  # the axes of a mesh
Sums = Literal["fast", "ordered"]


@dataclass(frozen=True)
class Shards:
    """Equal shares of a model, one on each device along the mesh's axis "model".

    `sums`: "fast" lets XLA add up, in whatever order and pieces the devices' library has; "ordered" adds in
    the shards' order, whatever the library, and moves `size / 2` times as many bytes: each device gets all
    parts.
    """

    size: int
    sums: Sums = "fast"

    def total(self, part: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """The sum of all shards' parts, on each."""
        if self.sums == "fast":
            return lax.psum(part, MODEL)
        parts = lax.all_gather(part, MODEL)
        return functools.reduce(operator.add, [parts[i] for i in range(self.size)])

    def mean(self, part: Float[Array, "*n"]) -> Float[Array, "*n"]:
        return self.total(part) / self.size

    def joined(self, part: Float[Array, "n width"], width: int) -> Float[Array, "n all_widths"]:
        """All shards' columns side by side, the first `width` of them."""
        return lax.all_gather(part, MODEL, axis=1, tiled=True)[:, :width]

    def mine(self, whole: Num[Array, "n"]) -> Num[Array, "its_share"]:
        """This shard's share of what is the same on each, in their order."""
        count = whole.shape[0] // self.size
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(MODEL) * count, count)

    def agree(self, tree: object) -> Bool[Array, ""]:
        """Whether all have the same numbers, by a digest of them."""
        mine = digest(tree)
        return lax.pmin(mine, MODEL) == lax.pmax(mine, MODEL)


def digest(tree: object) -> UInt32[Array, ""]:
    """Of all arrays' bits, each by its place: where one number is another, so is the digest."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        wide = jnp.asarray(leaf).astype(
            jnp.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.int32
        )
        bits = lax.bitcast_convert_type(wide, jnp.uint32).reshape(-1)
        places = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1  # odd: a number's weight has an inverse
        total = total * jnp.uint32(0x9E3779B1) + jnp.sum(bits * places, dtype=jnp.uint32)
    return total
