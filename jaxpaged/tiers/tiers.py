"""Tiers of an engine: host memory, and perhaps a store below it, which are asked as one.

What leaves the device is put into host memory and, at once, into the store below. What a prompt finds below
is promoted: a thread reads it into host memory, for the engine takes blocks from there alone.
"""

import dataclasses
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from absl import logging

from jaxpaged.contracts import block_stores
from jaxpaged.contracts.block_stores import BlockKey, BlockStore, StoredBlock
from jaxpaged.options import DISK_PREFIX, disk_folder
from jaxpaged.tiers.disk import DiskStore
from jaxpaged.tiers.host import HostStore

HOST = "host"
DISK = "disk"
BELOW = "below"  # name of a store of somebody's


@dataclasses.dataclass
class TierCounts:
    """Counters of a tier since the engine was created, in blocks and bytes, and its present content."""

    num_queries: int = 0  # blocks that prompts looked for
    num_hits: int = 0  # of them blocks that were fetched from here
    read_bytes: int = 0
    written_bytes: int = 0  # that were given to it to keep
    read_seconds: float = 0.0
    store: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def num_bytes(self) -> int | None:
        """Bytes of all blocks in this tier; None for a store that does not count them."""
        return getattr(self.store, "num_bytes", None)

    @property
    def kept_bytes(self) -> int | None:
        """Bytes of blocks that requests keep in this tier; None for a store that does not count them."""
        return getattr(self.store, "kept_bytes", None)


class Promotion:
    """Reading of some blocks from the store below, until a deadline."""

    def __init__(self, keys: Sequence[BlockKey], deadline: float) -> None:
        self.keys = keys
        self.deadline = deadline  # by `time.monotonic`
        self.began = time.monotonic()
        self.done = threading.Event()
        self.promoted: set[BlockKey] = set()

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.done.is_set() or time.monotonic() >= self.deadline


class Tiers:
    """Host memory and perhaps a store below. For the engine's thread, but for what it does in its own."""

    def __init__(self, host: HostStore, below: BlockStore | None = None, below_name: str = BELOW) -> None:
        self.host, self.below, self.below_name = host, below, below_name
        self.counts = {HOST: TierCounts(store=host)}
        if below is not None:
            self.counts[below_name] = TierCounts(store=below)
        self._jobs: queue.SimpleQueue[Promotion | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def stores(self) -> dict[str, BlockStore]:
        """All tiers by their names, the fastest first."""
        return {HOST: self.host} | ({} if self.below is None else {self.below_name: self.below})

    def num_cached(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of these blocks, from the first on, any tier has.

        All are used, the last one first, so that a chain's end goes before its beginning.
        """
        num_found = len(keys)
        for i in range(len(keys) - 1, -1, -1):
            is_here = self.host.contains(keys[i])
            is_below = self.below is not None and self.below.contains(keys[i])
            if not (is_here or is_below):
                num_found = i
        return num_found

    def has(self, key: BlockKey) -> bool:
        """Return whether all tiers have a block; this counts as a use of it."""
        is_below = self.below is None or self.below.contains(key)
        return self.host.contains(key) and is_below

    def below_only(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return the keys of blocks that are not in host memory."""
        if self.below is None:
            return []
        return [key for key in reversed(keys) if not self.host.contains(key)][::-1]

    def promote(self, keys: Sequence[BlockKey], deadline: float) -> Promotion:
        """Begin to read blocks into host memory, the last one first; those that came by the deadline count.

        deadline: by `time.monotonic`.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="jaxpaged-tiers", daemon=True)
            self._thread.start()
        job = Promotion(keys, deadline)
        self._jobs.put(job)
        return job

    def get(self, key: BlockKey) -> StoredBlock | None:
        """Return a block from host memory, which is a use of it; None if it is not there."""
        return self.host.get(key)

    def put(self, key: BlockKey, block: StoredBlock) -> None:
        """Keep a block in all tiers."""
        self.host.put(key, block)
        self.counts[HOST].written_bytes += block.num_bytes
        if self.below is not None:
            self.below.put(key, block)
            self.counts[self.below_name].written_bytes += block.num_bytes

    def keep(self, keys: Sequence[BlockKey], seconds: float) -> None:
        """Keep the blocks of a chain for so long in all tiers that can, from the first on; 0: no more."""
        for store in (self.host, self.below):
            if (keep := getattr(store, "keep", None)) is not None:
                keep(keys, seconds)

    def clear(self, space: bytes) -> None:
        """Forget all blocks of a space, in all tiers."""
        self.host.clear(space)
        if self.below is not None:
            self.below.clear(space)

    def close(self) -> None:
        """Finish all pending writes, and drop the blocks in host memory."""
        self._jobs.put(None)
        if self.below is not None:
            self.below.close()
        self.host.close()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self.read(job)
            except Exception:  # a store of somebody's: a failed fetch is a miss
                logging.exception("blocks cannot be read from %s", self.below_name)
            job.done.set()

    def read(self, job: Promotion) -> None:
        """Read blocks into host memory, in the thread that asks, until the job is over."""
        counts = self.counts[self.below_name]
        for key in reversed(job.keys):
            if job.is_over or self.below is None:
                return
            began = time.perf_counter()
            block = self.below.get(key)
            if block is not None:
                self.host.put(key, block)
                job.promoted.add(key)
                counts.read_bytes += block.num_bytes
                counts.read_seconds += time.perf_counter() - began


def opened(size_gib: float, backend: Any, disk_size_gib: float) -> Tiers:
    """Make the tiers that options name, of so many GiB. Raises `InputError` if one cannot be used."""
    host = HostStore(int(size_gib * 2**30))
    if isinstance(backend, str) and backend == HOST:
        return Tiers(host)
    if isinstance(backend, str) and backend.startswith(DISK_PREFIX):
        folder = disk_folder("kv_offloading_backend", backend)
        return Tiers(host, DiskStore(folder, int(disk_size_gib * 2**30)), DISK)
    return Tiers(host, block_stores.named(backend), BELOW)
