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

from jaxpaged import row_sums
from jaxpaged.models.change import Change, StackChange
from jaxpaged.models.host_arrays import aligned, placed, put
from jaxpaged.models.layer_form import LayerForm, form_of
from jaxpaged.models.quantised.codes import QuantisedWeight
from jaxpaged.models.ropes import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from pallas_kernels import native, ops
from pallas_kernels.gpu import dense_product
from pallas_kernels.ops import ProductImplementation, low_rank
from pallas_kernels.xla import products as xla

Values = Array | np.ndarray  # a weight during loading
type Weight = Float[Values, "..."] | QuantisedWeight | Change
Layer = int | Int[Array, ""]  # a layer's number, counted from 0; an array in a loop over layers


def kind_of[T](kinds: Sequence[T], each: Sequence[T], layer: Layer) -> Layer:
    """Return the number of a layer's kind in `kinds`; `each` has the kind of every layer."""
    numbers = np.array([kinds.index(kind) for kind in each], np.int32)
    return int(numbers[layer]) if isinstance(layer, int) else jnp.asarray(numbers)[layer]


def value_of(each: Sequence[int], layer: Layer) -> Layer:
    """Return a layer's entry of `each`, which has one for every layer; its number may be traced."""
    return each[layer] if isinstance(layer, int) else jnp.asarray(each, jnp.int32)[layer]


class Each:
    """Weights of which each is made when it is asked for, in turn.

    `groups`: where they are kept in several ways, for each way the layers' numbers, and their weights.
    """

    def __init__(
        self,
        count: int,
        make: Callable[[], Iterator[Any]],
        groups: "Sequence[tuple[Sequence[int], Each]]" = (),
    ) -> None:
        self._count, self._make, self.groups = count, make, groups

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return self._make()


def stacked(weights: Iterable[Any], count: int) -> Any:
    """Stack arrays, or records of arrays, in new ones; each is copied before the next is made."""
    together: Any = None
    rest = iter(weights)
    for i, weight in enumerate(rest):
        if isinstance(weight, Change):
            return StackChange([weight, *rest])
        if isinstance(jax.tree.leaves(weight)[0], jax.core.Tracer):
            return jax.tree.map(lambda *each: jnp.stack(each), weight, *rest)
        if together is None:
            together = jax.tree.map(lambda array: aligned((count, *array.shape), array.dtype), weight)
        jax.tree.map(lambda target, array, i=i: put(target[i], np.asarray(array)), together, weight)
    return jax.device_put(together)


def on_device(weight: Num[Values, "..."] | QuantisedWeight | Change) -> Any:
    """Put an array, or the arrays of a quantised weight, on the device. A change stays as it is."""
    if isinstance(weight, Change):
        return weight
    return jax.tree.map(placed, weight) if isinstance(weight, QuantisedWeight) else jnp.asarray(weight)


def is_quantised(weight: Any) -> bool:
    """Return whether a weight is quantised, or the change of one that is."""
    return isinstance(weight, QuantisedWeight) or (isinstance(weight, Change) and weight.is_quantised)


class Stack(nnx.Module):
    """A weight for each layer: side by side in one array for a loop over layers, else one by one."""

    def __init__(self, weights: Iterable[Any], count: int, *, together: bool) -> None:
        if together:
            self.all: Any = nnx.Param(stacked(weights, count))
        else:
            self.all = nnx.List(nnx.Param(on_device(weight)) for weight in weights)

    def __getitem__(self, layer: Layer) -> Num[Array, "..."]:
        if isinstance(self.all, nnx.List):
            assert isinstance(layer, int)
            return self.all[layer][...]
        return lax.dynamic_index_in_dim(self.all[...], layer, keepdims=False)

    def holding(self, layer: Layer) -> tuple[Any, Layer | None]:
        """Return the array that holds a layer's weight, and its index there; None: it is the whole array."""
        if isinstance(self.all, nnx.List):
            assert isinstance(layer, int)
            return self.all[layer].get_value(), None
        return self.all.get_value(), layer

    def multiply(
        self, x: Float[Array, "num_tokens in_features"], layer: Layer
    ) -> Float[Array, "num_tokens out_features"]:
        """Return `x @ weight.T` for a layer's quantised weight."""
        return quantised_product(x, *self.holding(layer))


class AdapterParam(nnx.Param):
    """The adapters of a product, a `LowRank`: see `models/lora.py`."""


class Linear(nnx.Module):
    """Each layer's `x @ weight.T + bias`, summed in float32; the result stays so, for the caller to round
    once. Where there is room for adapters, each tile of rows has what its own adds.
    """

    adapters: AdapterParam  # adapters' weights, if the engine has adapter slots

    def __init__(
        self,
        weights: Sequence[Float[Values, "out_features in_features"] | QuantisedWeight | Change] | Each,
        biases: Sequence[Float[Values, " out_features"] | Change] | Each | None = None,
        *,
        form: LayerForm | None = None,
        together: bool | None = None,
        num_pieces: int | None = None,
    ) -> None:
        """Make the product. `form` None: this machine's. `together`: in a stack; None: if layers are in a
        loop. `num_pieces`: weights of each layer, which divide its inputs: see `pieces`. None: one, whose
        inputs may be fused with what they are made of.
        """
        self.num_pieces, self.fuses_inputs = num_pieces or 1, num_pieces is None
        rest = iter(weights)
        first = next(rest)
        self.out_features = first.shape[0]
        self.is_quantised = is_quantised(first)
        form = form or form_of(jnp.dtype(first.dtype))
        together = form.loops if together is None else together
        self.implementation = form.stacked if together else form.own
        groups = weights.groups if isinstance(weights, Each) and together else ()
        each = itertools.chain([first], rest)
        del first  # its memory is released before the others are read
        if groups:
            self.places = nnx.Param(_places(len(weights), [numbers for numbers, _ in groups]))
            self.kernels = nnx.List(Stack(group, len(group), together=True) for _, group in groups)
        elif self.is_quantised:
            self.kernel = Stack(each, len(weights), together=together)
        else:
            kernels = (_packed(w, self.implementation) for w in each)
            self.kernel = Stack(kernels, len(weights), together=together)
        self.bias = None if biases is None else Stack(biases, len(biases), together=together)

    def __call__(
        self,
        x: Float[Array, "num_tokens in_features"],
        layer: Layer = 0,
        adapters: Int[Array, " num_tiles"] | None = None,
    ) -> Float[Array, "num_tokens out_features"]:
        return row_sums.tree_sum(self.pieces(x, layer, adapters))

    def pieces(
        self,
        x: Float[Array, "num_tokens in_features"],
        layer: Layer = 0,
        adapters: Int[Array, " num_tiles"] | None = None,
    ) -> list[Float[Array, "num_tokens out_features"]]:
        """Return the product of each piece of the inputs; their sum is the layer's output."""
        # What is fused must not depend on the number of pieces, for bits depend on it.
        x = x if self.fuses_inputs else lax.optimization_barrier(x)
        inputs = [x] if self.num_pieces == 1 else jnp.split(x, self.num_pieces, axis=-1)
        products = []
        for i, piece in enumerate(inputs):
            number = layer if self.num_pieces == 1 else layer * self.num_pieces + i
            y = self._product(piece, number)
            if self.bias is not None and i == 0:
                y = y + self.bias[layer].astype(jnp.float32)
            if adapters is not None:
                add = low_rank.add_by_xla if self.implementation == "xla" else low_rank.add
                y = add(y, piece, self.adapters.get_value(), number, adapters)
            products.append(y)
        return products

    def _product(
        self, x: Float[Array, "num_tokens in_features"], layer: Layer
    ) -> Float[Array, "num_tokens out_features"]:
        if self.is_quantised:
            return self._quantised(x, layer)
        if self.implementation == "native":
            packed, number = self.kernel.holding(layer)
            return native.product(x, packed, self.out_features, 0 if number is None else number)
        if self.implementation == "mosaic_gpu":
            packed, number = self.kernel.holding(layer)
            return dense_product.packed_product(x, packed, self.out_features, number)
        return xla.product(x, self.kernel[layer], contract=0)

    def _quantised(
        self, x: Float[Array, "num_tokens in_features"], layer: Layer
    ) -> Float[Array, "num_tokens out_features"]:
        if hasattr(self, "kernel"):
            return self.kernel.multiply(x, layer)
        kind, place = self.places[...][:, layer]
        return lax.switch(kind, [kernel.multiply for kernel in self.kernels], x, place)


# Order in which a product reads a weight [out_features, in_features].
PACKED: dict[ProductImplementation, Callable[[Any], Any]] = {
    "native": native.pack,
    "mosaic_gpu": dense_product.pack,
    "xla": lambda weight: weight.T,
}


def _packed(weight: Any, implementation: ProductImplementation) -> Any:
    pack = PACKED[implementation]
    return weight.mapped(pack) if isinstance(weight, Change) else pack(weight)


def _places(count: int, groups: Sequence[Sequence[int]]) -> Int[Array, "2 num_layers"]:
    """Return for each layer the number of its group, and its index in that group."""
    places = np.zeros((2, count), np.int32)
    for i, numbers in enumerate(groups):
        places[:, list(numbers)] = [[i] * len(numbers), range(len(numbers))]
    return jnp.asarray(places)


def look_up(
    table: Float[Array, "vocab hidden"] | QuantisedWeight, token_ids: Int[Array, " num_tokens"]
) -> Float[Array, "num_tokens hidden"]:
    """Return the tokens' rows of an embedding."""
    return table.rows(token_ids) if isinstance(table, QuantisedWeight) else table[token_ids]


def unembed(
    hidden: Float[Array, "num_tokens hidden"], table: Float[Array, "vocab hidden"] | QuantisedWeight
) -> Float[Array, "num_tokens vocab"]:
    """Return `hidden @ table.T` in float32; a tied embedding's table serves as it is stored."""
    if isinstance(table, QuantisedWeight):
        return quantised_product(hidden, table)
    return xla.product(hidden, table, contract=1)


def quantised_product(
    x: Float[Array, "num_tokens in_features"], weight: QuantisedWeight, layer: Layer | None = None
) -> Float[Array, "num_tokens out_features"]:
    """Return `x @ weight.T` in float32; `layer` chooses from a stack. Where XLA multiplies, the program
    widens the weight first; in memory it stays quantised.
    """
    pairs = zip(weight.ordered(x, layer), weight.segments, strict=True)
    products = [ops.quantised_product(part, segment, layer) for part, segment in pairs]
    return products[0] if len(products) == 1 else jnp.concatenate(products, axis=1)


class RMSNorm(nnx.Module):
    """Each layer's `x / sqrt(mean(x^2) + eps) * weight`, in float32, rounded before the weight as HF does.

    With an offset it is `* (offset + weight)`, and rounded behind it.
    """

    def __init__(self, weights: Stack, eps: float, offset: float = 0.0) -> None:
        self.weight, self.eps, self.offset = weights, eps, offset

    def __call__(
        self,
        x: Float[Array, "*num_tokens features"],
        layer: Layer = 0,
        mean: Callable[[Array], Array] = row_sums.mean,  # over the features of all shards
    ) -> Float[Array, "*num_tokens features"]:
        wide = x.astype(jnp.float32)
        mean_square = mean(wide * wide)
        normed = wide * lax.rsqrt(mean_square + self.eps)
        if self.offset:
            return (normed * (self.offset + self.weight[layer].astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * self.weight[layer]


class LayerNorm(nnx.Module):
    """Each layer's `(x - mean(x)) / sqrt(var(x) + eps) * (offset + weight) + bias`, in float32."""

    def __init__(self, weights: Stack, biases: Stack | None, eps: float, offset: float = 0.0) -> None:
        self.weight, self.bias, self.eps, self.offset = weights, biases, eps, offset

    def __call__(
        self, x: Float[Array, "*num_tokens features"], layer: Layer = 0
    ) -> Float[Array, "*num_tokens features"]:
        wide = x.astype(jnp.float32)
        wide = wide - row_sums.mean(wide)
        variance = row_sums.mean(wide * wide)
        weight = self.weight[layer].astype(jnp.float32)
        if self.offset:
            weight = self.offset + weight
        y = wide * lax.rsqrt(variance + self.eps) * weight
        if self.bias is not None:
            y = y + self.bias[layer].astype(jnp.float32)
        return y.astype(x.dtype)


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.gelu(x, approximate=True)


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.gelu(x, approximate=False)


def relu2(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.square(jax.nn.relu(x))


def soft_capped(x: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Return `cap * tanh(x / cap)`.

    Its bounds keep the product apart from a sum behind it: as one instruction the two would have other bits,
    and it depends on the program whether they are one.
    """
    return lax.clamp(-cap, cap * jnp.tanh(x / cap), cap)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": jax.nn.relu,
    "relu2": relu2,
}


def rope_frequencies(rope: Rope, max_len: int) -> tuple[Float[Array, " half_dim"], float]:
    """Return radians a position for each pair of coordinates, and a factor of cosines and sines.

    `theta ** (-2 i / dim)`, scaled if asked; `max_len` is how long a sequence may get.
    """
    frequencies = rope.theta ** (-jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim)
    match rope.scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case DynamicScaling(factor=factor, original_max_len=original):
            if max_len <= original:
                return frequencies, 1.0
            return frequencies * _dynamic(rope.dim, factor), 1.0
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling), 1.0
        case ProportionalScaling(num_pairs=num_pairs, factor=factor):
            turns = jnp.arange(len(frequencies)) < num_pairs
            return jnp.where(turns, frequencies / factor, 0.0), 1.0
        case YarnScaling():
            return _yarn(frequencies, rope, rope.scaling), rope.scaling.attention_factor
        case LongScaling() as scaling:
            is_long = max_len > scaling.original_max_len
            factors = scaling.long_factors if is_long else scaling.short_factors
            return frequencies / jnp.asarray(factors, jnp.float32), scaling.attention_factor


def _dynamic(dim: int, factor: float) -> Float[Array, " half_dim"]:
    """Return what turns frequencies into those of a theta for `factor` times the original length."""
    larger = (factor * factor - (factor - 1)) ** (dim / (dim - 2))
    return larger ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)


def _llama3(frequencies: Float[Array, " half_dim"], scaling: Llama3Scaling) -> Float[Array, " half_dim"]:
    """Scale frequencies as Llama 3 does. Fast ones stay (more than `high_freq_factor` turns in the original
    length), slow ones are divided by `factor` (fewer than `low_freq_factor` turns), others are blended.
    """
    turns = scaling.original_max_len * frequencies / (2 * jnp.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _yarn(
    frequencies: Float[Array, " half_dim"], rope: Rope, scaling: YarnScaling
) -> Float[Array, " half_dim"]:
    """Scale frequencies as YaRN does: a ramp over the pairs, from `beta_fast` turns to `beta_slow`."""

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
    """Return cosines and sines of each token's angles, for all layers and heads."""
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

    Products are rounded before they are added, whatever the number of tokens and heads.
    """
    half = cos.shape[-1]
    a, b, rest = jnp.split(x, [half, 2 * half], axis=-1)
    turned = [
        row_sums.rounded(a * cos) - row_sums.rounded(b * sin),
        row_sums.rounded(b * cos) + row_sums.rounded(a * sin),
    ]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)
