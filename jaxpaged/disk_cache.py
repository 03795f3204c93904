"""A cache on disk for what is costly to make, under keys of all that it is made from.

The keys know the sources of both packages, the versions of JAX and the machine: what another version of ours
made is not found. What is found is run, or computed with: so the folder and each file must be the user's own,
and each file tells the key that it was made for (see `is_own`). Where a function of ours has been replaced
since it was imported, the sources do not describe what runs, and nothing is kept or found (see `replaced`).
"""

import contextlib
import functools
import hashlib
import itertools
import math
import os
import platform
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from absl import logging

import pallas_kernels
from pallas_kernels.compilation_cache import why_untrusted

OURS = ("jaxpaged", "pallas_kernels")
UNFINISHED = "unfinished-"  # begins the names of what is being written
UNFINISHED_NAME = re.compile(UNFINISHED + r"[0-9a-f]{32}(\.lock)?")
KEY_BYTES = 32
KEY_DIGITS = 32  # of a key, in the name of what is kept
UNFINISHED_SECONDS = 3600  # nobody writes at one thing for so long

_folder: Path | None = None  # None: nothing is kept. A process has one.


def keep_in(folder: Path | None) -> None:
    """Keep things in a folder from now on, or not at all."""
    global _folder
    _folder = folder


def path_of(made_from: object, suffix: str) -> Path | None:
    """Return the path of an entry made from `made_from`, whose `repr` identifies it.

    None where nothing is kept.
    """
    if _folder is None:
        return None
    if name := replaced():
        _say(f"{name} is not what its source file says: nothing is read from {_folder} or kept there")
        return None
    return _folder / f"{key_of(made_from).hex()[:KEY_DIGITS]}{suffix}"


def key_of(made_from: object) -> bytes:
    """Return the key of a thing that is made from `made_from` on this machine: 32 bytes."""
    return hashlib.sha256(repr((made_from, _machine())).encode()).digest()


def is_own(path: Path) -> bool:
    """Return whether a file or folder is the user's own and nobody else may write to it; log why not.

    Raises `OSError` if it is not there.
    """
    if problem := why_untrusted(path):
        logging.warning("%s is not used: it %s", path, problem)
    return problem is None


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically: another process sees all of it or none, and a failure leaves no file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    whole = path.parent / unfinished_name()
    descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(whole, path)
    except BaseException:  # a disk that is full, for one
        whole.unlink(missing_ok=True)
        raise


def unfinished_name() -> str:
    """Return a new name for an incomplete file. Only such names are removed when they are old."""
    return UNFINISHED + secrets.token_hex(16)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Let one at a time make a thing. Others who would make it wait; they are told so, and then may find it.

    Nobody waits where there are no locks, or no folder that can be written to.
    """
    lock, held, has_waited = path.parent / f"{UNFINISHED}{path.stem}.lock", None, False
    try:
        import fcntl

        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.info("%s is being made by another process: waiting for it", path)
            fcntl.flock(held, fcntl.LOCK_EX)
            has_waited = True
    except (ImportError, OSError):
        pass
    try:
        yield has_waited
    finally:
        if held is not None:
            with contextlib.suppress(OSError):
                lock.unlink()  # who waits at it has it open
            os.close(held)


def new_folder(beside: Path) -> Path:
    """Return an empty folder to write a thing into that will be renamed to `beside`."""
    beside.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = beside.parent / unfinished_name()
    folder.mkdir(mode=0o700)
    return folder


def key_at_start(path: Path) -> bytes:
    """Return the key with which a file of ours begins."""
    with path.open("rb") as file:
        return file.read(KEY_BYTES)


def prune(
    like: Path, max_entries: int, key_in: Callable[[Path], bytes] | None = None, max_bytes: float = math.inf
) -> None:
    """Remove the least recently used entries of a cache folder, and what killed processes left unfinished.

    At most `max_entries` entries with the suffix of `like` are left, of at most `max_bytes` bytes together.

    Only what has a name of ours is counted and removed: the folder may be one that the user shares with
    other programs.

    key_in: returns the key that a thing says it was made for. What has another name than that is left alone.
    """
    name = re.compile(rf"[0-9a-f]{{{KEY_DIGITS}}}{re.escape(like.suffix)}")

    def is_ours(path: Path) -> bool:
        if not name.fullmatch(path.name) or path.is_symlink():
            return False
        try:
            return key_in is None or key_in(path).hex()[:KEY_DIGITS] == path.stem
        except Exception:  # whatever bytes of anybody make it raise
            return False

    def last_use(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:  # another process prunes, too
            return 0.0

    def size(path: Path) -> int:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return 0

    used = sorted(filter(is_ours, like.parent.glob(f"*{like.suffix}")), key=last_use, reverse=True)
    long_ago = time.time() - UNFINISHED_SECONDS
    unfinished = (path for path in like.parent.glob(f"{UNFINISHED}*") if UNFINISHED_NAME.fullmatch(path.name))
    left = [path for path in unfinished if last_use(path) < long_ago]
    sizes = itertools.accumulate(map(size, used[:max_entries]))
    num_kept = sum(total <= max_bytes for total in sizes)
    for path in used[num_kept:] + left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def replaced() -> str | None:
    """Return the name of a function or class of ours in whose place is one of a module that is neither ours,
    nor Python's, nor of a package that we need; None if there is none.

    So a researcher's own attention, set into a module, is not answered by a program that was compiled without
    it. What this does not see: constants, and functions of packages that we need, such as JAX's own.
    """
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in OURS or module is None:
            continue
        for name, value in list(vars(module).items()):
            if not callable(value) or name.startswith("__"):
                continue
            if _is_foreign(value):
                return f"{module_name}.{name}"
            if isinstance(value, type) and value.__module__ == module_name:
                for attribute, method in list(vars(value).items()):
                    inner = getattr(method, "__func__", getattr(method, "fget", method))
                    if not attribute.startswith("__") and callable(inner) and _is_foreign(inner):
                        return f"{module_name}.{name}.{attribute}"
    return None


def _is_foreign(value: Any) -> bool:
    origin = getattr(value, "__module__", None)
    return isinstance(origin, str) and origin.partition(".")[0] not in known_modules()


@functools.cache
def known_modules() -> frozenset[str]:
    """Return the top-level modules from which our modules may have functions and classes: ours, Python's, and
    those of packages that we need.
    """
    try:
        needed = metadata.requires("jaxpaged") or []
    except metadata.PackageNotFoundError:
        needed = []
    packages = {
        re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].replace("-", "_").lower() for line in needed
    }
    brought = {
        "absl",
        "jaxlib",
        "typing_extensions",
        "pydantic_core",
        "anyio",
        "h11",
        "beartype",
        "attr",
        "google",
    }
    return frozenset(packages | brought | set(sys.stdlib_module_names) | set(OURS))


@functools.cache
def _say(sentence: str) -> None:
    logging.warning(sentence)


@functools.cache
def _machine() -> tuple[object, ...]:
    """Return the parts that all keys share: sources, versions, devices, environment and processor."""
    sources = hashlib.sha256()
    for package in (Path(__file__).parent, Path(str(pallas_kernels.__file__)).parent):
        for file in sorted(package.rglob("*")):
            if file.suffix in (".py", ".cc", ".h"):
                sources.update(file.read_bytes())
    device = jax.devices()[0]
    return (
        sources.hexdigest(),
        *(metadata.version(name) for name in ("jax", "jaxlib", "flax")),
        device.client.platform_version,
        device.device_kind,
        jax.device_count(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        *(os.environ.get(name) for name in ("XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAXPAGED_NATIVE")),
        _cpu_features(),
    )


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
