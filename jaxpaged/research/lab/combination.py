"""Combinations to compare: cache sizes and policies. Imports nothing heavy."""

from dataclasses import dataclass

UNBOUNDED = "unbounded"


@dataclass(frozen=True)
class Combination:
    """One cache to send a trace through."""

    policy: str
    block_size: int  # tokens
    # Memory, as the tokens that one block table of all layers holds in it. None: nothing is ever evicted.
    cache_tokens: int | None
    one_table: bool = False  # whether all layers share a block table though they read different tokens

    @property
    def label(self) -> str:
        """The policy, and whether there is one table for several kinds of layers."""
        return f"{self.policy}, one table" if self.one_table else self.policy

    @property
    def size(self) -> str:
        """The cache's, for people."""
        return UNBOUNDED if self.cache_tokens is None else f"{self.cache_tokens:,}"


def default_cache_tokens(num_tokens: int, block_size: int) -> list[int | None]:
    """Return cache sizes to compare: each four times the last, up to the trace's tokens, and unbounded."""
    sizes: list[int] = []
    size = 2**14
    while size < num_tokens and len(sizes) < 7:
        sizes.append(size)
        size *= 4
    return [*(size for size in sizes if size >= block_size), None]
