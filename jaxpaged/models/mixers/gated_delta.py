"""Gated delta rule: Qwen3-Next, Qwen3.5 and their descendants."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxpaged import row_sums
from jaxpaged.checks import check
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.feed_forward import linear, times
from jaxpaged.models.mixers import paged
from jaxpaged.models.mixers.description import Shape, check_divided, check_sizes, state_arrays
from jaxpaged.models.shards import total
from jaxpaged.models.weights import Weights

EPS = 1e-6  # of the norms of queries and keys


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Gated delta rule of Qwen3-Next (Yang and others 2024), behind a short convolution of q, k and v."""

    name: ClassVar[str] = "gated_delta"
    num_heads: int  # of values; each key head serves `num_heads / num_key_heads` of them
    num_key_heads: int
    k_dim: int
    v_dim: int
    kernel_size: int
    most_beta: float = 1.0  # largest strength of the correction
    norm_eps: float | None = None  # of the output's norm; None: the model's

    def __post_init__(self) -> None:
        """Check the sizes, which come from files. Raises `InputError`."""
        check_sizes(self, "num_heads", "num_key_heads", "k_dim", "v_dim", "kernel_size")
        rule = f"a multiple of the {self.num_key_heads} key heads"
        check("model config: value heads", self.num_heads, rule, self.num_heads % self.num_key_heads == 0)

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: all of q, k and v."""
        return 2 * self.num_key_heads * self.k_dim + self.num_heads * self.v_dim

    def weights(self, hidden_size: int) -> dict[str, Shape]:
        """Return the shapes of a layer's weights by role: `in` has q, k, v and z, `ba` has b and a."""
        width = self.num_heads * self.v_dim
        return {
            "mixer.in.weight": (self.num_channels + width, hidden_size),
            "mixer.ba.weight": (2 * self.num_heads, hidden_size),
            "mixer.conv.weight": (self.kernel_size, self.num_channels),
            "mixer.a_log": (self.num_heads,),
            "mixer.dt_bias": (self.num_heads,),
            "mixer.norm.weight": (self.v_dim,),
            "mixer.out.weight": (hidden_size, width),
        }

    def pieces(self, role: str, count: int) -> list[int] | None:
        """Return the outputs of q, k, v and of z, where they are two tensors or four; and the channels of
        three convolutions.
        """
        of_keys, of_values = self.num_key_heads * self.k_dim, self.num_heads * self.v_dim
        parts = {
            ("mixer.in.weight", 2): [self.num_channels, of_values],
            ("mixer.in.weight", 4): [of_keys, of_keys, of_values, of_values],
            ("mixer.conv.weight", 3): [of_keys, of_keys, of_values],
        }
        return parts.get((role, count))

    def arrays(self, block_size: int, dtype: jnp.dtype) -> dict[str, tuple[Shape, jnp.dtype]]:
        """Return the arrays of `ops.states.StateBlocks`, and the convolution's inputs in `dtype`."""
        return state_arrays(block_size, self.num_heads, self.num_key_heads, self.k_dim, self.v_dim) | {
            "conv": ((block_size, self.num_channels), dtype)
        }

    def divided(self, size: int) -> "GatedDelta":
        """Return the share of one of so many devices: key heads with the value heads that they serve."""
        check_divided(size, self, key_heads=self.num_key_heads)
        return replace(self, num_heads=self.num_heads // size, num_key_heads=self.num_key_heads // size)

    def sections(self, role: str) -> list[int]:
        """Return the widths of q, k, v and z, of b and a, or of numbers of heads."""
        of_keys, of_values = self.num_key_heads * self.k_dim, self.num_heads * self.v_dim
        sections = {
            "mixer.in.weight": [of_keys, of_keys, of_values, of_values],
            "mixer.ba.weight": [self.num_heads, self.num_heads],
            "mixer.conv.weight": [of_keys, of_keys, of_values],
            "mixer.a_log": [self.num_heads],
            "mixer.dt_bias": [self.num_heads],
        }
        return sections.get(role, [])


class GatedDeltaMixer(nnx.Module):
    """A convolution of q, k and v, the gated delta rule, and a gated norm of each head."""

    def __init__(self, weights: Weights, description: GatedDelta) -> None:
        self.description, self.shards = description, weights.shards
        self.eps = weights.config.norm_eps if description.norm_eps is None else description.norm_eps
        self.into, self.ba, self.out = (linear(weights, f"mixer.{name}") for name in ("in", "ba", "out"))
        roles = ("conv.weight", "a_log", "dt_bias", "norm.weight")
        self.conv, self.a_log, self.dt_bias, self.norm = (paged.stacked(weights, name) for name in roles)

    def __call__(
        self, x: Float[Array, "num_tokens hidden"], cache: KVCache, number: int, batch: PassBatch
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """Compute the state layer of this number. Return its output in float32, and the cache."""
        d, dtype = self.description, x.dtype
        kept, tables = cache.states_of(), paged.tables_of(cache, number, batch)
        mixed, z = jnp.split(self.into(x, number), [d.num_channels], axis=1)
        b, a = jnp.split(self.ba(x, number), 2, axis=1)
        weight = self.conv[number]
        mixed, rows = paged.convolve(kept["conv"], mixed.astype(dtype), weight, None, tables, batch)
        mixed = paged.apart(jax.nn.silu(mixed).astype(dtype).astype(jnp.float32))
        q, k, v = jnp.split(mixed, [d.num_key_heads * d.k_dim, 2 * d.num_key_heads * d.k_dim], axis=1)
        q, k = (_unit(each.reshape(-1, d.num_key_heads, d.k_dim)) for each in (q, k))
        log_decay = -jnp.exp(paged.in_float32(self.a_log, number)) * jax.nn.softplus(
            a + paged.in_float32(self.dt_bias, number)
        )
        q, v = q * d.k_dim**-0.5, v.reshape(-1, d.num_heads, d.v_dim)
        beta = times(jax.nn.sigmoid(b), d.most_beta)
        out, new = paged.advance(kept, q, k, v, log_decay, beta, tables, batch)
        cache = cache.with_states(new | {"conv": rows})
        out = paged.apart(out)
        mean_square = row_sums.mean(out * out)
        out = out * lax.rsqrt(mean_square + self.eps)
        out = (out * paged.in_float32(self.norm, number)).astype(dtype).astype(jnp.float32)
        out = (out.reshape(z.shape) * jax.nn.silu(z.astype(dtype).astype(jnp.float32))).astype(dtype)
        return total(self.shards, self.out.pieces(out, number)), cache


def _unit(x: Float[Array, "num_tokens heads dim"]) -> Float[Array, "num_tokens heads dim"]:
    """Return each head divided by its length."""
    return x * lax.rsqrt(row_sums.mean(x * x) * x.shape[-1] + EPS)
