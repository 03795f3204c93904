"""Mamba-1: Jamba, Falcon Mamba and Mamba."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxpaged import row_sums
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models import layers
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.feed_forward import linear, stack
from jaxpaged.models.mixers import paged
from jaxpaged.models.mixers.description import OnOneDevice, Shape, check_sizes
from jaxpaged.models.weights import Weights
from pallas_kernels.ops import states

NORMED = ("dt", "b", "c")


@dataclass(frozen=True, kw_only=True)
class Mamba1(OnOneDevice):
    """Mamba-1 (Gu and Dao 2023): channels whose decays differ by state number, with B and C for all."""

    name: ClassVar[str] = "mamba1"
    width: int  # channels
    state_size: int  # numbers of a channel's state
    dt_rank: int  # numbers from which the time steps of all channels are made
    kernel_size: int
    conv_bias: bool = True
    bias: bool = False  # of the first and the last projection
    norms: Literal["none", "plain", "weighted"] = "none"  # of dt, B and C
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        """Check the sizes, which come from files. Raises `InputError`."""
        check_sizes(self, "width", "state_size", "dt_rank", "kernel_size")

    def weights(self, hidden_size: int) -> dict[str, Shape]:
        """Return the shapes of a layer's weights by role: `in` has x and z, `x` has dt, B and C."""
        shapes: dict[str, Shape] = {
            "mixer.in.weight": (2 * self.width, hidden_size),
            "mixer.conv.weight": (self.kernel_size, self.width),
            "mixer.x.weight": (self.dt_rank + 2 * self.state_size, self.width),
            "mixer.dt.weight": (self.width, self.dt_rank),
            "mixer.dt_bias": (self.width,),
            "mixer.a_log": (self.width, self.state_size),
            "mixer.d": (self.width,),
            "mixer.out.weight": (hidden_size, self.width),
        }
        if self.norms == "weighted":
            sizes = (self.dt_rank, self.state_size, self.state_size)
            shapes |= {f"mixer.{name}_norm.weight": (size,) for name, size in zip(NORMED, sizes, strict=True)}
        if self.conv_bias:
            shapes["mixer.conv.bias"] = (self.width,)
        if self.bias:
            shapes |= {"mixer.in.bias": (2 * self.width,), "mixer.out.bias": (hidden_size,)}
        return shapes

    def pieces(self, role: str, count: int) -> list[int] | None:
        """Return None: every role is one tensor."""
        return None

    def arrays(self, block_size: int, dtype: jnp.dtype) -> dict[str, tuple[Shape, jnp.dtype]]:
        """Return the arrays of `ops.states.SelectiveBlocks`, and the convolution's inputs in `dtype`."""
        float32 = jnp.dtype("float32")
        return {
            "state": ((self.width, self.state_size), float32),
            "dt": ((block_size, self.width), float32),
            "x": ((block_size, self.width), float32),
            "b": ((block_size, self.state_size), float32),
            "conv": ((block_size, self.width), dtype),
        }


class Mamba1Mixer(nnx.Module):
    """A convolution of x, the recurrence with dt, B and C that x gives, and a gate."""

    def __init__(self, weights: Weights, description: Mamba1) -> None:
        self.description = description
        names = ("in", "x", "dt", "out")
        self.into, self.of_x, self.dt, self.out = (linear(weights, f"mixer.{name}") for name in names)
        self.conv, self.conv_bias = paged.stacked(weights, "conv.weight"), stack(weights, "mixer.conv.bias")
        roles = ("a_log", "d", "dt_bias")
        self.a_log, self.d, self.dt_bias = (paged.stacked(weights, name) for name in roles)
        is_weighted = description.norms == "weighted"
        self.norms = nnx.List(paged.stacked(weights, f"{name}_norm.weight") for name in NORMED if is_weighted)

    def __call__(
        self, x: Float[Array, "num_tokens hidden"], cache: KVCache, number: int, batch: PassBatch
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """Compute the state layer of this number. Return its output in float32, and the cache."""
        dtype = x.dtype
        kept, tables = cache.states_of(), paged.tables_of(cache, number, batch)
        mixed, z = jnp.split(self.into(x, number), 2, axis=1)
        bias = None if self.conv_bias is None else self.conv_bias[number]
        mixed, rows = paged.convolve(
            kept["conv"], mixed.astype(dtype), self.conv[number], bias, tables, batch
        )
        given = paged.apart(jax.nn.silu(mixed).astype(dtype))
        dt, b, c = self._normed(self.of_x(given, number).astype(dtype), number)
        steps = paged.apart(self.dt(dt, number)) + paged.in_float32(self.dt_bias, number)
        decay = -jnp.exp(paged.in_float32(self.a_log, number))
        names = ("state", "dt", "x", "b")
        blocks = states.SelectiveBlocks(**{name: kept[name] for name in names})

        def compute(
            blocks: states.SelectiveBlocks, tokens: tuple[Array, ...], *places: Array
        ) -> tuple[Array, states.SelectiveBlocks]:
            x, dt, b, c = tokens
            return states.selective_scan(blocks, x, dt, b, c, decay, *places)

        tokens = given.astype(jnp.float32), paged.apart(jax.nn.softplus(steps)), b, c
        out, blocks = paged.over_tiles(compute, blocks, tokens, tables, batch)
        cache = cache.with_states({name: getattr(blocks, name) for name in names} | {"conv": rows})
        skipped = given.astype(jnp.float32) * paged.in_float32(self.d, number)
        out = paged.apart(out) + paged.apart(skipped)
        out = out * jax.nn.silu(z.astype(dtype).astype(jnp.float32))
        return self.out(out.astype(dtype), number), cache

    def _normed(
        self, x: Float[Array, "num_tokens width"], number: int
    ) -> tuple[
        Float[Array, "num_tokens dt_rank"], Float[Array, "num_tokens n"], Float[Array, "num_tokens n"]
    ]:
        """Return dt in the model's dtype, and B and C in float32, each normed if the model does it."""
        d = self.description
        dt, b, c = jnp.split(x, [d.dt_rank, d.dt_rank + d.state_size], axis=1)
        if d.norms != "none":
            weights = self.norms or (None, None, None)
            dt, b, c = (self._norm(*each, number) for each in zip((dt, b, c), weights, strict=True))
        return dt, b.astype(jnp.float32), c.astype(jnp.float32)

    def _norm(
        self, x: Float[Array, "num_tokens width"], weight: layers.Stack | None, number: int
    ) -> Float[Array, "num_tokens width"]:
        wide = paged.apart(x.astype(jnp.float32))
        wide = (wide * lax.rsqrt(row_sums.mean(wide * wide) + self.description.norm_eps)).astype(x.dtype)
        return wide if weight is None else wide * weight[number].astype(x.dtype)
