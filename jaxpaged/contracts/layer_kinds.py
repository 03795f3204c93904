"""The contract of kinds of layers: a class from outside that says which tokens of a sequence a layer reads.

A kind is a frozen dataclass under `CacheSpec`. Its `sees` is what it means: the oracle and attention mask by
it. Its `first_tokens`, `first_read` and `most_kept` are what memory keeps: blocks that they leave out are
given back, and a prefix is a hit if all blocks are there that they keep. `why_wrong` compares the two before
an engine starts.

An engine is given a kind, for all layers that would read everything, or a function
`kind_of(layer, num_layers)` that returns the kind of a layer, or None to leave it as it is.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from jaxpaged.checks import InputError, shown
from jaxpaged.contracts import versions
from jaxpaged.memory.cache_specs import CacheSpec

# Positions up to this one are compared one by one; beyond it the kind is taken at its word.
MOST_COMPARED = 1024
IN_FLIGHT = (1, 32)  # tokens computed at once, for which `most_kept` is compared


@dataclasses.dataclass(frozen=True)
class LayerKinds:
    """Kinds of layers from outside: which layer has which."""

    kind_of: Callable[[int, int], CacheSpec | None] | None  # of a layer's number, and how many there are
    kind: CacheSpec | None  # of all layers that would read everything, where there is no function
    name: str

    def each(self, num_layers: int, reads_all: tuple[bool, ...]) -> tuple[CacheSpec | None, ...]:
        """Return the kind of each layer, None for a layer that keeps its own. Raises `InputError` for a wrong
        kind.
        """
        if self.kind_of is None:
            kinds = [self.kind if is_full else None for is_full in reads_all]
        else:
            kinds = [self.kind_of(layer, num_layers) for layer in range(num_layers)]
        for kind in dict.fromkeys(kind for kind in kinds if kind is not None):
            _check(self.name, kind)
        return tuple(kinds)


def named(asked: Any) -> LayerKinds:
    """Return the kinds that a path or a value means. Raises `InputError`."""
    rule = "a frozen dataclass under CacheSpec, or a function of a layer's number and how many there are"
    path = asked if isinstance(asked, str) else ""
    chosen = versions.imported("layer_kind", path, rule) if path else asked
    versions.check_version("layer_kind", asked, chosen, "layer_kind")
    is_kind = isinstance(chosen, CacheSpec) and not isinstance(chosen, type)
    if not is_kind and (isinstance(chosen, type) or not callable(chosen)):
        raise InputError(f"layer_kind={shown(asked)} must be {rule} (docs/research/layer_kinds.md)")
    name = path or getattr(chosen, "__qualname__", "") or type(chosen).__name__
    if is_kind:
        _check(name, chosen)
        return LayerKinds(None, chosen, name)
    return LayerKinds(chosen, None, name)


def _check(name: str, kind: Any) -> None:
    """Raise `InputError` for an object that is no kind of layer, or whose methods contradict each other."""
    versions.check_version("layer_kind", name, kind, "layer_kind")
    if not isinstance(kind, CacheSpec) or not isinstance(kind, Hashable):
        raise InputError(f"layer_kind={name!r} must give frozen dataclasses under CacheSpec, not {kind!r}")
    try:
        why = why_wrong(kind)
    except Exception as error:  # whatever somebody's methods raise
        raise InputError(f"layer_kind={name!r} fails for {kind!r}: {' '.join(str(error).split())}") from error
    if why:
        raise InputError(f"layer_kind={name!r} must be sound: {kind!r} {why}")


def why_wrong(kind: CacheSpec, num_positions: int = MOST_COMPARED) -> str | None:
    """Return how a kind's statements contradict each other for the first positions; None if they agree.

    A token must see itself, and nothing of what memory may have given back before it.
    """
    first = kind.first_tokens
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        return f"has first_tokens={first!r}, not an int >= 0"
    position = np.arange(num_positions, dtype=np.int32)
    reads = np.asarray(kind.first_read(position))
    if reads.shape != position.shape or not np.issubdtype(reads.dtype, np.integer):
        return f"has first_read that gives {reads.dtype}{list(reads.shape)} for int32[{num_positions}]"
    for wrong, what in (
        (reads < 0, "a position before the sequence"),
        (reads > position, "a position behind the token's own"),
        (np.diff(reads, prepend=reads[:1]) < 0, "less than for the token before"),
    ):
        if np.any(wrong):
            at = int(np.argmax(wrong))
            return f"has first_read({at}) = {int(reads[at])}, {what}"
    sees = np.asarray(kind.sees(position[:, None], position[None, :]))
    if sees.shape != (num_positions, num_positions) or sees.dtype != bool:
        return f"has sees that gives {sees.dtype}{list(sees.shape)}, not a bool for each pair"
    is_before = position[None, :] <= position[:, None]
    given_back = (position[None, :] >= first) & (position[None, :] < reads[:, None])
    for wrong, what in (
        (sees & is_before & given_back, "sees a token that it does not keep"),
        (~sees & np.eye(num_positions, dtype=bool), "does not see a token's own position"),
    ):
        if np.any(wrong):
            query, key = (int(index) for index in np.argwhere(wrong)[0])
            return f"{what}: query {query}, key {key}"
    for num in IN_FLIGHT:
        max_kept = kind.most_kept(num)
        kept = position[num - 1 :] + 1 - reads[: num_positions - num + 1]
        if max_kept is not None and int(kept.max()) > max_kept:
            at = int(np.argmax(kept > max_kept))
            return f"has most_kept({num}) = {max_kept}, but keeps {int(kept[at])} from position {at} on"
    return None
