"""The layers that models share. A model is built from its weights' arrays, not filled later."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Num

from jaxpaged.models.config import LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling
from pallas_kernels import native

Values = Array | np.ndarray  # a weight that is being made
Layer = int | Int[Array, ""]  # a layer's number, counted from 0; an array in a loop over layers


def kind_of[T](kinds: Sequence[T], each: Sequence[T], layer: Layer) -> Layer:
    """Which of the kinds a layer is of, if `each` has every layer's."""
    numbers = np.array([kinds.index(kind) for kind in each], np.int32)
    return int(numbers[layer]) if isinstance(layer, int) else jnp.asarray(numbers)[layer]


def loops_over_layers(dtype: jnp.dtype) -> bool:
    """Whether a program computes layers in a loop, so that it does not grow with their number.

    Not where XLA multiplies: it would copy a layer's weights out of the array of all in every turn, or, on a
    GPU, read their place on the host, and then the serving loop is no CUDA graph (LOG.md).
    """
    return native.serves(dtype)


class Each:
    """Arrays of which each is made when it is asked for, in turn."""

    def __init__(self, count: int, make: Callable[[], Iterator[Num[Values, "..."]]]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Num[Values, "..."]]:
        return self._make()


def stacked(arrays: Iterable[Num[Values, "..."]], count: int) -> Num[Array, "..."]:
    """The arrays side by side in a new one, where each is put before the next is made."""
    together, arrays = None, iter(arrays)
    for i, array in enumerate(arrays):
        if isinstance(array, jax.core.Tracer):
            return jnp.stack([array, *arrays])
        if together is None:
            together = _aligned((count, *array.shape), array.dtype)
        _put(together[i], np.asarray(array))
    return jax.device_put(together)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that begins where JAX's on a CPU may: there it becomes one of them without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


_ALIGNMENT = 64


def _put(target: np.ndarray, values: np.ndarray) -> None:
    """Two numbers of two bytes at a time, where they stay neighbours: twice as fast."""
    if values.itemsize == 2 and values.ndim and values.shape[-1] % 2 == 0 and values.strides[-1] == 2:
        target, values = target.view(np.uint32), values.view(np.uint32)
    target[...] = values


class Stack(nnx.Module):
    """An array for each layer: side by side in one array for a loop over layers, else one by one."""

    def __init__(self, arrays: Iterable[Num[Values, "..."]], count: int, *, together: bool) -> None:
        if together:
            self.all: Any = nnx.Param(stacked(arrays, count))
        else:
            self.all = nnx.List(nnx.Param(jnp.asarray(array)) for array in arrays)

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
        weights: Sequence[Float[Values, "out_features in_features"]] | Each,
        biases: Sequence[Float[Values, " out_features"]] | Each | None = None,
        *,
        together: bool | None = None,
    ) -> None:
        rest = iter(weights)
        first = next(rest)
        self.out_features, dtype = first.shape[0], first.dtype
        self.is_packed = native.serves(dtype)
        together = loops_over_layers(dtype) if together is None else together
        each = itertools.chain([first], rest)
        del first  # it need not stay while the others are read
        kernels = (native.pack(w) if self.is_packed else w.T for w in each)
        self.kernel = Stack(kernels, len(weights), together=together)
        self.bias = None if biases is None else Stack(biases, len(biases), together=together)

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
    """Each layer's `x / sqrt(mean(x^2) + eps) * weight`, in float32, rounded before the weight as HF does.

    With an offset it is `* (offset + weight)`, and rounded behind it.
    """

    def __init__(self, weights: Stack, eps: float, offset: float = 0.0) -> None:
        self.weight, self.eps, self.offset = weights, eps, offset

    def __call__(
        self, x: Float[Array, "*num_tokens features"], layer: Layer = 0
    ) -> Float[Array, "*num_tokens features"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * lax.rsqrt(mean_square + self.eps)
        if self.offset:
            return (normed * (self.offset + self.weight[layer].astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * self.weight[layer]


class LayerNorm(nnx.Module):
    """Each layer's `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, in float32."""

    def __init__(self, weights: Stack, biases: Stack | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weights, biases, eps

    def __call__(
        self, x: Float[Array, "*num_tokens features"], layer: Layer = 0
    ) -> Float[Array, "*num_tokens features"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
        y = wide * lax.rsqrt(variance + self.eps) * self.weight[layer].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[layer].astype(jnp.float32)
        return y.astype(x.dtype)


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.gelu(x, approximate=True)


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": jax.nn.relu,
}


def rope_frequencies(rope: Rope, max_len: int) -> tuple[Float[Array, " half_dim"], float]:
    """Radians a position for each pair of coordinates, and a factor of cosines and sines.

    `theta ** (-2 i / dim)`, scaled if asked; `max_len` is how long a sequence may get.
    """
    frequencies = rope.theta ** (-jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim)
    match rope.scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling), 1.0
        case YarnScaling():
            return _yarn(frequencies, rope, rope.scaling), rope.scaling.attention_factor
        case LongScaling() as scaling:
            is_long = max_len > scaling.original_max_len
            factors = scaling.long_factors if is_long else scaling.short_factors
            return frequencies / jnp.asarray(factors, jnp.float32), scaling.attention_factor


def _llama3(frequencies: Float[Array, " half_dim"], scaling: Llama3Scaling) -> Float[Array, " half_dim"]:
    """Llama 3 leaves fast frequencies alone (more than `high_freq_factor` turns in the original length),
    divides slow ones by `factor` (fewer than `low_freq_factor` turns), and blends between.
    """
    turns = scaling.original_max_len * frequencies / (2 * jnp.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _yarn(
    frequencies: Float[Array, " half_dim"], rope: Rope, scaling: YarnScaling
) -> Float[Array, " half_dim"]:
    """YaRN does so with a ramp over the pairs' numbers, from that of `beta_fast` turns to `beta_slow`."""

    def pair_of(turns: float) -> float:
        wave = scaling.original_max_len / (turns * 2 * math.pi)
        return rope.dim * math.log(wave) / (2 * math.log(rope.theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    width = last - first or 0.001
    slow = jnp.clip((jnp.arange(rope.dim // 2, dtype=jnp.float32) - first) / width, 0, 1)
    return frequencies * (1 - slow + slow / scaling.factor)


def rope_angles(
    positions: Int[Array, " num_tokens"], frequencies: Float[Array, " half_dim"], factor: float = 1.0
) -> tuple[Float[Array, "num_tokens 1 half_dim"], Float[Array, "num_tokens 1 half_dim"]]:
    """Cosines and sines of each token's turns, ready to be shared by all layers and heads."""
    angle = positions[:, None, None].astype(jnp.float32) * frequencies
    if factor != 1.0:
        return jnp.cos(angle) * factor, jnp.sin(angle) * factor
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(
    x: Float[Array, "num_tokens num_heads head_dim"],
    cos: Float[Array, "num_tokens 1 half_dim"],
    sin: Float[Array, "num_tokens 1 half_dim"],
) -> Float[Array, "num_tokens num_heads head_dim"]:
    """Turn the pairs (x[i], x[i + dim / 2]) of the first `dim` coordinates by their angles: Hugging Face's
    order of coordinates.
    """
    half = cos.shape[-1]
    a, b, rest = jnp.split(x, [half, 2 * half], axis=-1)
    turned = [a * cos - b * sin, b * cos + a * sin]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)
