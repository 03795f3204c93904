"""Choice of the cached block to give up when the free ones have run out."""

import dataclasses


@dataclasses.dataclass
class Evictable:
    """A block that nobody uses and that may be evicted."""

    content_hash: int
    num_hashed_tokens: int  # tokens from the start of its sequence to its end
    last_accessed: float  # in whatever unit the caller's clock has


class LRUEvictor:
    """Unused cached blocks: the one used longest ago goes first, the deepest of several equally old.

    The blocks stand in the order in which they were added, and a new time does not move one. The search
    starts at the head, keeps the deepest block, and ends at the first that is younger than the one kept. It
    relies on times that grow from head to tail, and does not look for an older block further on. The earlier
    of two equal blocks goes first.
    """

    def __init__(self) -> None:
        self.table: dict[int, Evictable] = {}

    def evict(self) -> tuple[int, int]:
        """Remove a block; return its id and its content hash. StopIteration: there is none."""
        chosen_id = next(iter(self.table))
        for block_id, block in self.table.items():
            chosen = self.table[chosen_id]
            if block.last_accessed > chosen.last_accessed:
                break
            if block.num_hashed_tokens > chosen.num_hashed_tokens:
                chosen_id = block_id
        return chosen_id, self.table.pop(chosen_id).content_hash
