"""Cache specifications: which tokens of a sequence a layer's attention may still read.

A specification says what a layer must keep in the cache. It is the whole difference between kinds of layers
to memory: tables, admission, windows and prefix hits ask for nothing else. An outsider's kind is one more
class with these two methods.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxpaged.checks import InputError, check, checked_int


@runtime_checkable
class CacheSpec(Protocol):
    """Protocol of a kind of layer, as memory sees it. Instances are frozen and hashable."""

    def first_read(self, num_tokens: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """Return the position of the first token that the token at position `num_tokens` reads.

        It must not fall as `num_tokens` rises: what is out of reach stays so.
        """
        ...

    def most_kept(self, num_in_flight: int) -> int | None:
        """Return how many neighbouring tokens a row keeps at most while `num_in_flight` are computed at once.

        None: all of them.
        """
        ...


@dataclass(frozen=True)
class FullAttention:
    """Attention to all tokens before."""

    def first_read(self, num_tokens: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """Return 0 for every token."""
        return jnp.zeros_like(num_tokens)

    def most_kept(self, num_in_flight: int) -> int | None:
        """Return None: all tokens are kept."""
        return None


@dataclass(frozen=True)
class SlidingWindow:
    """Attention to the last `window` tokens, the token itself among them."""

    window: int

    def __post_init__(self) -> None:
        """Raise `InputError` for a window without tokens."""
        checked_int("sliding_window", self.window, "an int >= 1", 1)

    def first_read(self, num_tokens: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """Return the first position within the window of the token at `num_tokens`."""
        return jnp.maximum(num_tokens + 1 - self.window, 0)

    def most_kept(self, num_in_flight: int) -> int | None:
        """Return the window before the first token in flight, and those in flight."""
        return self.window - 1 + num_in_flight


@dataclass(frozen=True)
class ChunkedLocal:
    """Attention within chunks of `chunk` tokens, counted from the sequence's start."""

    chunk: int

    def __post_init__(self) -> None:
        """Raise `InputError` for a chunk without tokens."""
        checked_int("chunk", self.chunk, "an int >= 1", 1)

    def first_read(self, num_tokens: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """Return the start of the chunk that holds position `num_tokens`."""
        return num_tokens // self.chunk * self.chunk

    def most_kept(self, num_in_flight: int) -> int | None:
        """Return the chunk before the first token in flight, and those in flight."""
        return self.chunk - 1 + num_in_flight


FULL = FullAttention()


_NAMES: dict[str, type[CacheSpec]] = {
    "full": FullAttention,
    "sliding_window": SlidingWindow,
    "chunked_local": ChunkedLocal,
}


def words(spec: CacheSpec) -> dict[str, Any]:
    """Return a specification as JSON has it. Raises `InputError` for one from outside."""
    names = [name for name, its in _NAMES.items() if type(spec) is its]
    if not names:
        raise InputError(f"cache spec {spec!r} must be one of {', '.join(_NAMES)} to be written down")
    return {"kind": names[0], **dataclasses.asdict(spec)}  # type: ignore[call-overload]


def of_words(words: Mapping[str, Any]) -> CacheSpec:
    """Return the specification that `words` wrote. Raises `InputError` for another kind."""
    kind = words["kind"]
    check("cache spec", kind, f"one of {', '.join(_NAMES)}", kind in _NAMES)
    return _NAMES[kind](**{name: value for name, value in words.items() if name != "kind"})
