"""Which cached block to give up when the free ones have run out."""

import dataclasses
import enum


class EvictionPolicy(enum.Enum):
    """The rules to choose from."""

    LRU = enum.auto()


@dataclasses.dataclass
class BlockMetaData:
    """What is known of a block that nobody uses and that may be evicted."""

    content_hash: int
    num_hashed_tokens: int  # tokens from the start of its sequence to its end
    last_accessed: float  # in whatever unit the caller's clock has


class LRUEvictor:
    """Evicts the block used longest ago; of those with the same time, the one deepest in its sequence.

    The blocks stand in the order in which they were added, and a new time does not move one. The search
    starts at the head, keeps the deepest block, and ends at the first that is younger than the one kept: it
    relies on times that grow from head to tail, and does not look for an older block further on. Ties go to
    the earlier one.
    """

    def __init__(self) -> None:
        self.free_table: dict[int, BlockMetaData] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self.free_table

    def evict(self) -> tuple[int, int]:
        """Remove a block; returns its id and its content hash. ValueError: there is none."""
        if not self.free_table:
            raise ValueError("there is no block to evict")
        chosen_id = next(iter(self.free_table))
        for block_id, block in self.free_table.items():
            chosen = self.free_table[chosen_id]
            if block.last_accessed > chosen.last_accessed:
                break
            if block.num_hashed_tokens > chosen.num_hashed_tokens:
                chosen_id = block_id
        return chosen_id, self.free_table.pop(chosen_id).content_hash

    def add(self, block_id: int, content_hash: int, num_hashed_tokens: int, last_accessed: float) -> None:
        self.free_table[block_id] = BlockMetaData(content_hash, num_hashed_tokens, last_accessed)

    def update(self, block_id: int, last_accessed: float) -> None:
        self.free_table[block_id].last_accessed = last_accessed

    def remove(self, block_id: int) -> None:
        """Take a block out that is in use again. ValueError: it is not here."""
        if block_id not in self.free_table:
            raise ValueError(f"{block_id=} is not in the evictor")
        del self.free_table[block_id]

    @property
    def num_blocks(self) -> int:
        return len(self.free_table)


def make_evictor(eviction_policy: EvictionPolicy) -> LRUEvictor:
    """An evictor that follows a policy. ValueError: an unknown policy."""
    if eviction_policy == EvictionPolicy.LRU:
        return LRUEvictor()
    raise ValueError(f"{eviction_policy=} must be EvictionPolicy.LRU")
