"""Model for adapters of managers: a slot keeps a token and its place, from which the next follows."""

import hashlib
from collections.abc import Iterable
from typing import Any

VOCAB = 89


def number(*values: Any) -> int:
    """Return a number that depends on all values."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=6).digest(), "big")


class Slots:
    """Slots of K and V, by index."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size

    def write(self, at: int, token: int, position: int) -> None:
        """Write a token at a position of its request."""
        self.values[at] = token, position

    def next_token(self, at: Iterable[int]) -> tuple[int, float]:
        """Return what follows the slots of a request's tokens, and its log-probability."""
        value = number([self.values[i] for i in at])
        return value % VOCAB + 1, -(value % 1000 + 1) / 100
