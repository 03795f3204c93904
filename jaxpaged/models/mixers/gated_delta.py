"""Gated delta rule: Qwen3-Next, Qwen3.5 and their descendants."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxpaged import row_sums
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.feed_forward import linear
from jaxpaged.models.mixers import paged
from jaxpaged.models.mixers.description import GatedDelta
from jaxpaged.models.weights import Weights

EPS = 1e-6  # of the norms of queries and keys


class GatedDeltaMixer(nnx.Module):
    """A convolution of q, k and v, the gated delta rule, and a gated norm of each head."""

    def __init__(self, weights: Weights, description: GatedDelta) -> None:
        self.description, self.eps = description, weights.config.norm_eps
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
        out, new = paged.advance(kept, q, k, v, log_decay, jax.nn.sigmoid(b), tables, batch)
        cache = cache.with_states(new | {"conv": rows})
        out = paged.apart(out)
        mean_square = row_sums.mean(out * out)
        out = out * lax.rsqrt(mean_square + self.eps)
        out = (out * paged.in_float32(self.norm, number)).astype(dtype).astype(jnp.float32)
        out = (out.reshape(z.shape) * jax.nn.silu(z.astype(dtype).astype(jnp.float32))).astype(dtype)
        return self.out(out, number), cache


def _unit(x: Float[Array, "num_tokens heads dim"]) -> Float[Array, "num_tokens heads dim"]:
    """Return each head divided by its length."""
    return x * lax.rsqrt(row_sums.mean(x * x) * x.shape[-1] + EPS)
