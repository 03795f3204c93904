"""Gated short convolution: LFM2."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.feed_forward import linear, stack
from jaxpaged.models.mixers import paged
from jaxpaged.models.mixers.description import ShortConvolution
from jaxpaged.models.weights import Weights


class ShortConvolutionMixer(nnx.Module):
    """`out(C * conv(B * x))`, with B, C and x of one projection."""

    def __init__(self, weights: Weights, description: ShortConvolution) -> None:
        self.description = description
        self.into, self.out = linear(weights, "mixer.in"), linear(weights, "mixer.out")
        self.conv, self.bias = paged.stacked(weights, "conv.weight"), stack(weights, "mixer.conv.bias")

    def __call__(
        self, x: Float[Array, "num_tokens hidden"], cache: KVCache, number: int, batch: PassBatch
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """Compute the state layer of this number. Return its output in float32, and the cache."""
        dtype, tables = x.dtype, paged.tables_of(cache, number, batch)
        b, c, given = jnp.split(self.into(x, number).astype(dtype), 3, axis=1)
        bias = None if self.bias is None else self.bias[number]
        rows = cache.states_of()["conv"]
        out, rows = paged.convolve(rows, b * given, self.conv[number], bias, tables, batch)
        return self.out(c * out.astype(dtype), number), cache.with_states({"conv": rows})
