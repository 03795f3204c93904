"""vLLM's block managers behind one face: rows instead of sequences, and ids that start after the null block.

Every verb does what its manager does, row by row, and raises `Refused` with the status that the functional
side must report. What a manager has no method for (giving back the last tokens) is done with its own parts.

Each takes the class it stands for: with somebody's own in the place of the oracle's, it is that one's face.
Then only what the generation's classes offer everybody is called.
"""

import functools
from collections.abc import Callable

from jaxpaged.research.verify.generations.base import Oracle, Refused
from jaxpaged.research.verify.generations.managers import V0Oracle, V063Oracle
from jaxpaged.research.verify.generations.v1 import V1Oracle

FREE_PROFILES = {"lru": "classic", "lru_split": "split"}  # V1's profiles by policy

# By policy: block size, blocks of both pools, blocks of a row.
ORACLES: dict[str, Callable[[int, int, int, int], Oracle]] = {"lifo": V0Oracle, "naive": V063Oracle} | {
    policy: functools.partial(V1Oracle, profile=profile) for policy, profile in FREE_PROFILES.items()
}

__all__ = ["FREE_PROFILES", "ORACLES", "Oracle", "Refused", "V0Oracle", "V063Oracle", "V1Oracle"]
