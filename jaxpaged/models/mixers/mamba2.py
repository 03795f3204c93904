"""Mamba-2: Granite 4, Bamba, Nemotron-H and others."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxpaged import row_sums
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.feed_forward import linear, stack
from jaxpaged.models.mixers import paged
from jaxpaged.models.mixers.description import Mamba2
from jaxpaged.models.weights import Weights


class Mamba2Mixer(nnx.Module):
    """A convolution of x, B and C, the recurrence, and a gated norm."""

    def __init__(self, weights: Weights, description: Mamba2) -> None:
        self.description, self.eps = description, weights.config.norm_eps
        self.into, self.out = linear(weights, "mixer.in"), linear(weights, "mixer.out")
        self.conv, self.conv_bias = paged.stacked(weights, "conv.weight"), stack(weights, "mixer.conv.bias")
        roles = ("a_log", "d", "dt_bias", "norm.weight")
        self.a_log, self.d, self.dt_bias, self.norm = (paged.stacked(weights, name) for name in roles)

    def __call__(
        self, x: Float[Array, "num_tokens hidden"], cache: KVCache, number: int, batch: PassBatch
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """Compute the state layer of this number. Return its output in float32, and the cache."""
        d, dtype = self.description, x.dtype
        kept, tables = cache.states_of(), paged.tables_of(cache, number, batch)
        z, mixed, dt = jnp.split(self.into(x, number), [d.width, d.width + d.num_channels], axis=1)
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
        out = paged.apart(out) + given * paged.in_float32(self.d, number)[:, None]
        out = out.reshape(z.shape).astype(dtype).astype(jnp.float32)
        out = paged.apart(out * jax.nn.silu(z.astype(dtype).astype(jnp.float32)))
        grouped = out.reshape(out.shape[0], d.norm_groups, -1)
        grouped = grouped * lax.rsqrt(row_sums.mean(grouped * grouped) + self.eps)
        out = grouped.reshape(out.shape).astype(dtype) * self.norm[number].astype(dtype)
        return self.out(out, number), cache
