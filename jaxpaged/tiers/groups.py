"""Groups of layers in tiers: which of a chain's blocks each group must have so that a prompt can go on."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def blocks_read(specs: Sequence[Any], num_blocks: int, block_size: int) -> np.ndarray:
    """Return which blocks of each group attention reads after `num_tokens` tokens, bool [num_groups,
    num_blocks].

    specs: a `CacheSpec` for each group; the first group's blocks are all needed.
    """
    index, position = np.arange(num_blocks), np.int32(num_blocks * block_size)
    read = np.stack(
        [
            (index >= int(spec.first_read(position)) // block_size) | (index < spec.first_blocks(block_size))
            for spec in specs
        ]
    )
    read[0] = True
    return read


def served(present: Sequence[tuple[bool, ...]], specs: Sequence[Any], first: int, block_size: int) -> int:
    """Return how many blocks all groups can go on from: `first` that the device has, and some of these.

    present: of each block behind the first ones, which groups' K and V are there. `reference.tiers.served` is
        the oracle.
    """
    for end in range(first + len(present), first, -1):
        read = blocks_read(specs, end, block_size)[:, first:]
        if np.all(~read | np.array(present[: end - first]).T):
            return end
    return first
