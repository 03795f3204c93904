"""A head that is the embedding's table, as files have it: either of the two, both, or two that differ."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from absl import logging

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.names import Names, Tensors, without_prefix

_ROWS = 1 << 12  # rows compared at a time


def is_tied(config: ModelConfig, names: Names, tensors: Tensors) -> bool:
    """Return whether the head is the embedding's table: not where a file has two that differ, whatever the
    config says, as in transformers since its version 5.
    """
    tensors = without_prefix(names, tensors)
    embedding, head = _names(names, tensors)
    if not config.tie_word_embeddings or embedding not in tensors or head not in tensors:
        return config.tie_word_embeddings
    if _are_equal(tensors[embedding], tensors[head]):
        return True
    logging.warning(
        "tie_word_embeddings is true, but %r and %r differ: the head is the latter", embedding, head
    )
    return False


def with_embedding(config: ModelConfig, names: Names, tensors: Tensors) -> Tensors:
    """Return the tensors with the head's as the embedding's, where it is tied and a file has it alone."""
    tensors = without_prefix(names, tensors)
    embedding, head = _names(names, tensors)
    if not config.tie_word_embeddings or embedding in tensors or head not in tensors:
        return tensors
    return _Called(tensors, embedding, head)


def _names(names: Names, tensors: Tensors) -> tuple[str, str]:
    """Return the names of embedding and head, which has the family's prefix where all in a file get it."""
    [embedding], [head] = names.pieces("embedding.weight"), names.pieces("lm_head.weight")
    return embedding, next((name for name in (head, names.prefix + head) if name in tensors), head)


def _are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    places = range(0, len(one), _ROWS)
    return all(one[i : i + _ROWS].tobytes() == other[i : i + _ROWS].tobytes() for i in places)


class _Called(Mapping[str, Any]):
    """Tensors of which one has another name."""

    def __init__(self, tensors: Tensors, name: str, stored: str) -> None:
        self._tensors, self._name, self._stored = tensors, name, stored

    def __getitem__(self, name: str) -> Any:
        if name == self._stored:
            raise KeyError(name)
        return self._tensors[self._stored if name == self._name else name]

    def __contains__(self, name: object) -> bool:
        return name == self._name or (name != self._stored and name in self._tensors)

    def __iter__(self) -> Iterator[str]:
        return (self._name if name == self._stored else name for name in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
