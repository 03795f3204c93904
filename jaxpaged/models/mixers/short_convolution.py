"""Gated short convolution: LFM2."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.feed_forward import linear, stack
from jaxpaged.models.mixers import paged
from jaxpaged.models.mixers.description import Shape, check_divided, check_sizes
from jaxpaged.models.shards import total
from jaxpaged.models.weights import Weights


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """LFM2's gated short convolution: `C * conv(B * x)` of three parts of one projection."""

    name: ClassVar[str] = "short_convolution"
    width: int
    kernel_size: int
    bias: bool = False  # of the convolution and both projections

    def __post_init__(self) -> None:
        """Check the sizes, which come from files. Raises `InputError`."""
        check_sizes(self, "width", "kernel_size")

    def weights(self, hidden_size: int) -> dict[str, Shape]:
        """Return the shapes of a layer's weights by role: `in` has B, C and x."""
        shapes: dict[str, Shape] = {
            "mixer.in.weight": (3 * self.width, hidden_size),
            "mixer.conv.weight": (self.kernel_size, self.width),
            "mixer.out.weight": (hidden_size, self.width),
        }
        if self.bias:
            shapes |= {
                "mixer.in.bias": (3 * self.width,),
                "mixer.conv.bias": (self.width,),
                "mixer.out.bias": (hidden_size,),
            }
        return shapes

    def pieces(self, role: str, count: int) -> list[int] | None:
        """Return None: every role is one tensor."""
        return None

    def arrays(self, block_size: int, dtype: jnp.dtype) -> dict[str, tuple[Shape, jnp.dtype]]:
        """Return the convolution's inputs in the model's dtype."""
        return {"conv": ((block_size, self.width), dtype)}

    def divided(self, size: int) -> "ShortConvolution":
        """Return the share of one of so many devices: channels."""
        check_divided(size, self, channels=self.width)
        return replace(self, width=self.width // size)

    def sections(self, role: str) -> list[int]:
        """Return the widths of B, C and x, or of the convolution's channels."""
        name = role.rpartition(".")[0]
        return {"mixer.in": [self.width] * 3, "mixer.conv": [self.width]}.get(name, [])


class ShortConvolutionMixer(nnx.Module):
    """`out(C * conv(B * x))`, with B, C and x of one projection."""

    def __init__(self, weights: Weights, description: ShortConvolution) -> None:
        self.description, self.shards = description, weights.shards
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
        pieces = self.out.pieces(c * out.astype(dtype), number)
        return total(self.shards, pieces), cache.with_states({"conv": rows})
