"""The layouts `fp8_e4m3` and `fp8_e5m2`: 8 bits a number, with scales that all tokens share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.layouts.base import Arrays, Layout, Sizes, View
from pallas_kernels.layouts.dense import Dense
from pallas_kernels.layouts.token_major import TOKEN_MAJOR

TYPES = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
Scale = float | tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Fp8(Layout):
    """The numbers of a dense layout as x / scale in float8, saturated.

    A scale is one for the tensor, a tuple one for each kv head. With `is_measured` they are those of the
    first tokens that a layer writes, and stay: the largest of them, by head or in all, becomes the type's
    largest number. With `in_arrays` those given are not in the program but in arrays, as `given` says.

    On a CPU they are kept `as_bytes`: to write a token into an array of float8, XLA takes all of it to
    float16 and back.
    """

    cache_dtype: str = "fp8_e4m3"  # type: ignore[misc]  # of TYPES
    base: Dense = TOKEN_MAJOR
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0
    is_measured: bool = False
    is_per_head: bool = False  # what is measured
    in_arrays: bool = False
    as_bytes: bool = False  # uint8 in place of float8

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        """Half a unit in the last place of the largest number."""
        return 2.0 ** -(jnp.finfo(self.dtype).nmant + 1)

    @property
    def layers_apart(self) -> bool:  # type: ignore[override]
        return self.base.layers_apart

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(TYPES[self.cache_dtype])

    def arrays(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
    ) -> dict[str, jax.ShapeDtypeStruct]:
        return self.base.arrays(num_blocks, block_size, num_kv_heads, head_dim, self._stored_dtype)

    def shared(self, num_kv_heads: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of measured scales, 0 until they are measured, or of given ones."""
        spec = jax.ShapeDtypeStruct((num_kv_heads,), jnp.float32)
        return {"k_scale": spec, "v_scale": spec} if self.is_measured or self.in_arrays else {}

    def given(self, num_kv_heads: int, device: int = 0, num_devices: int = 1) -> dict[str, np.ndarray]:
        if not self.in_arrays:
            return {}
        scales = {}
        for name, scale in self._given:
            values = scale
            if isinstance(values, tuple):
                first = device * len(values) // num_devices
                values = values[first : first + num_kv_heads]
            scales[name] = np.broadcast_to(np.asarray(values, np.float32), (num_kv_heads,))
        return scales

    def on_several(self) -> "Fp8":
        is_by_head = any(isinstance(scale, tuple) for _, scale in self._given)
        return dataclasses.replace(self, in_arrays=True) if is_by_head and not self.is_measured else self

    def why_not_heads(self, num_kv_heads: int) -> str | None:
        for name, scale in self._given:
            if isinstance(scale, tuple) and len(scale) != num_kv_heads:
                return f"{name} must be a number, or {num_kv_heads}, one for each kv head, not {scale}"
        return None

    @property
    def _given(self) -> tuple[tuple[str, Scale], tuple[str, Scale]]:
        return ("k_scale", self.k_scale), ("v_scale", self.v_scale)

    def scales(self, arrays: Arrays, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
        if self.is_measured or self.in_arrays:
            return arrays["k_scale"], arrays["v_scale"]
        k_scale, v_scale = (
            jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (sizes.num_kv_heads,))
            for scale in (self.k_scale, self.v_scale)
        )
        return k_scale, v_scale

    def write(
        self, arrays: Arrays, sizes: Sizes, k: jax.Array, v: jax.Array, slots: jax.Array
    ) -> dict[str, jax.Array]:
        new = dict(arrays)
        if self.is_measured:
            for name, x in (("k_scale", k), ("v_scale", v)):
                new[name] = jnp.where(new[name] > 0, new[name], self._measured(x, slots >= sizes.block_size))
        k_scale, v_scale = self.scales(new, sizes)
        return self.base.write(new, sizes, self._stored(k, k_scale), self._stored(v, v_scale), slots)

    def read(
        self, arrays: Arrays, sizes: Sizes, block_ids: jax.Array, dtype: jnp.dtype
    ) -> tuple[jax.Array, jax.Array]:
        stored = self.base.read(arrays, sizes, block_ids, self._stored_dtype)
        k, v = (
            (lax.bitcast_convert_type(x, self.dtype).astype(jnp.float32) * scale[:, None]).astype(dtype)
            for x, scale in zip(stored, self.scales(arrays, sizes), strict=True)
        )
        return k, v

    def view(self) -> View | None:
        view = self.base.view()
        return view._replace(numbers=self.dtype) if view and self.as_bytes else view

    def on(self, platform: str) -> "Fp8":
        return dataclasses.replace(self, as_bytes=platform == "cpu")

    def why_not(self, block_size: int, head_dim: int, dtype: jnp.dtype) -> str | None:
        return self.base.why_not(block_size, head_dim, dtype)

    @property
    def _stored_dtype(self) -> jnp.dtype:
        return jnp.dtype("uint8") if self.as_bytes else self.dtype

    def _stored(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        largest = float(jnp.finfo(self.dtype).max)
        x = jnp.clip(x.astype(jnp.float32) / scale[:, None], -largest, largest).astype(self.dtype)
        return lax.bitcast_convert_type(x, jnp.uint8) if self.as_bytes else x

    def _measured(self, x: jax.Array, is_token: jax.Array) -> jax.Array:
        """Return scales [num_kv_heads] measured on these tokens; 0 if all are padding."""
        magnitude = jnp.where(is_token[:, None, None], jnp.abs(x.astype(jnp.float32)), 0)
        largest = jnp.max(magnitude, axis=(0, 2) if self.is_per_head else None)
        return jnp.broadcast_to(largest / np.float32(jnp.finfo(self.dtype).max), x.shape[1:2])

    def __str__(self) -> str:
        return f"{self.cache_dtype} of {self.base}"
