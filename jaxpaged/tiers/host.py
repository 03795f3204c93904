"""A store of blocks in host memory, of a fixed size."""

import collections
import threading
import time
from collections.abc import Callable, Sequence

from jaxpaged.contracts.block_stores import BlockKey, StoredBlock

KEPT_SHARE = 2  # one part in so many of a store may be kept for requests that ask for it


class HostStore:
    """Blocks in host memory, at most so many bytes of K and V. Any thread may ask.

    The block used longest ago goes first, but those that are kept. `reference.tiers.Store` is its oracle.

    clock: tells seconds.
    observe: is told the digest of each block that comes or goes, and whether it is here; in any thread.
    """

    observe: Callable[[bytes, bool], None] | None = None

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        self._clock = clock
        self._blocks: collections.OrderedDict[BlockKey, StoredBlock] = collections.OrderedDict()
        self._kept: dict[BlockKey, tuple[float, StoredBlock]] = {}  # until when, and the block
        self._first_end = float("inf")  # of those times
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many blocks are here."""
        return len(self._blocks) + len(self._kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the blocks that are kept."""
        with self._lock:
            self._let_go()
            return self._sum_kept()

    def contains(self, key: BlockKey) -> bool:
        """Return whether a block is stored; this counts as a use of it."""
        return self.get(key) is not None

    def get(self, key: BlockKey) -> StoredBlock | None:
        """Return a block, which counts as a use of it; None if it is not stored."""
        with self._lock:
            self._let_go()
            if key in self._kept:
                return self._kept[key][1]
            if (block := self._blocks.get(key)) is not None:
                self._blocks.move_to_end(key)
            return block

    def put(self, key: BlockKey, block: StoredBlock) -> None:
        """Keep a block in place of an older one of its key. What is too large is not kept."""
        with self._lock:
            self._let_go()
            if block.num_bytes > self.capacity:
                self._drop(key)
                return
            if key in self._kept:
                until, old = self._kept[key]
                self.num_bytes -= old.num_bytes
                self._kept[key] = until, block
                if self._sum_kept() > self.capacity // KEPT_SHARE:
                    self._blocks[key] = self._kept.pop(key)[1]
            else:
                self._drop(key)
                self._blocks[key] = block
            self.num_bytes += block.num_bytes
            if self.observe is not None:
                self.observe(key.digest, True)
            while self.num_bytes > self.capacity:
                self._drop(next(iter(self._blocks)))

    def keep(self, keys: Sequence[BlockKey], seconds: float) -> None:
        """Keep the blocks of a chain for so long, from the first on, as far as they are here.

        All that is kept has at most a share of the capacity. A block is kept until the latest time that was
        asked for; for 0 seconds it is kept no more.
        """
        with self._lock:
            self._let_go()
            until, room = self._clock() + seconds, self.capacity // KEPT_SHARE - self._sum_kept()
            those = []
            for key in keys:
                if key not in self._kept and seconds:
                    block = self._blocks.get(key)
                    if block is None or (room := room - block.num_bytes) < 0:
                        break
                those.append(key)
            for key in reversed(those):  # so that the chain's end goes before its beginning
                old, block = self._kept.get(key, (0.0, self._blocks.get(key)))
                if block is not None and not seconds and key in self._kept:
                    self._blocks[key] = self._kept.pop(key)[1]
                elif block is not None and seconds and until >= old:
                    self._blocks.pop(key, None)
                    self._kept.pop(key, None)
                    self._kept[key] = until, block
                    self._first_end = min(self._first_end, until)

    def clear(self, space: bytes) -> None:
        """Remove all blocks whose keys have this space."""
        with self._lock:
            for key in [key for key in (*self._blocks, *self._kept) if key.space == space]:
                self._drop(key)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._blocks.clear()
            self._kept.clear()
            self.num_bytes = 0

    def _sum_kept(self) -> int:
        return sum(block.num_bytes for _, block in self._kept.values())

    def _let_go(self) -> None:
        """Let blocks be given up whose time is over: as if used at its end."""
        now = self._clock()
        if now < self._first_end:
            return
        for key, (until, block) in sorted(self._kept.items(), key=lambda item: item[1][0]):
            if until <= now:
                del self._kept[key]
                self._blocks[key] = block
        self._first_end = min((until for until, _ in self._kept.values()), default=float("inf"))

    def _drop(self, key: BlockKey) -> None:
        old = self._blocks.pop(key, None) or self._kept.pop(key, (0.0, None))[1]
        if old is not None:
            self.num_bytes -= old.num_bytes
            if self.observe is not None:
                self.observe(key.digest, False)
