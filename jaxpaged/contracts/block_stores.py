"""The contract of stores of blocks: what a tier below host memory must do, and how one is named.

A store keeps K and V of full blocks of prompts under keys that say all that they depend on. It may lose what
it has at any time: then prompts are computed. It must never give a block that was put under another key.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxpaged.checks import InputError, shown
from jaxpaged.contracts import versions

MOST_KEPT_SECONDS = 30 * 24 * 3600  # for which a request may have its prompt's blocks kept


@dataclasses.dataclass(frozen=True)
class BlockKey:
    """Key of a full block of a prompt.

    Two keys are equal only if all fields are. `parent` stands for all tokens before by their SHA-256.
    """

    space: bytes  # SHA-256 of what an engine's blocks have in common: model, weights, layout and sizes
    parent: bytes  # digest of the block before; of a first block that of space, salt and adapter
    token_ids: bytes  # int32, little-endian
    digest: bytes  # SHA-256 of the three


@dataclasses.dataclass(frozen=True, eq=False)
class StoredBlock:
    """K and V of a block, in the layout's own form. Nobody changes its arrays."""

    present: tuple[bool, ...]  # which groups of layers are here
    arrays: Mapping[str, np.ndarray]  # by the layout's names: [num_present, ...] each

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


@runtime_checkable
class BlockStore(Protocol):
    """A store of blocks by exact keys.

    `contains`, `put` and `clear` are called in the engine's thread and must not wait. `get` is called in a
    thread of its own. What goes wrong inside is the store's to log: no method raises.

    A store may also have `keep(keys, seconds)`, called as `put` is: to give up none of a chain's blocks
    for so long, if it can; 0: no longer. The first ones matter most.
    """

    def contains(self, key: BlockKey) -> bool:
        """Tell whether `get` would give a block, as far as is known without waiting. This is a use of it."""

    def get(self, key: BlockKey) -> StoredBlock | None:
        """Return the block that was put under this key; None if it is not here any more."""

    def put(self, key: BlockKey, block: StoredBlock) -> None:
        """Keep a block from now on, in place of an older one, or drop it if there is no room."""

    def clear(self, space: bytes) -> None:
        """Remove all blocks whose keys have this `space`."""

    def close(self) -> None:
        """Finish pending writes, and store nothing more."""


def named(asked: Any) -> BlockStore:
    """Return the store that a path or a value means, or makes if it is called. Raises `InputError`."""
    option = "kv_offloading_backend"
    rule = "a store of blocks, or a function without arguments that makes one (docs/concepts/tiers.md)"
    path = asked if isinstance(asked, str) else ""
    chosen: Any = versions.imported(option, path, rule) if path else asked
    versions.check_version(option, asked, chosen, "block_store")
    if isinstance(chosen, type) or not isinstance(chosen, BlockStore):
        if not callable(chosen):
            raise InputError(f"{option}={shown(asked)} must be {rule}")
        try:
            chosen = chosen()
        except Exception as error:  # whatever somebody's function raises
            why = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"{option}={shown(asked)} cannot be made: {why}") from error
    if not isinstance(chosen, BlockStore):
        raise InputError(f"{option}={shown(asked)} must be {rule}")
    return chosen
