"""Cache specifications: which tokens of a sequence a layer's attention may still read.

A specification says what a layer must keep in the cache. It is the whole difference between kinds of layers
to memory: tables, admission, windows and prefix hits ask for nothing else. A kind from outside is one more
class with these methods (`docs/research/layer_kinds.md`).

A kind of cache is a specification and the arrays of a block. What a block holds is the layer's own affair,
under four rules:
    what a token writes lies in the block of its position, whatever is kept: K and V, a vector for all heads,
        the state at the block's start, or an entry for a group of tokens in the block of the last of them;
    a token reads no block but its own and those from `first_read` on: others may be given back, as a sequence
        grows;
    a block can be copied as a whole, which is all that a fork needs: it happens to an open block before a
        second row writes to it;
    what lies behind a position in a block is written again, or not read, once a roll-back has truncated the
        row there. So a state, which cannot be truncated, keeps its block's rows beside it, and a group
        of tokens its rows until it is full.
A prefix is found again where full blocks are cached that the next token reads. A layer that reads another's
cache has no arrays. `tests/memory/test_kinds.py` has five kinds that differ, each of a few lines.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError, check, checked_int

# Positions of tokens: one, or an array of any shape.
Positions = Int[Array, "..."] | Int[np.ndarray, "..."] | int | np.integer[Any]


@runtime_checkable
class CacheSpec(Protocol):
    """Protocol of a kind of layer: what its tokens read. Instances are frozen and hashable.

    A token reads the first `first_tokens` tokens of its sequence, and those from `first_read` on up to
    itself; of these perhaps not all: `sees` says which. What lies between is given back, block by block.

    Methods take and return ints, or int32 arrays of NumPy or JAX, element by element.
    """

    first_tokens: int = 0  # tokens at the beginning that every token reads

    def first_read(self, num_tokens: Positions) -> Positions:
        """Return the position of the first token that the token at position `num_tokens` reads.

        Those of `first_tokens` are left out. It must not fall as `num_tokens` rises: what is out of reach
        stays so.
        """
        ...

    def most_kept(self, num_in_flight: int) -> int | None:
        """Return how many neighbouring tokens a row keeps at most while `num_in_flight` are computed at once.

        Those of `first_tokens` are left out. None: all of them.
        """
        ...

    def first_blocks(self, block_size: int) -> int:
        """Return how many blocks hold the `first_tokens`."""
        return cdiv(self.first_tokens, block_size)

    def sees(self, query: Positions, key: Positions) -> Any:
        """Return whether the token at `query` attends to the one at `key`, which is not behind it."""
        return (key < self.first_tokens) | (key >= self.first_read(query))


@dataclass(frozen=True)
class FullAttention(CacheSpec):
    """Attention to all tokens before."""

    def first_read(self, num_tokens: Positions) -> Positions:
        """Return 0 for every token."""
        return jnp.zeros_like(num_tokens)

    def most_kept(self, num_in_flight: int) -> int | None:
        """Return None: all tokens are kept."""
        return None


@dataclass(frozen=True)
class SlidingWindow(CacheSpec):
    """Attention to the last `window` tokens, the token itself among them."""

    window: int

    def __post_init__(self) -> None:
        """Raise `InputError` for a window without tokens."""
        checked_int("sliding_window", self.window, "an int >= 1", 1)

    def first_read(self, num_tokens: Positions) -> Positions:
        """Return the first position within the window of the token at `num_tokens`."""
        return jnp.maximum(num_tokens + 1 - self.window, 0)

    def most_kept(self, num_in_flight: int) -> int | None:
        """Return the window before the first token in flight, and those in flight."""
        return self.window - 1 + num_in_flight


@dataclass(frozen=True)
class ChunkedLocal(CacheSpec):
    """Attention within chunks of `chunk` tokens, counted from the sequence's start."""

    chunk: int

    def __post_init__(self) -> None:
        """Raise `InputError` for a chunk without tokens."""
        checked_int("chunk", self.chunk, "an int >= 1", 1)

    def first_read(self, num_tokens: Positions) -> Positions:
        """Return the start of the chunk that holds position `num_tokens`."""
        return num_tokens // self.chunk * self.chunk

    def most_kept(self, num_in_flight: int) -> int | None:
        """Return the chunk before the first token in flight, and those in flight."""
        return self.chunk - 1 + num_in_flight


@dataclass(frozen=True)
class ChunkState(CacheSpec):
    """A state after each chunk of `chunk` tokens, of which the next chunk reads the last alone."""

    chunk: int

    def __post_init__(self) -> None:
        """Raise `InputError` for a chunk without tokens."""
        checked_int("chunk", self.chunk, "an int >= 1", 1)

    def first_read(self, num_tokens: Positions) -> Positions:
        """Return the last position of the chunk before the one that holds `num_tokens`; 0 in the first."""
        first = num_tokens // self.chunk * self.chunk - 1
        return first * (first > 0)

    def most_kept(self, num_in_flight: int) -> int | None:
        """Return a chunk before the first token in flight, and those in flight."""
        return self.chunk + num_in_flight


@dataclass(frozen=True)
class Together(CacheSpec):
    """Several kinds of layers in one table, which keeps what any of them reads."""

    specs: tuple[CacheSpec, ...]

    @property
    def first_tokens(self) -> int:  # type: ignore[override]
        """Tokens at the beginning that some kind keeps."""
        return max(spec.first_tokens for spec in self.specs)

    def first_read(self, num_tokens: Positions) -> Positions:
        """Return the first position that some kind reads."""
        return functools.reduce(jnp.minimum, [spec.first_read(num_tokens) for spec in self.specs])

    def most_kept(self, num_in_flight: int) -> int | None:
        """Return what the kind that keeps most keeps."""
        kept_by_kind = [spec.most_kept(num_in_flight) for spec in self.specs]
        return (
            max((kept for kept in kept_by_kind if kept is not None), default=None)
            if None not in kept_by_kind
            else None
        )


FULL = FullAttention()


def together(specs: Sequence[CacheSpec]) -> CacheSpec:
    """Return the specification of one table for layers of these: it keeps what any of them reads."""
    different = tuple(dict.fromkeys(specs))
    if FULL in different or len(different) == 1:
        return FULL if FULL in different else different[0]
    windows = [spec.window for spec in different if type(spec) is SlidingWindow]
    return SlidingWindow(max(windows)) if len(windows) == len(different) else Together(different)


_NAMES: dict[str, type[CacheSpec]] = {
    "full": FullAttention,
    "sliding_window": SlidingWindow,
    "chunked_local": ChunkedLocal,
    "chunk_state": ChunkState,
}


def words(spec: CacheSpec) -> dict[str, Any]:
    """Return a specification as JSON has it. Raises `InputError` for one from outside."""
    if type(spec) is Together:
        return {"kind": "together", "specs": [words(each) for each in spec.specs]}
    names = [name for name, known in _NAMES.items() if type(spec) is known]
    if not names:
        raise InputError(f"cache spec {spec!r} must be one of {', '.join(_NAMES)} to be written down")
    return {"kind": names[0], **dataclasses.asdict(spec)}  # type: ignore[call-overload]


def of_words(words: Mapping[str, Any]) -> CacheSpec:
    """Return the specification that `words` wrote. Raises `InputError` for another kind."""
    kind = words["kind"]
    if kind == "together":
        return Together(tuple(of_words(each) for each in words["specs"]))
    check("cache spec", kind, f"one of {', '.join(_NAMES)}", kind in _NAMES)
    return _NAMES[kind](**{name: value for name, value in words.items() if name != "kind"})
