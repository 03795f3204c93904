"""Combinations to compare: cache sizes and policies. Imports nothing heavy."""

from dataclasses import dataclass

UNBOUNDED = "unbounded"


@dataclass(frozen=True)
class Combination:
    """One cache to send a trace through."""

    policy: str
    block_size: int  # tokens
    cache_tokens: int | None  # None: nothing is ever evicted

    @property
    def size(self) -> str:
        """The cache's, for people."""
        return UNBOUNDED if self.cache_tokens is None else f"{self.cache_tokens:,}"
