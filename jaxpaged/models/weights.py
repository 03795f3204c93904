"""A decoder's weights by their role in it, made of a file's tensors one by one, as they are asked for."""

import copy
import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.models import layers
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layer_form import form_of
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.mixers.description import IN_FLOAT32
from jaxpaged.models.names import (
    Names,
    Pieces,
    Shape,
    Tensors,
    in_expert,
    in_layer,
    layers_with,
    once,
    stored_pieces,
    stored_shapes,
    without_prefix,
)
from jaxpaged.models.quantised.codes import Quantisation, SegmentSpec, ShardSlice, zeros
from jaxpaged.models.shards import is_of_columns
from pallas_kernels import native


class Weights(ABC):
    """A decoder's weights by role, in the form that `load_as` asks for.

    `config` describes the whole decoder. With `load_as.shard` the weights are those of that shard alone.
    `quantisation` is what `load_as.quantization` means for these weights: see `Checkpoint.quantisation`.
    `names` may be None where nothing is quantised.
    """

    def __init__(
        self, config: ModelConfig, names: Names | None, load_as: LoadAs, quantisation: Quantisation | None
    ) -> None:
        self._whole, self._optional_names, self._quantisation = config, names, quantisation
        self._shard, self.dtype, self.form = load_as.shard, jnp.dtype(load_as.dtype), load_as.form
        # Config of the decoder to make.
        self.config = config if self._shard is None else self._shard.config
        self._pieces_of = None if self._shard is None else self._shard.pieces
        # Layers of different parts have no program in common; and where layers of two kinds write to a cache
        # in a loop, XLA would copy it.
        if not config.has_uniform_parts:
            self.form = form_of(self.dtype, loop_over_layers=False)
        if load_as.kinds:
            self.config = self.config.with_kinds(load_as.kinds)
        self.shards = None if self._shard is None else self._shard.shards
        if self.shards is not None and self.shards.size == 1:  # all but the pieces is the whole model's
            self._shard = None
        self._of_experts: dict[str, tuple[SegmentSpec, ...] | None] = {}

    @property
    def _names(self) -> Names:
        assert self._optional_names is not None
        return self._optional_names

    @abstractmethod
    def _made(
        self, role: str, shape: Shape, segments: tuple[SegmentSpec, ...] | None, **numbers: int
    ) -> layers.Weight:
        """Make the weight of a role; `shape` is the whole decoder's, `numbers` name its layer and expert."""

    @abstractmethod
    def _experts(self, role: str, shape: Shape, layer: int, num_experts: int) -> Iterator[layers.Weight]:
        """Make the weights of all experts of a layer, one after the other."""

    def get(self, role: str) -> layers.Weight | None:
        """Return a weight that the decoder has once; None where it has none of this role."""
        shape = once(self._whole).get(self._source(role))
        return None if shape is None else self._made(role, shape, self._segments(role, shape))

    def each(self, role: str) -> layers.Each | None:
        """Return those of the layers that have such a weight, in order; None where none has."""
        shape = in_layer(self._whole).get(role)
        if shape is None:
            return None
        places = list(itertools.product(layers_with(self._whole, role), self._pieces(role)))
        segments = [piece._segments(role, shape, layer=layer) for layer, piece in places]
        if None in segments:  # if one layer is unquantised, all are
            segments = [None] * len(segments)

        def of(numbers: Sequence[int], groups: Any = ()) -> layers.Each:
            def make() -> Iterator[layers.Weight]:
                for i in numbers:
                    layer, piece = places[i]
                    yield piece._made(role, shape, segments[i], layer=layer)

            return layers.Each(len(numbers), make, groups)

        ways = list(dict.fromkeys(segments))
        numbers = [[i for i, segment_way in enumerate(segments) if segment_way == way] for way in ways]
        return of(
            range(len(segments)), [(indices, of(indices)) for indices in numbers] if len(ways) > 1 else ()
        )

    def of_experts(self, role: str, numbers: Sequence[int]) -> layers.Each | None:
        """Return all experts' weights of these layers, a layer's experts side by side."""
        shape = in_expert(self._whole).get(role)
        if shape is None or self.config.experts is None:
            return None
        num_experts = self.config.experts.num_experts

        pieces = self._pieces(role)

        def make() -> Iterator[layers.Weight]:
            for layer in numbers:
                of_pieces = [piece._experts(role, shape, layer, num_experts) for piece in pieces]
                for of_expert in zip(*of_pieces, strict=True):
                    yield from of_expert

        return layers.Each(len(numbers) * num_experts * len(pieces), make)

    def num_pieces(self, role: str) -> int | None:
        """Return into how many weights those of a role, such as "o", are split by their inputs; None where
        that does not depend on the number of shards.
        """
        is_split = self.shards is not None and self.shards.sums_in_pieces and is_of_columns(role)
        return len(self._pieces(f"{role}.weight")) if is_split else None

    def _pieces(self, role: str) -> list["Weights"]:
        """Return the weights of which each makes a piece of a role's; itself where there is one."""
        pieces = [] if self._pieces_of is None else self._pieces_of(role)
        if len(pieces) < 2:
            return [self]
        made = [copy.copy(self) for _ in pieces]
        for weights, shard in zip(made, pieces, strict=True):
            weights._shard, weights._of_experts = shard, {}
        return made

    def _expert_segments(self, role: str, shape: Shape, num_experts: int) -> tuple[SegmentSpec, ...] | None:
        """Return the segments of all experts' weights, the same in all layers; None if they differ."""
        if self._quantisation is None:
            return None
        if role not in self._of_experts:
            count = num_experts if "{expert}" in self._names.pieces(role)[0] else 1
            numbers = itertools.product(layers_with(self._whole, role), range(count))
            ways = {self._segments(role, shape, layer=layer, expert=expert) for layer, expert in numbers}
            self._of_experts[role] = ways.pop() if len(ways) == 1 else None
        return self._of_experts[role]

    def _segments(self, role: str, shape: Shape, **numbers: int) -> tuple[SegmentSpec, ...] | None:
        """Return the segments of a role's weight; None where it is not quantised."""
        if self._quantisation is None:
            return None
        source = self._source(role)
        stored = list(stored_pieces(self._whole, self._names, source, shape, **numbers))
        if not stored:  # no file holds it
            return None
        segments = self._quantisation.segments(source, shape, stored, self._cut(role, shape))
        for kind, _ in segments or ():  # registers the products with XLA, also for programs loaded from disk
            native.serves(self.dtype, native.quantised_function(kind.bits, is_float=kind.is_float))
        return segments

    def _source(self, role: str) -> str:
        """Return the role in the whole decoder."""
        return role if self._shard is None else self._shard.source(role)

    def _cut(self, role: str, shape: Shape) -> ShardSlice | None:
        """Return the shard's slice of a weight; None for the whole model."""
        shard = self._shard
        return None if shard is None else ShardSlice(*shard.ranges(role, shape), shard.padding(role))


class StoredWeights(Weights):
    """The weights in a file's tensors, each read when it is asked for.

    Of a shard only its slices are read, with these exceptions. Quantisation groups, blocks and words that a
    slice cuts through are read whole. A GGUF file that is dequantised is read tensor by tensor. Of what is
    quantised on load, all inputs of `o` and `down` are read.

    Raises `InputError` for weights that are not the config's. A missing tensor, or one too many, is found at
    once; a wrong shape or type, or a number that is not finite, when the tensor is read.
    """

    def __init__(
        self,
        config: ModelConfig,
        names: Names,
        tensors: Tensors,
        load_as: LoadAs,
        quantisation: Quantisation | None = None,
    ) -> None:
        super().__init__(config, names, load_as, quantisation)
        self._tensors = without_prefix(names, tensors)
        check_names(config, names, self._tensors)

    def _experts(self, role: str, shape: Shape, layer: int, num_experts: int) -> Iterator[layers.Weight]:
        [first, *_] = self._names.pieces(role)
        if "{expert}" in first:
            segments = self._expert_segments(role, shape, num_experts)
            for i in range(num_experts):
                yield self._made(role, shape, segments, layer=layer, expert=i)
            return
        pieces = [
            self._read(name, (num_experts, *piece_shape))
            for name, piece_shape in stored_pieces(self._whole, self._names, role, shape, layer=layer)
        ]
        segments = self._expert_segments(role, shape, num_experts)
        for expert in range(num_experts):
            yield self._joined(role, [piece[expert] for piece in pieces], segments)

    def _made(
        self, role: str, shape: Shape, segments: tuple[SegmentSpec, ...] | None, **numbers: int
    ) -> layers.Weight:
        source = self._source(role)
        if source in self._names.filled:
            return self._formed(role, [np.full(shape, self._names.filled[source], np.float32)])
        stored = list(stored_pieces(self._whole, self._names, source, shape, **numbers))
        if segments is not None and self._quantisation is not None:
            restored = functools.partial(self._restored, role, layer=numbers.get("layer"))
            kept = self._quantisation.of_blocks(stored, restored, self.dtype, self._cut(role, shape))
            if kept is not None:
                return kept
        pieces = [self._read(name, piece_shape) for name, piece_shape in stored]
        return self._joined(role, pieces, segments, numbers.get("layer"))

    def _joined(
        self,
        role: str,
        pieces: Pieces,
        segments: tuple[SegmentSpec, ...] | None = None,
        layer: int | None = None,
    ) -> layers.Weight:
        return self._formed(role, self._restored(role, pieces, layer), segments)

    def _formed(
        self, role: str, pieces: Pieces, segments: tuple[SegmentSpec, ...] | None = None
    ) -> layers.Weight:
        """Make a weight of its pieces in the decoder's order: cut, joined, and quantised or converted."""
        shard = self._shard
        shape = sum(map(len, pieces)), *pieces[0].shape[1:]
        cut, quantised = self._cut(role, shape), None
        if cut is not None and (cut.inputs is None or segments is None):
            assert shard is not None
            pieces = _padded(shard.slices(role, pieces), shard.padding(role), pieces[0])
            cut = None
        if shard is not None:
            for piece in pieces:
                check_numbers(role, piece)
        whole = _concatenated(pieces)
        if segments is not None and self._quantisation is not None:  # all inputs are needed first
            quantised = self._quantisation.of_numbers(self._source(role), whole, self.dtype, cut)
        dtype = np.float32 if role in IN_FLOAT32 else self.dtype
        return quantised or whole.astype(dtype, copy=False)

    def _restored(self, role: str, pieces: Pieces, layer: int | None = None) -> Pieces:
        form, of_layers = self._names.forms.get(role), self._names.of_layers
        pieces = pieces if form is None else form.restored(self._whole, pieces)
        if of_layers is None or layer is None:
            return pieces
        return of_layers.restored(self._whole, role, layer, pieces)

    def _read(self, name: str, shape: Shape) -> np.ndarray:
        weight = self._tensors[name]
        check_form(name, weight, shape)
        if self._shard is None:
            check_numbers(name, weight)
        return weight


class AbstractWeights(Weights):
    """Zeros in place of the weights: for shapes, and for tracing."""

    def __init__(
        self,
        config: ModelConfig,
        load_as: LoadAs,
        names: Names | None = None,
        quantisation: Quantisation | None = None,
    ) -> None:
        super().__init__(config, names, load_as, quantisation)

    def _made(
        self, role: str, shape: Shape, segments: tuple[SegmentSpec, ...] | None, **numbers: int
    ) -> layers.Weight:
        if segments is not None:
            cut = self._cut(role, shape)
            return zeros(segments, shape[1] if cut is None else cut.width(shape[1]), self.dtype)
        dtype = jnp.float32 if role in IN_FLOAT32 else self.dtype
        whole = jnp.zeros(shape, dtype)  # traced if called in a trace
        if self._shard is None:
            return whole
        return jnp.concatenate(_padded(self._shard.slices(role, [whole]), self._shard.padding(role), whole))

    def _experts(self, role: str, shape: Shape, layer: int, num_experts: int) -> Iterator[layers.Weight]:
        segments = self._expert_segments(role, shape, num_experts)
        yield from (self._made(role, shape, segments) for _ in range(num_experts))


def _concatenated(pieces: Pieces) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _padded(taken: list[Any], padding: int, like: Any) -> list[Any]:
    """Append rows of zeros to a shard's slices of a role."""
    return [*taken, np.zeros((padding, *like.shape[1:]), like.dtype)] if padding else taken


def check_weights(config: ModelConfig, names: Names, tensors: Tensors) -> None:
    """Read all of them, and refuse any that is not the config's, as `StoredWeights` does."""
    tensors = without_prefix(names, tensors)
    check_names(config, names, tensors)
    for name, shape in stored_shapes(config, names):
        _check(name, np.asarray(tensors[name]), shape)


def check_names(config: ModelConfig, names: Names, stored_names: Iterable[str]) -> None:
    """Refuse files in which a weight is missing, or that have one too many."""
    wanted = dict(stored_shapes(config, names))
    stored_names = set(stored_names)
    for name in wanted:
        if name not in stored_names:
            raise InputError(f"the weights lack {name!r}, which the model config asks for")
    # Some files repeat a tied head.
    head = f"{names.table['lm_head']}.weight" if config.tie_word_embeddings else None
    for name in sorted(stored_names - wanted.keys()):
        if name != head and not names.is_spare(name):
            raise InputError(
                f"weight {name!r} is none that the model config asks for: the model is another one"
            )


def _check(name: str, weight: np.ndarray, shape: Shape) -> None:
    check_form(name, weight, shape)
    check_numbers(name, weight)


def check_form(name: str, weight: Any, shape: Shape) -> None:
    """Refuse an array of another shape, or of a type that no unquantised weight has."""
    if tuple(weight.shape) != shape:
        raise InputError(f"weight {name!r} has shape {tuple(weight.shape)}, must be {shape}")
    if weight.dtype.name not in ("float32", "bfloat16", "float16", "float64"):
        raise InputError(
            f"weight {name!r} has type {weight.dtype.name}, must be float32, bfloat16 or float16, or of a "
            "kind that config.json's quantization_config names, with its scales"
        )


def check_numbers(name: str, weight: np.ndarray) -> None:
    """Refuse an array with a number that is not finite."""
    if not _is_finite(weight):
        raise InputError(f"weight {name!r} has NaN or infinity in it, must be finite")


def _is_finite(weight: np.ndarray) -> bool:
    """Return whether all numbers are finite, without a copy of the weight's size."""
    flat = weight.reshape(-1)
    if weight.dtype.name == "bfloat16":  # NumPy has no arithmetic for bfloat16: check for exponents of ones
        bits = flat.view(np.uint16)
        return not any(np.any((bits[i : i + _CHUNK] & 0x7F80) == 0x7F80) for i in range(0, bits.size, _CHUNK))
    return all(bool(np.isfinite(flat[i : i + _CHUNK]).all()) for i in range(0, flat.size, _CHUNK))


_CHUNK = 1 << 18  # numbers per chunk, which fit a processor's cache


def random_weights(config: ModelConfig, names: Names, seed: int) -> dict[str, np.ndarray]:
    """Draw float32 weights that keep activations near 1 in size: for tests and for benchmarks of shapes."""
    rng = np.random.default_rng(seed)
    return {name: _drawn(rng, name, shape) for name, shape in stored_shapes(config, names)}


def _drawn(rng: np.random.Generator, name: str, shape: Shape) -> np.ndarray:
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    return np.asarray(noise * (0.1 if name.endswith("bias") else math.prod(shape[-1:]) ** -0.5))


class DrawnWeights(Mapping[str, np.ndarray]):
    """Random weights of a model by their names, like `random_weights`, each drawn when it is read.

    A weight depends on the seed and its name alone.
    """

    def __init__(self, config: ModelConfig, names: Names, seed: int) -> None:
        self._shapes, self._seed = dict(stored_shapes(config, names)), seed

    def __getitem__(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        return _drawn(np.random.default_rng([self._seed, *name.encode()]), name, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def by_role(config: ModelConfig, names: Names, tensors: Tensors) -> dict[str, np.ndarray]:
    """Return all weights as NumPy's float32, by names such as "layers.0.experts.1.down.bias". Oracles use
    them, which know no file.
    """
    weights = StoredWeights(config, names, tensors, LoadAs(jnp.dtype("float32")))
    weight_of: dict[str, Any] = {role: weights.get(role) for role in once(config)}
    for role in in_layer(config):
        pairs = zip(layers_with(config, role), weights.each(role) or (), strict=True)
        weight_of |= {f"layers.{i}.{role}": weight for i, weight in pairs}
    for role in in_expert(config):
        name = role.removeprefix("experts.")
        for layer in layers_with(config, role):
            each = enumerate(weights.of_experts(role, [layer]) or ())
            weight_of |= {f"layers.{layer}.experts.{i}.{name}": weight for i, weight in each}
    return {role: np.asarray(weight) for role, weight in weight_of.items()}
