"""A store of blocks in a directory, which several engines and restarts share.

Each block is a safetensors file with keyed digests (`block_files`). What is torn, or written by somebody
else, is told apart and never used. A thread writes files and renames them when they are whole. What comes
while too much waits for it is dropped. The file used longest ago goes first. A file that is kept for a
request has the end of that time as the time of its change, so other engines and later starts know of it.
"""

import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from absl import logging

from jaxpaged import disk_cache
from jaxpaged.contracts.block_stores import MOST_KEPT_SECONDS, BlockKey, StoredBlock
from jaxpaged.tiers import block_files
from jaxpaged.tiers.host import KEPT_SHARE

MOST_WAITING_BYTES = 2**28  # of blocks that wait to be written
CLOSE_SECONDS = 30.0  # how long a closing engine waits for a disk
LIST_SECONDS = 1.0  # between two looks for what other engines have written
LEFT = 0.95  # of the limit, after files were removed
MOST_KEPT_NS = int(MOST_KEPT_SECONDS * 1e9)
CLOCKS_NS = 10**9  # by which clocks of engines may differ


# For the thread: a block to write, and when it was put, in nanoseconds; blocks to keep; a space to clear; an
# event to be set when all before is done; or the end.
type Job = tuple[BlockKey, StoredBlock, int] | Keep | bytes | threading.Event | None


@dataclasses.dataclass(frozen=True)
class Keep:
    """Order of some time to keep the blocks of a chain until a later one, in nanoseconds; 0: no more."""

    paths: Sequence[Path]
    until: int
    now: int


class DiskStore:
    """Store of blocks as files in a directory, of a bounded number of bytes. Any thread may ask; `contains`
    asks no disk.

    folder: is made if it is not there. It must be the user's own, nobody else may write to it, and it must be
        empty where it has no marker of ours.
    capacity: bytes of files, those of other engines included.
    observe: is told the digest of each block that comes or goes, and whether it is here; in any thread.

    Raises `InputError` for a folder that cannot be used.
    """

    observe: Callable[[bytes, bool], None] | None = None

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder, self.capacity = folder, capacity
        self._secret = block_files.open_folder(folder)
        self._sizes: dict[Path, int] = {}  # bytes of the files that are known, by their paths
        # Files with names of blocks: inode and bytes when they were looked at, and whether they are ours.
        self._looked_at: dict[Path, tuple[tuple[int, int], bool]] = {}
        self._bad: set[Path] = set()  # files that are not used
        self._said: set[str] = set()
        self._used: dict[Path, int] = {}  # times of last use that are not written down, in nanoseconds
        self._kept: dict[Path, int] = {}  # until when these are kept, by whomever, in nanoseconds
        self._released: set[Path] = set()  # of those whose times are to be written down
        self._lock = threading.Lock()
        self._listed = -np.inf
        self._waiting_bytes = 0
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._list()
        if num_others := sum(not is_ours for _, is_ours in self._looked_at.values()):
            self._say(f"has {num_others} files with names of blocks that are neither used nor removed", None)
        self._thread = threading.Thread(target=self._serve, name="jaxpaged-disk", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that are known."""
        with self._lock:
            return sum(self._sizes.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the files that are kept, those that other engines keep included."""
        with self._lock:
            return self._sum_kept()

    def contains(self, key: BlockKey) -> bool:
        """Return whether a file is known to exist; this counts as a use of it. The disk is not asked."""
        path = self._path(key)
        if time.monotonic() - self._listed > LIST_SECONDS:
            self._listed = time.monotonic()
            self._jobs.put(threading.Event())  # the thread looks for others' files
        with self._lock:
            is_there = path in self._sizes and path not in self._bad
            if is_there:
                self._use(path, time.time_ns())
            return is_there

    def get(self, key: BlockKey) -> StoredBlock | None:
        """Read a block, which is a use of it; None if it is not there or cannot be used."""
        path = self._path(key)
        if path in self._bad:
            return None
        try:
            block = block_files.read(path.read_bytes(), key, self._secret)
        except FileNotFoundError:  # another engine may have removed it
            self._forget(path)
            return None
        except OSError as error:
            self._say("cannot be read", error)
            self._forget(path)
            return None
        except Exception as error:  # whatever bytes of anybody make safetensors and NumPy raise
            self._bad.add(path)
            self._tell([path], False)
            logging.warning("%s is skipped, for it is torn or somebody else's: %s", path, error)
            return None
        with self._lock:
            self._use(path, time.time_ns())
        return block

    def put(self, key: BlockKey, block: StoredBlock) -> None:
        """Let the thread write a block. It is dropped if too many bytes wait to be written."""
        with self._lock:
            if self._waiting_bytes + block.num_bytes > MOST_WAITING_BYTES:
                is_full = True
            else:
                is_full = False
                self._waiting_bytes += block.num_bytes
        if is_full:
            self._say("is too slow: blocks are not kept", None)
            return
        self._jobs.put((key, block, time.time_ns()))

    def keep(self, keys: Sequence[BlockKey], seconds: float) -> None:
        """Keep the blocks of a chain for so long, from the first on, as far as they are here or will be.

        All that is kept, by whomever, has at most a share of the capacity. A block is kept until the latest
        time that was asked for; for 0 seconds it is kept no more. Times are the files', so others see them.
        """
        now = time.time_ns()
        until = now + int(min(seconds, MOST_KEPT_SECONDS) * 1e9) if seconds else 0
        self._jobs.put(Keep([self._path(key) for key in keys], until, now))

    def clear(self, space: bytes) -> None:
        """Remove all blocks of a space, those of other engines included."""
        folder = block_files.folder_of(self.folder, space)
        with self._lock:
            gone = [path for path in self._sizes if path.parent == folder]
            self._sizes = {path: size for path, size in self._sizes.items() if path.parent != folder}
        self._tell(gone, False)
        self._jobs.put(space)

    def flush(self) -> None:
        """Wait until all is written that was put, and the directory has been listed."""
        done = threading.Event()
        self._jobs.put(done)
        done.wait()

    def close(self) -> None:
        """Write all waiting blocks, and end the thread."""
        self._jobs.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _path(self, key: BlockKey) -> Path:
        return block_files.path_of(self.folder, key)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, threading.Event):
                    self._list()
                elif isinstance(job, Keep):
                    self._keep(job)
                elif isinstance(job, bytes):
                    folder = block_files.folder_of(self.folder, job)
                    for path, _ in block_files.listed(self.folder):
                        if path.parent == folder:
                            self._remove(path)
                else:
                    self._write(*job)
            except Exception as error:  # a disk that is full, or gone
                self._say("cannot be written to", error)
            if isinstance(job, threading.Event):
                job.set()
        with contextlib.suppress(OSError):
            self._note_uses()

    def _write(self, key: BlockKey, block: StoredBlock, when: int) -> None:
        path = self._path(key)
        try:
            content = block_files.written(key, block, self._secret)
            if len(content) > self.capacity:
                return
            if not self.folder.is_dir():
                raise FileNotFoundError(f"{self.folder} is gone")
            disk_cache.write_file(path, content)
        finally:
            with self._lock:
                self._waiting_bytes -= block.num_bytes
        with self._lock:
            self._sizes[path] = len(content)
            # It may have become larger.
            if path in self._kept and self._sum_kept() > self.capacity // KEPT_SHARE:
                del self._kept[path]
                self._released.add(path)
            self._use(path, max(when, self._used.get(path, 0)))
        self._bad.discard(path)
        self._tell([path], True)
        if self.num_bytes > self.capacity:
            self._list()
            self._prune()

    def _sum_kept(self) -> int:
        """Return the bytes of the files that are kept. Call it with the lock."""
        now = time.time_ns()
        return sum(self._sizes.get(path, 0) for path, until in self._kept.items() if until > now)

    def _use(self, path: Path, when: int) -> None:
        """Note a use of a file. One that is kept is used by the end of its time."""
        self._used[path] = max(when, self._kept.get(path, 0))

    def _keep(self, job: Keep) -> None:
        if time.monotonic() - self._listed > LIST_SECONDS:  # what others keep counts, too
            self._list()
        with self._lock:
            self._keep_known(job)

    def _keep_known(self, job: Keep) -> None:
        now = job.now
        self._kept = {
            path: until for path, until in self._kept.items() if until > now and path in self._sizes
        }
        room = self.capacity // KEPT_SHARE - self._sum_kept()
        for place, path in zip(range(len(job.paths), 0, -1), job.paths, strict=True):
            if not job.until:  # times differ, so that the chain's end goes before its beginning
                if self._kept.pop(path, None) is not None:
                    self._released.add(path)
                    self._used[path] = now + place
                continue
            if path not in self._sizes:
                return
            if path not in self._kept and (room := room - self._sizes[path]) < 0:
                return
            self._kept[path] = max(self._kept.get(path, 0), job.until + place)
            self._use(path, now)

    def _prune(self) -> None:
        """Remove the files used longest ago until there is room again."""
        total = self.num_bytes
        max_bytes = int(self.capacity * LEFT) if total > self.capacity else total
        for path in sorted(self._sizes, key=_last_use):
            if total <= max_bytes:
                break
            total -= self._sizes.get(path, 0)
            self._remove(path)

    def _note_uses(self) -> None:
        """Write down when files were last used, as the times of their change."""
        with self._lock:
            used, self._used = self._used, {}
            released, self._released = self._released, set()
        now = time.time_ns()
        for path, when in used.items():
            with contextlib.suppress(FileNotFoundError):
                until = path.stat().st_mtime_ns
                if until > now and path not in released:  # somebody keeps it
                    when = max(when, until)
                os.utime(path, ns=(when, when))

    def _list(self) -> None:
        """Record the use of files, and list the directory anew."""
        self._note_uses()
        now = time.time_ns()
        looked_at, sizes, times = {}, {}, {}
        for path, status in block_files.listed(self.folder):
            identity, before = (status.st_ino, status.st_size), self._looked_at.get(path)
            is_same = before is not None and before[0] == identity
            is_ours = before[1] if before is not None and is_same else block_files.is_ours(path, self._secret)
            looked_at[path] = identity, is_ours
            if is_ours:
                sizes[path], times[path] = status.st_size, status.st_mtime_ns
        self._looked_at = looked_at
        with self._lock:
            old, self._sizes = self._sizes, sizes
            self._kept = {path: until for path, until in times.items() if until > now}
            self._release_excess(now)
        self._note_uses()
        self._tell(old.keys() - sizes.keys(), False)
        self._tell(sizes.keys() - old.keys(), True)
        self._listed = time.monotonic()

    def _release_excess(self, now: int) -> None:
        """Keep no more than a share of the capacity, whoever asked for it; what ends last is kept first.

        So it is where engines with less room, or two at the same moment, have met; a chain's end goes first.
        """
        room = self.capacity // KEPT_SHARE
        for path in sorted(self._kept, key=self._kept.__getitem__, reverse=True):
            is_bounded = self._kept[path] <= now + MOST_KEPT_NS + CLOCKS_NS
            if not is_bounded or self._sizes[path] > room:
                del self._kept[path]
                self._released.add(path)
                self._used[path] = now
            else:
                room -= self._sizes[path]

    def _remove(self, path: Path) -> None:
        """Remove a file, if it is still one of ours."""
        if block_files.is_ours(path, self._secret):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self._forget(path)

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._sizes.pop(path, None)
            self._used.pop(path, None)
            self._kept.pop(path, None)
        self._tell([path], False)

    def _tell(self, paths: Iterable[Path], is_there: bool) -> None:
        """Report to the observer, if there is one, the files that have come or gone."""
        if self.observe is not None:
            for path in paths:
                self.observe(bytes.fromhex(path.stem), is_there)

    def _say(self, what: str, error: Exception | None) -> None:
        """Log a kind of trouble once."""
        text = f"{what}: {type(error).__name__}" if error is not None else what
        if text not in self._said:
            self._said.add(text)
            logging.warning("the folder %s %s%s", self.folder, what, "" if error is None else f": {error}")


def _last_use(path: Path) -> int:
    """Return when a file was last used, in nanoseconds; of one that is kept, until when. 0 for none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
