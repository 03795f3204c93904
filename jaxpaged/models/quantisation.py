"""Which of a model's weights are quantised, and of what they are made.

`FromFile` keeps those of a GGUF file as they are there; `OnLoad` quantises any model's. Both say of a role
how its outputs are kept before a tensor is read, so that a program's arrays are known by their shapes.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.models import gguf_blocks
from jaxpaged.models.gguf_blocks import KINDS
from jaxpaged.models.quantised import Quantisation, QuantisedWeight, Rows, Segment, Stored, packed

# What is quantised: a router and learned positions are small, and stay as they are.
PRODUCTS = ("qkv", "o", "gate_up", "up", "down")
EXPERTS = ("experts.gate_up", "experts.down")
TABLES = ("embedding", "lm_head")


class OnLoad(Quantisation):
    """Every product's weights in Q8_0 ("int8") or Q4_0 ("int4"); of the latter, too, embedding and head in
    Q8_0.
    """

    def __init__(self, name: str) -> None:
        kind = {"int8": "Q8_0", "int4": "Q4_0"}[name]
        self._kinds = {f"{role}.weight": kind for role in (*PRODUCTS, *EXPERTS)}
        self._kinds |= {f"{role}.weight": "Q8_0" for role in TABLES}

    def segments(
        self, role: str, shape: tuple[int, ...], stored: Iterable[Stored]
    ) -> tuple[Segment, ...] | None:
        kind = self._kinds.get(role)
        return None if kind is None else (Segment(KINDS[kind], shape[0]),)

    def of_numbers(self, role: str, whole: np.ndarray, dtype: jnp.dtype) -> QuantisedWeight | None:
        kind = self._kinds.get(role)
        if kind is None:
            return None
        return packed([(KINDS[kind], gguf_blocks.quantised(whole, kind, role))], whole.shape[1], dtype)


class FromFile(Quantisation):
    """Those that a GGUF file has in one of `gguf_blocks.KINDS`.

    `kinds`: the type of each tensor; `read`: its blocks, [outputs, bytes].
    """

    def __init__(self, kinds: Mapping[str, str], read: Callable[[str], np.ndarray]) -> None:
        self._kinds, self._read = kinds, read

    def segments(
        self, role: str, shape: tuple[int, ...], stored: Iterable[Stored]
    ) -> tuple[Segment, ...] | None:
        if role.removesuffix(".weight") not in (*PRODUCTS, *TABLES):
            return None
        counted = [(self._kinds.get(name, ""), its[0]) for name, its in stored]
        if not all(kind in KINDS for kind, _ in counted):
            return None
        by_kind = itertools.groupby(counted, lambda piece: KINDS[piece[0]])
        return tuple(Segment(kind, sum(count for _, count in pieces)) for kind, pieces in by_kind)

    def of_blocks(
        self,
        stored: Sequence[Stored],
        restored: Callable[[list[np.ndarray]], list[np.ndarray]],
        dtype: jnp.dtype,
    ) -> QuantisedWeight:
        kinds = [self._kinds[name] for name, _ in stored]
        pieces = [self._rows(name, shape) for name, shape in stored]
        orders = restored([np.arange(len(piece.codes))[:, None] for piece in pieces])
        ordered = [_taken(piece, order[:, 0]) for piece, order in zip(pieces, orders, strict=True)]
        return packed(zip(map(KINDS.__getitem__, kinds), ordered, strict=True), stored[0][1][1], dtype)

    def _rows(self, name: str, shape: tuple[int, ...]) -> Rows:
        found = gguf_blocks.rows(self._read(name), self._kinds[name], name)
        if found.codes.shape != shape:
            raise InputError(f"weight {name!r} has shape {found.codes.shape}, must be {shape}")
        return found


def _taken(rows: Rows, order: np.ndarray) -> Rows:
    if np.array_equal(order, np.arange(len(order))):
        return rows
    minima = None if rows.minima is None else rows.minima[order]
    return Rows(rows.codes[order], rows.scales[order], minima)
