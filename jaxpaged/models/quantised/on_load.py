"""Quantisations: which of a model's weights are quantised, and from what they are made.

`FromFile` keeps those of a file as they are there; `OnLoad` quantises any model's. Both say of a role how its
outputs are kept before a tensor is read, so that a program's arrays are known by their shapes.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.models.files.gguf import blocks
from jaxpaged.models.files.gguf.blocks import FORMATS
from jaxpaged.models.quantised.codes import (
    FLOAT8,
    CodedRows,
    CodeFormat,
    LazyRows,
    Quantisation,
    QuantisedWeight,
    SegmentSpec,
    ShardSlice,
    Stored,
    TensorSlice,
    in_words,
    joined,
    packed,
)

# Roles that are quantised. Routers and learned positions are small, and stay unquantised. So do products of
# each head with latents, whose inputs are outputs in the files.
PRODUCTS = (
    "latent.q_a",
    "latent.q",
    "latent.kv_a",
    "qkv",
    "q",
    "attention_gate",
    "o",
    "gate_up",
    "up",
    "down",
    "shared.gate_up",
    "shared.down",
)
EXPERTS = ("experts.gate_up", "experts.down")
TABLES = ("embedding", "layer_inputs_table", "lm_head")
ROLES = {f"{role}.weight" for role in (*PRODUCTS, *EXPERTS, *TABLES)}

_ROWS = 1024  # rows quantised at a time


# By the name in `EngineConfig.quantization`, the format of products; None for e4m3.
_KINDS = {"int8": "Q8_0", "int4": "Q4_0", "fp8": None}


def on_load(name: str | None) -> "OnLoad | None":
    """Return the quantisation of this name that any model can be loaded with; None if there is none."""
    return OnLoad(name) if name in _KINDS else None


class OnLoad(Quantisation):
    """Every product's weights in Q8_0 ("int8") or Q4_0 ("int4"); of the latter, too, embedding and head in
    Q8_0. "fp8": all in e4m3, with a scale for each output.
    """

    def __init__(self, name: str) -> None:
        self._kind = _KINDS[name]

    def segments(
        self, role: str, shape: tuple[int, ...], stored: Iterable[Stored], cut: ShardSlice | None = None
    ) -> tuple[SegmentSpec, ...] | None:
        if role not in ROLES:
            return None
        pieces = [(self._kind_of(role, shape[1]), shape[0])]
        if cut is not None:
            pieces = cut.segments(pieces, shape[1])
        return tuple(SegmentSpec(kind, sum(counts)) for kind, counts in joined(pieces))

    def of_numbers(
        self, role: str, whole: np.ndarray, dtype: jnp.dtype, cut: ShardSlice | None = None
    ) -> QuantisedWeight | None:
        if role not in ROLES:
            return None
        name = self._block(role)
        rows = float8(whole) if name is None else blocks.quantised(whole, name, role)
        in_features = whole.shape[1]
        cut = cut or ShardSlice(None, None)
        pieces = cut.rows([LazyRows.of(self._kind_of(role, in_features), rows)], in_features)
        return packed(pieces, cut.width(in_features), dtype)

    def _kind_of(self, role: str, in_features: int) -> CodeFormat:
        name = self._block(role)
        return float8_kind(in_features) if name is None else FORMATS[name]

    def _block(self, role: str) -> str | None:
        is_table = role.removesuffix(".weight") in TABLES
        return "Q8_0" if is_table and self._kind is not None else self._kind


def float8_kind(in_features: int) -> CodeFormat:
    return CodeFormat(8, in_words(in_features, 8), "float32", has_minima=False, is_float=True)


def float8(weight: np.ndarray) -> CodedRows:
    """Quantise a weight [outputs, inputs] to the nearest e4m3; a row's largest number is 448 scales."""
    codes = np.zeros((len(weight), in_words(weight.shape[1], 8)), FLOAT8)
    scales = np.zeros((len(weight), 1), np.float32)
    for first in range(0, len(weight), _ROWS):  # in chunks, to keep copies small
        some = weight[first : first + _ROWS].astype(np.float32)
        largest = np.abs(some).max(axis=1, keepdims=True)
        scale = largest / np.float32(ml_dtypes.finfo(FLOAT8).max)
        scales[first : first + _ROWS] = scale
        some /= np.where(scale == 0, np.float32(1), scale)
        codes[first : first + _ROWS, : weight.shape[1]] = some.astype(FLOAT8)
    return CodedRows(codes.view(np.uint8), scales, None)


class FromFile(Quantisation):
    """A quantisation that keeps weights as a file has them, if products take the format.

    `kind_of`: that of a tensor of this name and shape, or None; `rows_of`: what a part of it holds.
    """

    def __init__(
        self,
        kind_of: Callable[[str, tuple[int, ...]], CodeFormat | None],
        rows_of: Callable[[str, tuple[int, ...], TensorSlice], CodedRows],
        roles: Iterable[str] = ROLES,
    ) -> None:
        self._kind_of, self._rows_of, self._roles = kind_of, rows_of, set(roles)

    def segments(
        self, role: str, shape: tuple[int, ...], stored: Iterable[Stored], cut: ShardSlice | None = None
    ) -> tuple[SegmentSpec, ...] | None:
        if role not in self._roles:
            return None
        kinds, size = [], 0
        for name, piece_shape in stored:
            kind, size = self._kind_of(name, piece_shape), size + math.prod(piece_shape)
            if kind is None or (kind.has_order and role == "embedding.weight"):
                return None
            kinds.append((kind, piece_shape[0]))
        if size != math.prod(shape):
            return None  # some of the decoder's numbers are zeros, or come twice
        if cut is not None:
            kinds = cut.segments(kinds, shape[1])
        return tuple(SegmentSpec(kind, sum(counts)) for kind, counts in joined(kinds))

    def of_blocks(
        self,
        stored: Sequence[Stored],
        restored: Callable[[list[np.ndarray]], list[np.ndarray]],
        dtype: jnp.dtype,
        cut: ShardSlice | None = None,
    ) -> QuantisedWeight:
        counts = [shape[0] for _, shape in stored]
        firsts = np.cumsum([0, *counts])
        numbered = np.split(np.arange(sum(counts))[:, None], firsts[1:-1])
        order = np.concatenate(restored(numbered))
        if order.shape != (sum(counts), 1):
            name = stored[0][0]
            raise InputError(f"weight {name!r} must lie as [outputs, inputs], where it is quantised")
        orders = [
            piece_order - first
            for piece_order, first in zip(np.split(order, firsts[1:-1]), firsts, strict=False)
        ]
        pieces = [self._piece(*piece, order[:, 0]) for piece, order in zip(stored, orders, strict=True)]
        cut, in_features = cut or ShardSlice(None, None), stored[0][1][1]
        return packed(cut.rows(pieces, in_features), cut.width(in_features), dtype)

    def _piece(self, name: str, shape: tuple[int, ...], order: np.ndarray) -> LazyRows:
        """Return a tensor's rows, still to be read, with outputs in the decoder's order."""
        kind = self._kind_of(name, shape)
        assert kind is not None

        def read(outputs: np.ndarray, inputs: tuple[int, int]) -> CodedRows:
            return self._rows_of(name, shape, TensorSlice(order[outputs], slice(*inputs)))

        return LazyRows(kind, shape[0], read)
