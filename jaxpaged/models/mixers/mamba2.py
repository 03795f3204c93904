"""Mamba-2: Granite 4, Bamba, Nemotron-H and others."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxpaged import row_sums
from jaxpaged.checks import check
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.feed_forward import linear, stack, times
from jaxpaged.models.mixers import paged
from jaxpaged.models.mixers.description import Shape, check_divided, check_sizes, state_arrays
from jaxpaged.models.shards import total
from jaxpaged.models.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Mamba-2 (Dao and Gu 2024): heads with one decay each, B and C shared by groups of heads."""

    name: ClassVar[str] = "mamba2"
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel_size: int
    conv_bias: bool = True
    bias: bool = False  # of the projection in front
    out_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"  # of the output
    norm_groups: int = 1  # groups of numbers that the norm takes apart
    norm_in_float32: bool = False  # whether its weights are multiplied before numbers are rounded
    # Factors of the input; of z, x, B, C and dt; and of the output.
    in_scale: float = 1.0
    section_scales: tuple[float, ...] = ()  # empty: none
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the sizes, which come from files. Raises `InputError`."""
        names = ("num_heads", "head_dim", "state_size", "num_groups", "kernel_size", "norm_groups")
        check_sizes(self, *names)
        rule = f"a multiple of the {self.num_groups} groups"
        check("model config: mamba heads", self.num_heads, rule, self.num_heads % self.num_groups == 0)
        rule = f"a multiple of {self.norm_groups}, the norm's groups"
        check("model config: mamba width", self.width, rule, self.width % self.norm_groups == 0)

    @property
    def width(self) -> int:
        """Numbers of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.width + 2 * self.num_groups * self.state_size

    def weights(self, hidden_size: int) -> dict[str, Shape]:
        """Return the shapes of a layer's weights by role: `in` has z; x, B and C; dt."""
        shapes: dict[str, Shape] = {
            "mixer.in.weight": (self.width + self.num_channels + self.num_heads, hidden_size),
            "mixer.conv.weight": (self.kernel_size, self.num_channels),
            "mixer.a_log": (self.num_heads,),
            "mixer.d": (self.num_heads,),
            "mixer.dt_bias": (self.num_heads,),
            "mixer.out.weight": (hidden_size, self.width),
        }
        if self.norm != "none":
            shapes["mixer.norm.weight"] = (self.width,)
        if self.conv_bias:
            shapes["mixer.conv.bias"] = (self.num_channels,)
        if self.bias:
            shapes["mixer.in.bias"] = shapes["mixer.in.weight"][:1]
        if self.out_bias:
            shapes["mixer.out.bias"] = (hidden_size,)
        return shapes

    def pieces(self, role: str, count: int) -> list[int] | None:
        """Return None: every role is one tensor."""
        return None

    def arrays(self, block_size: int, dtype: jnp.dtype) -> dict[str, tuple[Shape, jnp.dtype]]:
        """Return the arrays of `ops.states.StateBlocks`, and the convolution's inputs in `dtype`."""
        sizes = self.num_heads, self.num_groups, self.state_size, self.head_dim
        return state_arrays(block_size, *sizes) | {"conv": ((block_size, self.num_channels), dtype)}

    def divided(self, size: int) -> "Mamba2":
        """Return the share of one of so many devices: groups of B and C with their heads."""
        check_divided(size, self, groups=self.num_groups)
        narrow = replace(self, num_heads=self.num_heads // size, num_groups=self.num_groups // size)
        if self.norm == "none":
            return narrow
        check_divided(size, self, norm_groups=self.norm_groups)
        return replace(narrow, norm_groups=self.norm_groups // size)

    def sections(self, role: str) -> list[int]:
        """Return the widths of z, x, B, C and dt, of x, B and C, or of numbers of heads."""
        channels = [self.width, *[self.num_groups * self.state_size] * 2]
        of_heads = ("mixer.a_log", "mixer.d", "mixer.dt_bias")
        sections = {role: [self.num_heads] for role in of_heads} | {
            "mixer.in.weight": [self.width, *channels, self.num_heads],
            "mixer.in.bias": [self.width, *channels, self.num_heads],
            "mixer.conv.weight": channels,
            "mixer.conv.bias": channels,
            "mixer.norm.weight": [self.width],
        }
        return sections.get(role, [])


class Mamba2Mixer(nnx.Module):
    """A convolution of x, B and C, the recurrence, and a gate with a norm before it, after it, or none."""

    def __init__(self, weights: Weights, description: Mamba2) -> None:
        self.description, self.eps, self.shards = description, weights.config.norm_eps, weights.shards
        self.into, self.out = linear(weights, "mixer.in"), linear(weights, "mixer.out")
        self.conv, self.conv_bias = paged.stacked(weights, "conv.weight"), stack(weights, "mixer.conv.bias")
        roles = ("a_log", "d", "dt_bias")
        self.a_log, self.d, self.dt_bias = (paged.stacked(weights, name) for name in roles)
        self.norm = stack(weights, "mixer.norm.weight")

    def __call__(
        self, x: Float[Array, "num_tokens hidden"], cache: KVCache, number: int, batch: PassBatch
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """Compute the state layer of this number. Return its output in float32, and the cache."""
        d, dtype = self.description, x.dtype
        kept, tables = cache.states_of(), paged.tables_of(cache, number, batch)
        into = self._sections_scaled(self.into(times(x, d.in_scale), number))
        z, mixed, dt = jnp.split(into, [d.width, d.width + d.num_channels], axis=1)
        bias = None if self.conv_bias is None else self.conv_bias[number]
        mixed, rows = paged.convolve(
            kept["conv"], mixed.astype(dtype), self.conv[number], bias, tables, batch
        )
        mixed = paged.apart(jax.nn.silu(mixed).astype(dtype).astype(jnp.float32))
        states_width = d.num_groups * d.state_size
        given, b, c = jnp.split(mixed, [d.width, d.width + states_width], axis=1)
        given = given.reshape(-1, d.num_heads, d.head_dim)
        b, c = (each.reshape(-1, d.num_groups, d.state_size) for each in (b, c))
        dt = jax.nn.softplus(dt + paged.in_float32(self.dt_bias, number))
        dt = jnp.clip(dt, *d.dt_limit)
        log_decay = -jnp.exp(paged.in_float32(self.a_log, number)) * dt
        out, new = paged.advance(kept, c, b, given * dt[..., None], log_decay, None, tables, batch)
        cache = cache.with_states(new | {"conv": rows})
        skipped = paged.apart(given * paged.in_float32(self.d, number)[:, None])
        out = paged.apart(out) + skipped
        out = out.reshape(z.shape).astype(dtype).astype(jnp.float32)
        gate = jax.nn.silu(z.astype(dtype).astype(jnp.float32))
        if d.norm == "before_gate":
            out = self._normed(out, number, dtype).astype(jnp.float32) * gate
        else:
            out = paged.apart(out * gate)
        if d.norm == "after_gate":
            out = self._normed(out, number, dtype)
        return times(total(self.shards, self.out.pieces(out.astype(dtype), number)), d.out_scale), cache

    def _sections_scaled(self, x: Float[Array, "num_tokens width"]) -> Float[Array, "num_tokens width"]:
        """Return z, x, B, C and dt, each times a factor of its own."""
        d = self.description
        if not d.section_scales:
            return x
        of_states = d.num_groups * d.state_size
        sizes = (d.width, d.width, of_states, of_states, d.num_heads)
        factors = np.repeat(np.array(d.section_scales, np.float32), sizes)
        return paged.apart(x * factors)

    def _normed(
        self, x: Float[Array, "num_tokens width"], number: int, dtype: jnp.dtype
    ) -> Float[Array, "num_tokens width"]:
        """Return numbers divided by the root of their group's mean square, times weights."""
        assert self.norm is not None
        grouped = x.reshape(x.shape[0], self.description.norm_groups, -1)
        grouped = grouped * lax.rsqrt(row_sums.mean(grouped * grouped) + self.eps)
        if self.description.norm_in_float32:
            return grouped.reshape(x.shape) * self.norm[number].astype(jnp.float32)
        return grouped.reshape(x.shape).astype(dtype) * self.norm[number].astype(dtype)
