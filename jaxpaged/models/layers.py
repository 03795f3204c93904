"""The layers that models share. A model is built from its weights' arrays, not filled later."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Num

from jaxpaged.models.config import RopeScaling
from pallas_kernels import native

Layer = int | Int[Array, ""]  # a layer's number, counted from 0; an array in a loop over layers


def loops_over_layers(dtype: jnp.dtype) -> bool:
    """Whether a program computes layers in a loop, so that it does not grow with their number.

    Not where XLA multiplies: it would copy a layer's weights out of the array of all in every turn, or, on a
    GPU, read their place on the host, and then the serving loop is no CUDA graph (LOG.md).
    """
    return native.serves(dtype)


class Stack(nnx.Module):
    """An array for each layer: side by side in one array for a loop over layers, else one by one."""

    def __init__(self, arrays: Sequence[Num[Array, "..."]], dtype: jnp.dtype) -> None:
        if loops_over_layers(dtype):
            self.all: Any = nnx.Param(jnp.stack(arrays))
        else:
            self.all = nnx.List(nnx.Param(array) for array in arrays)

    def __getitem__(self, layer: Layer) -> Num[Array, "..."]:
        if isinstance(self.all, nnx.List):
            assert isinstance(layer, int)
            return self.all[layer][...]
        return lax.dynamic_index_in_dim(self.all[...], layer, keepdims=False)


class Linear(nnx.Module):
    """Each layer's `x @ weight.T + bias`, summed in float32; the result stays so, for the caller to round
    once.
    """

    def __init__(
        self,
        weights: Sequence[Float[Array, "out_features in_features"]],
        biases: Sequence[Float[Array, " out_features"]] | None = None,
    ) -> None:
        self.out_features, dtype = weights[0].shape[0], weights[0].dtype
        self.is_packed = native.serves(dtype)
        self.kernel = Stack([native.pack(w) if self.is_packed else w.T for w in weights], dtype)
        self.bias = None if biases is None else Stack(biases, dtype)

    def __call__(
        self, x: Float[Array, "num_tokens in_features"], layer: Layer = 0
    ) -> Float[Array, "num_tokens out_features"]:
        if self.is_packed:
            y = native.product(x, self.kernel.all[...], self.out_features, layer)
        else:
            y = _dot(x, self.kernel[layer], contract=0)
        return y if self.bias is None else y + self.bias[layer].astype(jnp.float32)


def unembed(
    hidden: Float[Array, "num_tokens hidden"], table: Float[Array, "vocab hidden"]
) -> Float[Array, "num_tokens vocab"]:
    """`hidden @ table.T` in float32: the table has an embedding's layout, so a tied one serves as it is."""
    return _dot(hidden, table, contract=1)


def _dot(
    x: Float[Array, "num_tokens in_features"], kernel: Float[Array, "..."], contract: int
) -> Float[Array, "num_tokens out_features"]:
    """XLA's product of x and a kernel whose axis `contract` is the inputs, in float32."""
    num_tokens = x.shape[0]
    if num_tokens == 1 and x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        # One row of bfloat16 runs at 2 GFLOP/s there, two at 40.
        x = jnp.concatenate([x, x])
    dimensions = (((1,), (contract,)), ((), ()))
    return lax.dot_general(x, kernel, dimensions, preferred_element_type=jnp.float32)[:num_tokens]


class RMSNorm(nnx.Module):
    """Each layer's `x / sqrt(mean(x^2) + eps) * weight`, in float32, rounded before the weight as HF does."""

    def __init__(self, weights: Sequence[Float[Array, " features"]], eps: float) -> None:
        self.weight = Stack(weights, weights[0].dtype)
        self.eps = eps

    def __call__(
        self, x: Float[Array, "num_tokens features"], layer: Layer = 0
    ) -> Float[Array, "num_tokens features"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * lax.rsqrt(mean_square + self.eps)).astype(x.dtype) * self.weight[layer]


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Float[Array, " half_dim"]:
    """Radians a position for each pair of coordinates: `theta ** (-2 i / head_dim)`, Llama 3 scaled if asked.

    Llama 3 leaves fast frequencies alone (more than `high_freq_factor` turns in the original length), divides
    slow ones by `factor` (fewer than `low_freq_factor` turns), and blends between.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_len * frequencies / (2 * jnp.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rope_angles(
    positions: Int[Array, " num_tokens"], frequencies: Float[Array, " half_dim"]
) -> tuple[Float[Array, "num_tokens 1 half_dim"], Float[Array, "num_tokens 1 half_dim"]]:
    """Cosines and sines of each token's turns, ready to be shared by all layers and heads."""
    angle = positions[:, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(
    x: Float[Array, "num_tokens num_heads head_dim"],
    cos: Float[Array, "num_tokens 1 half_dim"],
    sin: Float[Array, "num_tokens 1 half_dim"],
) -> Float[Array, "num_tokens num_heads head_dim"]:
    """Turn the pairs (x[i], x[i + head_dim / 2]) by their angles: Hugging Face's order of coordinates."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
