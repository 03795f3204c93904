"""Weights of few bits as a decoder has them, and how their outputs are kept."""

import collections
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError
from pallas_kernels import native
from pallas_kernels.gpu import quantised_product
from pallas_kernels.ops import ProductImplementation, choice
from pallas_kernels.quantised import (
    NUM_INPUTS,
    NUM_OUTPUTS,
    OFFSET,
    PANEL_WIDTH,
    Halfwords,
    Quantised,
    pack,
    pack_halfwords,
)

FLOAT8, FLOAT4 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


class CodeFormat(NamedTuple):
    """The format of a quantised weight's codes and scales: see `pallas_kernels.quantised`."""

    bits: int
    group_size: int  # number of neighbouring inputs that share a scale
    scale_dtype: str
    has_minima: bool
    is_float: bool = False  # whether codes are of type e4m3 or e2m1
    has_order: bool = False  # whether inputs are reordered, so that a group's are no neighbours
    is_short: bool = False  # whether 8-bit codes range from -32 to 31 only

    @property
    def halfword_bits(self) -> int:
        """Bits of a code in the form that a GPU's kernel reads."""
        return 6 if self.is_short else self.bits


class SegmentSpec(NamedTuple):
    """Neighbouring outputs of one kind."""

    kind: CodeFormat
    num_outputs: int


class CodedRows(NamedTuple):
    """A tensor's outputs, a byte a code."""

    codes: np.ndarray  # [outputs, inputs in whole groups] uint8, int8, or a float's
    scales: np.ndarray  # [outputs, groups]
    minima: np.ndarray | None
    order: np.ndarray | None = None  # [inputs] which input each code belongs to, where they have an order


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [out_features, in_features], or a stack of one a layer, for activations of `dtype`.

    `segments` have its outputs one after another: queries, keys and values may be of several kinds. `orders`
    are those in which each of them takes its inputs; None: as they come.
    """

    segments: tuple[Quantised | Halfwords, ...]
    orders: tuple[Int[Array | np.ndarray, "*num_layers in_features"] | None, ...]
    in_features: int = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return sum(segment.out_features for segment in self.segments), self.in_features

    def of_layer(self, layer: int | Int[Array, ""]) -> "QuantisedWeight":
        """Return one layer's weight of a stack."""
        segments = tuple(segment.of_layer(layer) for segment in self.segments)
        orders = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), self.orders)
        return QuantisedWeight(segments, orders, self.in_features, self.dtype)

    def ordered(
        self, x: Float[Array, "num_rows in_features"], layer: int | Int[Array, ""] | None = None
    ) -> list[Float[Array, "num_rows in_features"]]:
        """Return `x` with inputs in the order of each segment; `layer` chooses from a stack."""

        def of(order: Array | np.ndarray | None) -> Array:
            if order is None:
                return x
            places = jnp.asarray(order).reshape(-1, x.shape[1])[0 if layer is None else layer]
            return x.at[:, places].get(mode="promise_in_bounds")

        return [of(order) for order in self.orders]

    def rows(self, outputs: Int[Array, " n"]) -> Float[Array, "n in_features"]:
        """Return the weights of some outputs, if all have one format and their inputs no other order."""
        [segment] = self.segments
        return segment.rows(outputs)[:, : self.in_features].astype(self.dtype)


class TensorSlice(NamedTuple):
    """Some outputs of a tensor, by their numbers, and neighbouring inputs from a group's first on."""

    outputs: np.ndarray
    inputs: slice

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "TensorSlice":
        return cls(np.arange(shape[0]), slice(0, shape[1]))

    def span(self, unit: int = 1) -> slice:
        """Return the slice from the first to the last unit of `unit` outputs that has one of the outputs."""
        return slice(int(self.outputs.min()) // unit, int(self.outputs.max()) // unit + 1)

    def groups(self, size: int) -> slice:
        """Return the slice of groups that the inputs are in."""
        return slice(self.inputs.start // size, cdiv(self.inputs.stop, size))

    def of(self, span_rows: np.ndarray, unit: int = 1) -> np.ndarray:
        """Take the outputs from what `span` has."""
        places = self.outputs - self.span(unit).start * unit
        first = int(places[0])
        chosen = slice(first, first + len(places))
        return (
            span_rows[chosen] if np.array_equal(places, np.arange(first, chosen.stop)) else span_rows[places]
        )


class LazyRows(NamedTuple):
    """Neighbouring outputs of one kind which are still to be read: some of them by their places, and of the
    inputs those from where to where, which begin with a group.
    """

    kind: CodeFormat
    num_outputs: int
    read: Callable[[np.ndarray, tuple[int, int]], CodedRows]

    @classmethod
    def of(cls, kind: CodeFormat, rows: CodedRows) -> "LazyRows":
        """Wrap rows that have been read."""

        def read(outputs: np.ndarray, inputs: tuple[int, int]) -> CodedRows:
            part = TensorSlice(outputs, slice(*inputs))
            groups = part.groups(kind.group_size)
            whole_inputs = slice(part.inputs.start, groups.stop * kind.group_size)  # whole groups
            codes, minima = rows.codes[part.span(), whole_inputs], rows.minima
            some = None if minima is None else part.of(minima[part.span(), groups])
            return CodedRows(part.of(codes), part.of(rows.scales[part.span(), groups]), some, rows.order)

        return cls(kind, len(rows.codes), read)


class ShardSlice(NamedTuple):
    """The slice of a weight that one shard has, in the decoder's order of outputs."""

    outputs: Sequence[tuple[int, int]] | None  # ranges of outputs; None: all
    inputs: tuple[int, int] | None
    padding: int = 0  # number of zero outputs that follow

    def segments(
        self, pieces: Iterable[tuple[CodeFormat, int]], in_features: int
    ) -> list[tuple[CodeFormat, int]]:
        """Return formats and numbers of outputs of a shard's slice of such rows."""
        segments = [
            (self.kind(kind, in_features), len(range(count)[outputs]))
            for (kind, count), outputs in self._of(pieces)
        ]
        if self.padding:
            segments[-1] = segments[-1][0], segments[-1][1] + self.padding
        return segments

    def rows(self, pieces: Iterable[LazyRows], in_features: int) -> list[tuple[CodeFormat, CodedRows]]:
        """Read a shard's slice of such rows; nothing else is read but the rest of a group or a word."""
        rows = [
            (self.kind(piece.kind, in_features), self._rows(piece, outputs, in_features))
            for (piece, _), outputs in self._of((piece, piece.num_outputs) for piece in pieces)
        ]
        if self.padding:
            kind, last = rows[-1]
            below = ((0, self.padding), (0, 0))
            minima = None if last.minima is None else np.pad(last.minima, below)
            rows[-1] = (
                kind,
                CodedRows(np.pad(last.codes, below), np.pad(last.scales, below), minima, last.order),
            )
        return rows

    def width(self, in_features: int) -> int:
        return in_features if self.inputs is None else self.inputs[1] - self.inputs[0]

    def kind(self, kind: CodeFormat, in_features: int) -> CodeFormat:
        """Return the format of a slice of inputs, with the largest groups that stay whole. Raises
        `InputError`.
        """
        if self.inputs is None:
            return kind
        width = self.width(in_features)
        if kind.group_size >= in_features and not kind.has_order:
            return kind._replace(group_size=in_words(width, kind.bits))
        group = math.gcd(kind.group_size, width)
        if kind.has_order or group % (32 // kind.bits):
            # In a reordered weight a group has inputs of all devices. Each device would need all inputs in
            # every step, or a scale per input.
            what = f"in groups of {kind.group_size}: "
            if kind.has_order:
                what = "in an order of their own (desc_act, actorder): take a file without, or "
            size = in_features // width
            raise InputError(
                f"tensor_parallel_size={size} must be 1 for {in_features} quantised inputs {what}"
                f"have the model on each device (data_parallel_size={size})"
            )
        return kind._replace(group_size=group)

    def _of[T](self, pieces: Iterable[tuple[T, int]]) -> Iterator[tuple[tuple[T, int], slice]]:
        """Yield the rows in the slice, and which of their outputs; with padding the last in any case."""
        pieces = list(pieces)
        for start, stop in [(0, sum(count for _, count in pieces))] if self.outputs is None else self.outputs:
            first, last = 0, len(pieces) - 1
            for number, piece in enumerate(pieces):
                outputs = slice(max(start - first, 0), max(min(stop - first, piece[1]), 0))
                if outputs.start < outputs.stop or (self.padding and number == last):
                    yield piece, outputs
                first += piece[1]

    def _rows(self, piece: LazyRows, outputs: slice, in_features: int) -> CodedRows:
        count = max(outputs.stop - outputs.start, 0)
        places = np.arange(outputs.start, outputs.start + count) if count else np.zeros(1, np.int64)
        if self.inputs is None:
            result = piece.read(places, (0, in_features))
            return result if count else _none_of(result)
        start, stop = self.inputs
        old, group = piece.kind.group_size, self.kind(piece.kind, in_features).group_size
        unit = old if old < in_features else 32 // piece.kind.bits
        first = start // unit * unit
        read = piece.read(places, (first, min(cdiv(stop, unit) * unit, in_features)))
        codes = read.codes[:, start - first : stop - first]
        if missing := -codes.shape[1] % group:
            codes = np.pad(codes, ((0, 0), (0, missing)))
        each = np.arange(start, stop, group) // old - first // old  # old group of each new group
        minima = None if read.minima is None else read.minima[:, each]
        result = CodedRows(codes, read.scales[:, each], minima, read.order)
        return result if count else _none_of(result)


def _none_of(rows: CodedRows) -> CodedRows:
    """Return no outputs, with as many inputs."""
    return CodedRows(
        rows.codes[:0], rows.scales[:0], None if rows.minima is None else rows.minima[:0], rows.order
    )


type Stored = tuple[str, tuple[int, ...]]  # a tensor's name and shape in the file


class Quantisation(ABC):
    """The choice of weights that are quantised, and how they are made: of a file's blocks, or of numbers."""

    @abstractmethod
    def segments(
        self, role: str, shape: tuple[int, ...], stored: Iterable[Stored], cut: ShardSlice | None = None
    ) -> tuple[SegmentSpec, ...] | None:
        """Return the segments of a role's weight, or of a shard's slice; None if it is not quantised. No
        tensor is read.
        """

    def of_blocks(
        self,
        stored: Sequence[Stored],
        restored: Callable[[list[np.ndarray]], list[np.ndarray]],
        dtype: jnp.dtype,
        cut: ShardSlice | None = None,
    ) -> QuantisedWeight | None:
        """Make a weight of the file's blocks; `restored` brings outputs into the decoder's order. None if it
        is to be made of numbers.
        """
        return None

    def of_numbers(
        self, role: str, whole: np.ndarray, dtype: jnp.dtype, cut: ShardSlice | None = None
    ) -> QuantisedWeight | None:
        """Make a weight of a role's numbers; None where they are not quantised."""
        return None


def in_words(in_features: int, bits: int) -> int:
    """Return the number of inputs rounded up to whole words of codes."""
    return cdiv(in_features, 32 // bits) * (32 // bits)


def joined[T](pieces: Iterable[tuple[CodeFormat, T]]) -> Iterator[tuple[CodeFormat, list[T]]]:
    """Join neighbours of one format; those with an order of inputs, which is their own, stay alone."""

    def alike(numbered: tuple[int, tuple[CodeFormat, T]]) -> tuple[CodeFormat, int | None]:
        number, (kind, _) = numbered
        return kind, number if kind.has_order else None

    for (kind, _), group in itertools.groupby(enumerate(pieces), alike):
        yield kind, [piece for _, (_, piece) in group]


def packed(
    pieces: Iterable[tuple[CodeFormat, CodedRows]],
    in_features: int,
    dtype: jnp.dtype,
    implementation: ProductImplementation | None = None,
) -> QuantisedWeight:
    """Pack rows into a weight for an implementation of products; None: this machine's. Neighbours of one
    format are joined.
    """
    segments: list[Quantised | Halfwords] = []
    orders = []
    for kind, group in joined(pieces):
        codes, scales, minima, [*_, order] = zip(*group, strict=True)
        joined_minima = np.concatenate(minima) if kind.has_minima else None
        sides = np.concatenate(codes), np.concatenate(scales), joined_minima
        chosen = implementation or implementation_for(kind, dtype)
        if chosen == "mosaic_gpu":
            segments.append(pack_halfwords(*sides, bits=kind.halfword_bits, is_float=kind.is_float))
        else:
            width = _panel_width(chosen)
            segments.append(pack(*sides, bits=kind.bits, is_float=kind.is_float, panel_width=width))
        orders.append(order)
    return QuantisedWeight(tuple(segments), tuple(orders), in_features, dtype)


def implementation_for(kind: CodeFormat, dtype: jnp.dtype) -> ProductImplementation:
    """Choose the implementation of products with few rows of that dtype on this machine."""
    if native.serves(dtype, native.quantised_function(kind.bits, is_float=kind.is_float)):
        return "native"
    if choice.default_implementation() == "xla":
        return "xla"
    why_not = quantised_product.why_not(dtype, kind.halfword_bits, kind.group_size, is_float=kind.is_float)
    return "xla" if why_not else "mosaic_gpu"


def implementations(model: Any) -> dict[ProductImplementation, int]:
    """Count the quantised weights of a model by the implementation of products that they are packed for."""
    counts: collections.Counter[ProductImplementation] = collections.Counter()
    for leaf in jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, Halfwords | Quantised)):
        if isinstance(leaf, Halfwords):
            counts["mosaic_gpu"] += 1
        elif isinstance(leaf, Quantised):
            counts["native" if leaf.panel_width == PANEL_WIDTH else "xla"] += 1
    return dict(counts)


def _panel_width(implementation: ProductImplementation) -> int:
    return PANEL_WIDTH if implementation == "native" else 1


def wide(kind: CodeFormat, rows: CodedRows, in_features: int) -> np.ndarray:
    """Return the dequantised weight, float32 [outputs, inputs]."""
    codes, scales = rows.codes, rows.scales.astype(np.float32)
    if kind.is_float:
        codes = codes.view(FLOAT8 if kind.bits == 8 else FLOAT4)
    elif kind.bits == 4 and rows.minima is None:
        codes = codes.astype(np.int8) - np.int8(OFFSET)
    values = codes.astype(np.float32).reshape(*scales.shape, -1)
    values *= scales[..., None]
    if rows.minima is not None:
        values += rows.minima.astype(np.float32)[..., None]
    values = values.reshape(len(codes), -1)[:, :in_features]
    return values if rows.order is None else values[:, np.argsort(rows.order)]


def zeros(
    segments: Iterable[SegmentSpec],
    in_features: int,
    dtype: jnp.dtype,
    implementation: ProductImplementation | None = None,
) -> QuantisedWeight:
    """Make a weight of these segments, all zeros; `implementation` as in `packed`."""

    def of(kind: CodeFormat, num_outputs: int) -> Quantised | Halfwords:
        chosen = implementation or implementation_for(kind, dtype)
        num_groups = cdiv(in_features, kind.group_size)
        if chosen == "mosaic_gpu":
            return _no_halfwords(kind, num_outputs, num_groups * kind.group_size)
        width = _panel_width(chosen)
        num_panels = cdiv(num_outputs, width)
        num_words = num_groups * kind.group_size * kind.bits // 32
        codes = jnp.zeros((num_panels, num_words, width), jnp.uint32)
        scales: Any = jnp.zeros((num_panels, num_groups, width), kind.scale_dtype)
        minima = scales if kind.has_minima else None
        return Quantised(codes, scales, minima, kind.bits, num_outputs, kind.is_float)

    segments = tuple(segments)
    orders = tuple(jnp.zeros(in_features, jnp.int32) if kind.has_order else None for kind, _ in segments)
    return QuantisedWeight(tuple(of(*segment) for segment in segments), orders, in_features, dtype)


def _no_halfwords(kind: CodeFormat, num_outputs: int, in_features: int) -> Halfwords:
    inputs, outputs = (
        cdiv(n, unit) * unit for n, unit in ((in_features, NUM_INPUTS), (num_outputs, NUM_OUTPUTS))
    )
    scales: Any = jnp.zeros((inputs // kind.group_size, outputs), kind.scale_dtype)
    codes = jnp.zeros((outputs, inputs * kind.halfword_bits // 16), jnp.uint16)
    minima = scales if kind.has_minima else None
    return Halfwords(codes, scales, minima, kind.halfword_bits, num_outputs, kind.is_float)
