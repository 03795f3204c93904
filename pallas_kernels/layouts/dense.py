"""Layouts that store numbers as they are, and differ in the order of their axes."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts.base import Arrays, Layout, Location, Sizes, View

Axes = tuple[str, ...]
KV = "kv"  # the axis along which K comes before V


class Dense(Layout):
    """A layout of an array of K and one of V, or of one array with an axis "kv" for both, defined by the
    order of its axes.
    """

    # "block" first, then "token", "head", "dim" and perhaps "kv" in any order; without "token" a block has
    # one.
    axes: ClassVar[Axes]

    @property
    def names(self) -> tuple[str, str]:
        """The arrays of K and of V."""
        return (KV, KV) if KV in self.axes else ("k", "v")

    def arrays(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
    ) -> dict[str, jax.ShapeDtypeStruct]:
        sizes = Sizes(num_blocks, block_size, num_kv_heads, head_dim)
        return dict.fromkeys(self.names, jax.ShapeDtypeStruct(shape(self.axes, sizes), dtype))

    def write(
        self, arrays: Arrays, sizes: Sizes, k: jax.Array, v: jax.Array, slots: jax.Array
    ) -> dict[str, jax.Array]:
        return dict(arrays) | put(arrays, self.names, self.axes, (k, v), slots, sizes.block_size)

    def read(
        self, arrays: Arrays, sizes: Sizes, block_ids: jax.Array, dtype: jnp.dtype
    ) -> tuple[jax.Array, jax.Array]:
        return take(arrays, self.names, self.axes, block_ids, dtype)

    def view(self) -> View | None:
        if self.axes[-1] != "dim":
            return None
        k, v = (
            Location(name, tuple(which if axis == KV else axis for axis in self.axes[:-1]))
            for which, name in enumerate(self.names)
        )
        return View(k, v)


def shape(axes: Axes, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape of an array with these axes."""
    size_of = dict(zip(("block", "token", "head", "dim", KV), (*sizes, 2), strict=True))
    return tuple(size_of[axis] for axis in axes)


def put(
    arrays: Arrays,
    names: tuple[str, ...],
    axes: Axes,
    new: tuple[jax.Array, ...],
    slots: jax.Array,
    block_size: int,
) -> dict[str, jax.Array]:
    """Write tokens of K and V, or of K alone, to the arrays of these names, and return these arrays.

    new: [num_tokens, num_kv_heads] each, with head_dim last if the arrays have that axis.
    """
    written = {name: arrays[name] for name in names}
    block, offset = jnp.divmod(slots, block_size)
    for which, (name, x) in enumerate(zip(names, new, strict=True)):
        array, x = written[name], x.astype(written[name].dtype)
        if axes[:3] == ("block", "token", "head"):
            written[name] = array.reshape(-1, *array.shape[2:]).at[slots].set(x).reshape(array.shape)
        else:
            written[name] = _scatter(array, x, block, offset, axes=axes, which=which)
    return written


def _scatter(
    array: jax.Array, x: jax.Array, block: jax.Array, offset: jax.Array, *, axes: Axes, which: int
) -> jax.Array:
    index = {"block": block, "token": offset, KV: which}
    return array.at[tuple(index.get(axis, slice(None)) for axis in axes)].set(_turned(x, axes))


def _turned(x: jax.Array, axes: Axes) -> jax.Array:
    """Swap a token's heads and dimensions if the axes are in that order."""
    is_turned = "dim" in axes and axes.index("dim") < axes.index("head")
    return x.swapaxes(1, 2) if is_turned else x


def take(
    arrays: Arrays, names: tuple[str, str], axes: Axes, block_ids: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Return K and V of these blocks in a dtype, [*n, block_size, num_kv_heads], with head_dim if the arrays
    have it.
    """
    lines: dict[str, jax.Array] = {}
    for name in dict.fromkeys(names):  # both from one array at once
        array = arrays[name]
        # Flat lines, because XLA's CPU gather copies them.
        line = array.reshape(array.shape[0], -1).at[block_ids].get(mode="promise_in_bounds")
        lines[name] = line.reshape(*block_ids.shape, *array.shape[1:])
    n, (k, v) = block_ids.ndim - 1, (lines[name] for name in names)
    if KV in axes:
        k, v = (lax.index_in_dim(k, which, n + axes.index(KV), keepdims=False) for which in (0, 1))
    if "token" not in axes:
        k, v = (jnp.expand_dims(x, n + 1) for x in (k, v))
        axes = (axes[0], "token", *axes[1:])
    kept = [axis for axis in axes if axis != KV]
    order = [*range(n + 1), *(n + kept.index(axis) for axis in ("token", "head", "dim") if axis in kept)]
    return jnp.transpose(k, order).astype(dtype), jnp.transpose(v, order).astype(dtype)
