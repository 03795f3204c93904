"""Keys of blocks in stores: all that a block's K and V depend on, in a form that any process makes anew."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.contracts.block_stores import BlockKey


def space_of(block_format: Any) -> bytes:
    """Return the digest of a `BlockFormat`, a dataclass of texts and numbers."""
    return hashlib.sha256(repr(dataclasses.astuple(block_format)).encode()).digest()


def adapter_digest(arrays: Mapping[str, Sequence[np.ndarray]]) -> bytes:
    """Return the digest of an adapter's arrays by their roles."""
    made = hashlib.sha256()
    for role, pair in sorted(arrays.items()):
        for array in pair:
            made.update(repr((role, array.shape, array.dtype.name)).encode())
            made.update(np.ascontiguousarray(array).tobytes())
    return made.digest()


def chain_keys(
    space: bytes, salt: str | None, adapter: bytes, prompt: np.ndarray, block_size: int
) -> list[BlockKey]:
    """Return the keys of a prompt's full blocks, in order.

    adapter: the digest of an adapter's arrays; empty for none.
    prompt: int32 [num_tokens].
    """
    salt_bytes = repr((salt is not None, salt or "")).encode("utf-8", "surrogatepass")
    parent = hashlib.sha256(space + hashlib.sha256(adapter).digest() + salt_bytes).digest()
    tokens = prompt.astype("<i4")
    made = []
    for end in range(block_size, len(tokens) + 1, block_size):
        ids = tokens[end - block_size : end].tobytes()
        digest = hashlib.sha256(space + parent + ids).digest()
        made.append(BlockKey(space, parent, ids, digest))
        parent = digest
    return made
