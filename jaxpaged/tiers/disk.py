"""A store of blocks in a directory, which several engines and restarts share.

Each block is a safetensors file under the digest of its key. Its metadata has a keyed digest of the key and
of all arrays. The secret for that is a file of the directory, for its owner alone. So what is torn, or
written by somebody else, is told apart and never used. A thread writes files and renames them when they are
whole. What comes while too much waits for it is dropped. The file used longest ago goes first.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import queue
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from safetensors.numpy import load, save

from jaxpaged import disk_cache
from jaxpaged.checks import InputError, check
from jaxpaged.contracts.block_stores import BlockKey, StoredBlock
from jaxpaged.tiers.host import KEPT_SHARE
from jaxpaged.untrusted import dtype_named, read_json
from pallas_kernels.compilation_cache import why_untrusted

FORMAT = "jaxpaged block, version 1"  # the one entry of the metadata
SUFFIX = ".safetensors"
SECRET, SECRET_BYTES = "secret", 32
MOST_WAITING_BYTES = 2**28  # of blocks that wait to be written
CLOSE_SECONDS = 30.0  # how long a closing engine waits for a disk
LIST_SECONDS = 1.0  # between two looks for what other engines have written
LEFT = 0.95  # of the limit, after files were removed
MOST_SECONDS = 1e9  # that a block is kept


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
    """Blocks in a directory, at most so many bytes of files. Any thread may ask; `contains` asks no disk.

    folder: is made if it is not there. It must be the user's own, and nobody else may write to it.
    capacity: bytes of files, those of other engines included.
    observe: is told the digest of each block that comes or goes, and whether it is here; in any thread.

    Raises `InputError` for a folder that cannot be used.
    """

    observe: Callable[[bytes, bool], None] | None = None

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder, self.capacity = folder, capacity
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            problem = "is no folder" if not folder.is_dir() else why_untrusted(folder)
            self._secret = b"" if problem else _secret_of(folder)
        except OSError as error:
            raise InputError(f"kv_offloading_backend='disk:{folder}' cannot be used: {error}") from error
        check("kv_offloading_backend", f"disk:{folder}", f"a folder of one's own: it {problem}", not problem)
        self._sizes: dict[Path, int] = {}  # bytes of the files that are known, by their paths
        self._bad: set[Path] = set()  # files that are not used
        self._said: set[str] = set()
        self._used: dict[Path, int] = {}  # times of last use that are not written down, in nanoseconds
        self._kept: dict[Path, int] = {}  # until when these are kept, in nanoseconds
        self._released: set[Path] = set()  # of those whose times are to be written down
        self._lock = threading.Lock()
        self._listed = -np.inf
        self._waiting_bytes = 0
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._list()
        self._thread = threading.Thread(target=self._serve, name="jaxpaged-disk", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that are known."""
        with self._lock:
            return sum(self._sizes.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the files that this engine keeps."""
        with self._lock:
            return self._sum_kept()

    def contains(self, key: BlockKey) -> bool:
        """Tell whether a file is known to be there, which is a use of it. The disk is not asked."""
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
            block = _read(path.read_bytes(), key, self._secret)
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

        All that this engine keeps has at most a share of the capacity. A block is kept until the latest time
        that was asked for; for 0 seconds it is kept no more. Times are the files', so others see them.
        """
        now = time.time_ns()
        until = now + int(min(seconds, MOST_SECONDS) * 1e9) if seconds else 0
        self._jobs.put(Keep([self._path(key) for key in keys], until, now))

    def clear(self, space: bytes) -> None:
        """Remove all blocks of a space, those of other engines included."""
        folder = self._folder(space)
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
        """Write what waits, and end the thread."""
        self._jobs.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _path(self, key: BlockKey) -> Path:
        return self._folder(key.space) / f"{key.digest.hex()}{SUFFIX}"

    def _folder(self, space: bytes) -> Path:
        return self.folder / space.hex()[:16]

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, threading.Event):
                    self._note_uses()
                    self._list()
                elif isinstance(job, Keep):
                    self._keep(job)
                elif isinstance(job, bytes):
                    for path in [*self._files(self._folder(job))]:
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
            content = written(key, block, self._secret)
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
            self._note_uses()
            self._list()
            self._prune()

    def _sum_kept(self) -> int:
        """Return the bytes of the files that this engine keeps. Call it with the lock."""
        now = time.time_ns()
        return sum(self._sizes.get(path, 0) for path, until in self._kept.items() if until > now)

    def _use(self, path: Path, when: int) -> None:
        """Note a use of a file. One that is kept is used by the end of its time."""
        self._used[path] = max(when, self._kept.get(path, 0))

    def _keep(self, job: Keep) -> None:
        # What was kept before a restart, or by others, is told by its file.
        late = {path for path in job.paths if not job.until and _last_use(path) > job.now}
        with self._lock:
            self._keep_known(job, late)

    def _keep_known(self, job: Keep, late: Collection[Path]) -> None:
        now = job.now
        self._kept = {
            path: until for path, until in self._kept.items() if until > now and path in self._sizes
        }
        room = self.capacity // KEPT_SHARE - self._sum_kept()
        for place, path in zip(range(len(job.paths), 0, -1), job.paths, strict=True):
            if not job.until:  # times differ, so that the chain's end goes before its beginning
                if self._kept.pop(path, None) is not None or path in late:
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
        most = int(self.capacity * LEFT) if total > self.capacity else total
        for path in sorted(self._sizes, key=_last_use):
            if total <= most:
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
        """Look for what is in the directory now."""
        found = {}
        for path in self._files(self.folder):
            with contextlib.suppress(OSError):
                found[path] = path.stat().st_size
        with self._lock:
            old, self._sizes = self._sizes, found
        self._tell(old.keys() - found.keys(), False)
        self._tell(found.keys() - old.keys(), True)
        self._listed = time.monotonic()

    def _files(self, folder: Path) -> Iterator[Path]:
        """Yield the files of blocks in a folder. What a killed process left unfinished goes after an hour."""
        long_ago = time.time() - disk_cache.UNFINISHED_SECONDS
        for name, _, files in os.walk(folder):
            for file in files:
                path = Path(name, file)
                if file.endswith(SUFFIX):
                    yield path
                elif file.startswith(disk_cache.UNFINISHED):
                    with contextlib.suppress(OSError):
                        if path.stat().st_mtime < long_ago:
                            path.unlink()

    def _remove(self, path: Path) -> None:
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
        """Tell who observes which files have come or gone."""
        if self.observe is not None:
            for path in paths:
                with contextlib.suppress(ValueError):  # a file that somebody has named
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


def _secret_of(folder: Path) -> bytes:
    """Return the secret of a folder, made if there is none. Raises `OSError` if others might know it."""
    path = folder / SECRET
    if not path.exists():
        own = folder / f"{disk_cache.UNFINISHED}{secrets.token_hex(8)}"
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        with contextlib.suppress(FileExistsError):  # another engine was first
            os.link(own, path)
        own.unlink()
    if problem := why_untrusted(path):
        raise PermissionError(f"{path} {problem}")
    if hasattr(os, "geteuid") and stat.S_IMODE(path.lstat().st_mode) & 0o077:
        raise PermissionError(
            f"{path} must have mode 600: others may have read it, so remove it and all blocks"
        )
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise PermissionError(f"{path} must have {SECRET_BYTES} bytes")
    return secret


def _mac(secret: bytes, key: BlockKey, said: str, tensors: dict[str, np.ndarray]) -> str:
    """Return the keyed digest of a key, of what is said of the arrays, and of their bytes."""
    made = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (key.space, key.parent, key.token_ids, key.digest, said.encode()):
        made.update(len(part).to_bytes(8, "little") + part)
    for name in sorted(tensors):
        its = np.ascontiguousarray(tensors[name])
        made.update(f"{name} {its.nbytes} ".encode() + b"\n")
        made.update(its.data)
    return made.hexdigest()


def written(key: BlockKey, block: StoredBlock, secret: bytes) -> bytes:
    """Return the bytes of a block's file."""
    arrays = {name: [x.dtype.name, x.shape] for name, x in sorted(block.arrays.items())}
    said = json.dumps({"present": block.present, "arrays": arrays})
    tensors = {n: np.ascontiguousarray(x).reshape(-1).view(np.uint8) for n, x in block.arrays.items()}
    metadata = json.dumps({"said": said, "mac": _mac(secret, key, said, tensors)})
    return save(tensors, metadata={FORMAT: metadata})


def _read(content: bytes, key: BlockKey, secret: bytes) -> StoredBlock:
    """Return the block of a file that was written with this secret under this key. Raises for any other."""
    length = int.from_bytes(content[:8], "little")
    outer = read_json(read_json(content[8 : 8 + length])["__metadata__"][FORMAT])
    tensors: dict[str, np.ndarray] = load(content)
    if not hmac.compare_digest(str(outer["mac"]), _mac(secret, key, str(outer["said"]), tensors)):
        raise ValueError("its keyed digest is another")
    said: dict[str, Any] = read_json(outer["said"])
    arrays = {
        name: tensors[name].view(dtype_named(dtype)).reshape(shape)
        for name, (dtype, shape) in said["arrays"].items()
    }
    return StoredBlock(tuple(said["present"]), arrays)
