"""Low-rank adapters in NumPy: what one adds to a product, and a model's weights with one merged into them.

An adapter changes some of a role's outputs: `[first, first + len(b))`, where queries, keys and values are one
product. Of a product x @ weight.T it makes x @ (weight + scale * b @ a).T.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Update(NamedTuple):
    """Low-rank update of neighbouring outputs of one weight."""

    first: int  # output
    a: np.ndarray  # [rank, in_features]
    b: np.ndarray  # [outputs, rank]
    scale: float


def added(y: np.ndarray, x: np.ndarray, update: Update) -> np.ndarray:
    """Return `y`, [num_tokens, out_features], plus the update of `x`, [num_tokens, in_features]."""
    y = y.copy()
    y[:, update.first : update.first + len(update.b)] += update.scale * (x @ update.a.T) @ update.b.T
    return y


def merged(
    weights: Mapping[str, np.ndarray], adapter: Mapping[str, Sequence[Update]]
) -> dict[str, np.ndarray]:
    """Return all weights, by their role ("layers.0.qkv.weight", for example), with the updates of some added.

    The product of the two is taken in float64, and the sum has the weight's dtype.
    """
    merged = dict(weights)
    for role, updates in adapter.items():
        weight = weights[role].astype(np.float64)
        for first, a, b, scale in updates:
            weight[first : first + len(b)] += scale * b.astype(np.float64) @ a.astype(np.float64)
        merged[role] = weight.astype(weights[role].dtype)
    return merged
