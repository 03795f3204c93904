"""The layout `int8_per_token`: 8 bits a number, with a scale for each token and head in the block."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layouts.base import Arrays, Layout, Location, Sizes, View
from pallas_kernels.layouts.dense import Dense, put, shape, take
from pallas_kernels.layouts.token_major import TOKEN_MAJOR

SMALLEST = 1e-30  # a scale: that of zeros


@dataclasses.dataclass(frozen=True)
class Int8PerToken(Layout):
    """The numbers of a dense layout as round(x / scale), where a scale makes a token's head reach 127.

    The scales are float32 and lie as the numbers do, but those of a head's tokens side by side: a program
    that computes one head fetches a block's at once.
    """

    cache_dtype = "int8"
    tolerance = 2.0**-7
    base: Dense = TOKEN_MAJOR

    @property
    def layers_apart(self) -> bool:  # type: ignore[override]
        return self.base.layers_apart

    def arrays(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
    ) -> dict[str, jax.ShapeDtypeStruct]:
        sizes = Sizes(num_blocks, block_size, num_kv_heads, head_dim)
        numbers = self.base.arrays(*sizes, jnp.dtype("int8"))
        scale = jax.ShapeDtypeStruct(shape(self._axes, sizes), jnp.float32)
        return numbers | dict.fromkeys(self._names, scale)

    def write(
        self, arrays: Arrays, sizes: Sizes, k: jax.Array, v: jax.Array, slots: jax.Array
    ) -> dict[str, jax.Array]:
        (k, k_scale), (v, v_scale) = _quantised(k), _quantised(v)
        numbers = put(arrays, self.base.names, self.base.axes, (k, v), slots, sizes.block_size)
        return numbers | put(arrays, self._names, self._axes, (k_scale, v_scale), slots, sizes.block_size)

    def read(
        self, arrays: Arrays, sizes: Sizes, block_ids: jax.Array, dtype: jnp.dtype
    ) -> tuple[jax.Array, jax.Array]:
        f32 = jnp.dtype("float32")
        numbers = take(arrays, self.base.names, self.base.axes, block_ids, f32)
        scales = take(arrays, self._names, self._axes, block_ids, f32)
        k, v = ((x * scale[..., None]).astype(dtype) for x, scale in zip(numbers, scales, strict=True))
        return k, v

    def view(self) -> View | None:
        view = self.base.view()
        if view is None:
            return None
        k_scale, v_scale = (
            Location(f"{place.array}_scale", _turned(place.axes)) for place in (view.k, view.v)
        )
        return View(view.k, view.v, k_scale, v_scale)

    def why_not(self, block_size: int, head_dim: int, dtype: jnp.dtype) -> str | None:
        return self.base.why_not(block_size, head_dim, dtype)

    @property
    def _names(self) -> tuple[str, str]:
        """The arrays of scales."""
        k, v = self.base.names
        return f"{k}_scale", f"{v}_scale"

    @property
    def _axes(self) -> tuple[str, ...]:
        return _turned(axis for axis in self.base.axes if axis != "dim")

    def __str__(self) -> str:
        return f"int8_per_token of {self.base}"


def _turned[T](axes: Iterable[T]) -> tuple[T, ...]:
    """Return the axes with that of tokens moved to the end."""
    return tuple(sorted(axes, key=lambda axis: axis == "token"))


def _quantised(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return int8 codes of x [num_tokens, num_kv_heads, head_dim], and their scales [num_tokens,
    num_kv_heads].
    """
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True) * np.float32(1 / 127), SMALLEST)
    return jnp.clip(jnp.rint(x / scale), -127, 127).astype(jnp.int8), scale[..., 0]
