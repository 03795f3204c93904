"""A store of blocks in host memory, of a fixed size."""

import collections
import threading

from jaxpaged.contracts.block_stores import BlockKey, StoredBlock


class HostStore:
    """Blocks in host memory, at most so many bytes of K and V. Any thread may ask.

    The block used longest ago goes first. `reference.tiers.Store` is its oracle.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        self._blocks: collections.OrderedDict[BlockKey, StoredBlock] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many blocks are here."""
        return len(self._blocks)

    def contains(self, key: BlockKey) -> bool:
        """Tell whether a block is here, which is a use of it."""
        return self.get(key) is not None

    def get(self, key: BlockKey) -> StoredBlock | None:
        """Return a block, which is a use of it; None if it is not here."""
        with self._lock:
            if (found := self._blocks.get(key)) is not None:
                self._blocks.move_to_end(key)
            return found

    def put(self, key: BlockKey, block: StoredBlock) -> None:
        """Keep a block in place of an older one of its key. What is too large is not kept."""
        with self._lock:
            self._drop(key)
            if block.num_bytes > self.capacity:
                return
            self._blocks[key] = block
            self.num_bytes += block.num_bytes
            while self.num_bytes > self.capacity:
                self._drop(next(iter(self._blocks)))

    def clear(self, space: bytes) -> None:
        """Forget all blocks whose keys have this space."""
        with self._lock:
            for key in [key for key in self._blocks if key.space == space]:
                self._drop(key)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._blocks.clear()
            self.num_bytes = 0

    def _drop(self, key: BlockKey) -> None:
        if (old := self._blocks.pop(key, None)) is not None:
            self.num_bytes -= old.num_bytes
