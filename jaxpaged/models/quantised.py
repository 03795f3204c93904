"""Weights of few bits as a decoder has them, and how their outputs are kept."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised import PANEL_WIDTH, Quantised, pack


class Kind(NamedTuple):
    """How a product has a weight: see `pallas_kernels.quantised`."""

    bits: int
    group_size: int  # neighbouring inputs with one scale
    scale_dtype: str
    has_minima: bool


class Segment(NamedTuple):
    """Neighbouring outputs of one kind."""

    kind: Kind
    num_outputs: int


class Rows(NamedTuple):
    """A tensor's outputs, a byte a code."""

    codes: np.ndarray  # [outputs, inputs] uint8 or int8
    scales: np.ndarray  # [outputs, groups]
    minima: np.ndarray | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [out_features, in_features], or a stack of one a layer, for activations of `dtype`.

    `segments` have its outputs one after another: queries, keys and values may be of several kinds.
    """

    segments: tuple[Quantised, ...]
    in_features: int = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return sum(segment.out_features for segment in self.segments), self.in_features

    def of_layer(self, layer: int | Int[Array, ""]) -> "QuantisedWeight":
        """One of a stack."""
        segments = tuple(segment.of_layer(layer) for segment in self.segments)
        return QuantisedWeight(segments, self.in_features, self.dtype)

    def widened(self) -> list[Float[Array, "out_features in_features"]]:
        """Each segment's weights."""
        return [segment.widened()[:, : self.in_features].astype(self.dtype) for segment in self.segments]

    def rows(self, outputs: Int[Array, " n"]) -> Float[Array, "n in_features"]:
        """The weights of some outputs, where all are of one kind."""
        [segment] = self.segments
        return segment.rows(outputs)[:, : self.in_features].astype(self.dtype)


type Stored = tuple[str, tuple[int, ...]]  # a tensor's name and shape in the file


class Quantisation(ABC):
    """Which weights are quantised, and how they are made: of a file's blocks, or of numbers."""

    @abstractmethod
    def segments(
        self, role: str, shape: tuple[int, ...], stored: Iterable[Stored]
    ) -> tuple[Segment, ...] | None:
        """How a role's outputs are kept; None where they are not quantised. No tensor is read."""

    def of_blocks(
        self,
        stored: Sequence[Stored],
        restored: Callable[[list[np.ndarray]], list[np.ndarray]],
        dtype: jnp.dtype,
    ) -> QuantisedWeight | None:
        """Of a role's pieces as they lie in the file, their outputs brought into the decoder's order by
        `restored`; None if it is to be made of numbers.
        """
        return None

    def of_numbers(self, role: str, whole: np.ndarray, dtype: jnp.dtype) -> QuantisedWeight | None:
        """Of a role's numbers; None where they are not quantised."""
        return None


def packed(pieces: Iterable[tuple[Kind, Rows]], in_features: int, dtype: jnp.dtype) -> QuantisedWeight:
    """A weight of pieces with outputs one after another, those of a kind joined."""
    segments = []
    for kind, group in itertools.groupby(pieces, lambda piece: piece[0]):
        codes, scales, minima = zip(*(rows for _, rows in group), strict=True)
        joined_minima = np.concatenate(minima) if kind.has_minima else None
        segments.append(pack(np.concatenate(codes), np.concatenate(scales), joined_minima, bits=kind.bits))
    return QuantisedWeight(tuple(segments), in_features, dtype)


def zeros(segments: Iterable[Segment], in_features: int, dtype: jnp.dtype) -> QuantisedWeight:
    """A weight of these segments without its numbers."""

    def of(kind: Kind, num_outputs: int) -> Quantised:
        num_panels, num_groups = -(-num_outputs // PANEL_WIDTH), -(-in_features // kind.group_size)
        num_words = num_groups * kind.group_size * kind.bits // 32
        codes = jnp.zeros((num_panels, num_words, PANEL_WIDTH), jnp.uint32)
        scales: Any = jnp.zeros((num_panels, num_groups, PANEL_WIDTH), kind.scale_dtype)
        return Quantised(codes, scales, scales if kind.has_minima else None, kind.bits, num_outputs)

    return QuantisedWeight(tuple(of(*segment) for segment in segments), in_features, dtype)
