"""Bytes of every token of a vocabulary, as grammars read them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int, UInt8

from jaxpaged.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of each token id, and the ids that end an answer. `b""` may never be written: a special token."""

    raw: tuple[bytes, ...]
    eos_ids: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """Digest of all that a table depends on: 64 hexadecimal digits."""
        made = hashlib.sha256(repr(self.eos_ids).encode())
        for raw in self.raw:
            made.update(len(raw).to_bytes(4, "little") + raw)
        return made.hexdigest()

    @cached_property
    def trie(self) -> "tuple[Level, ...]":
        """Levels of the tree of all tokens' bytes, from the root's children on."""
        return _levels(self.raw)


@dataclass(frozen=True)
class Level:
    """Nodes of one depth: N beginnings of tokens, in order, and the T tokens that end there."""

    parent: Int[np.ndarray, "N"]  # a node of the level before; 0 for the root
    byte: UInt8[np.ndarray, "N"]
    token: Int[np.ndarray, "T"]  # ids
    node: Int[np.ndarray, "T"]  # where each ends


def token_bytes(vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]) -> TokenBytes:
    """Return the bytes of a model's token ids; special tokens and ids without a name have none.

    SentencePiece's tokens are taken as behind other text, so a space before the first word stays.
    """
    special = vocabulary.special | set(eos_ids)
    raw = tuple(b"" if token in special else vocabulary.raw(token) for token in range(vocab_size))
    return TokenBytes(raw, tuple(sorted(i for i in set(eos_ids) if 0 <= i < vocab_size)))


def _levels(raw: Sequence[bytes]) -> tuple[Level, ...]:
    order = np.array(
        sorted((i for i, token_bytes in enumerate(raw) if token_bytes), key=raw.__getitem__), np.int32
    )
    if not len(order):
        return ()
    lengths = np.array([len(raw[i]) for i in order])
    longest = int(lengths.max())
    letters = np.zeros((len(order), longest), np.uint8)
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        letters[rows, :length] = np.frombuffer(b"".join(raw[i] for i in order[rows]), np.uint8).reshape(
            len(rows), length
        )
    levels = []
    is_new = np.zeros(len(order), bool)
    is_new[0] = True
    node_before = np.zeros(len(order), np.int64)
    for depth in range(longest):
        # Neighbours in order of the alphabet that differ so far, or of which one has ended.
        is_new[1:] |= letters[1:, depth] != letters[:-1, depth]
        is_new[1:] |= lengths[:-1] <= depth
        there = lengths > depth
        first = is_new & there
        node = np.cumsum(first) - 1
        ends = there & (lengths == depth + 1)
        levels.append(Level(node_before[first], letters[first, depth], order[ends], node[ends]))
        node_before = node
    return tuple(levels)
