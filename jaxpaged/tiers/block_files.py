"""Files of blocks in a directory: their names, their bytes, and what tells them from all other files.

A block's file lies in a folder named by its key's space, and is named by its key's digest. Its head has a
keyed digest of that name, so that a directory is listed without reading any K and V, and one more of the
key and of all arrays. The secret for both is a file of the directory, for its owner alone. So a file that
somebody else has put there is neither counted, read nor removed, whatever its name.
"""

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from jaxpaged import disk_cache
from jaxpaged.checks import InputError, check
from jaxpaged.contracts.block_stores import BlockKey, StoredBlock
from jaxpaged.untrusted import dtype_named, read_json
from pallas_kernels.compilation_cache import why_untrusted

FORMAT = "jaxpaged block, version 2"  # the one entry of the metadata
SUFFIX = ".safetensors"
MOST_HEAD_BYTES = 2**20
SECRET, SECRET_BYTES = "secret", 32
MARKER = "jaxpaged-blocks.txt"
MARKER_TEXT = (
    "jaxpaged keeps blocks of a KV cache here (kv_offloading_backend='disk:DIR'), and removes old ones.\n"
)
FOLDER_NAME = re.compile("[0-9a-f]{16}")
FILE_NAME = re.compile(f"[0-9a-f]{{64}}{re.escape(SUFFIX)}")
ROOT_OF_A_DISK = "lost+found"  # that a file system makes itself
RULE = "a folder of one's own"


def open_folder(folder: Path) -> bytes:
    """Return the secret of a folder; make both if there are none.

    Raises `InputError` for a folder that is not the user's own, or that holds anything else and no marker.
    """
    name, value = "kv_offloading_backend", f"disk:{folder}"
    check(name, "disk:", "disk:DIR with a directory that is not the working directory", folder != Path())
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = "is no folder" if not folder.is_dir() else why_untrusted(folder)
        check(name, value, f"{RULE}: it {problem}", not problem)
        _mark(folder, value)
        return _secret_of(folder)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name}={value!r} cannot be used: {error}") from error


def _mark(folder: Path, value: str) -> None:
    """Put a marker into a folder. Raises `InputError` where there is none and anything else is there."""
    marker = folder / MARKER
    if marker.is_file():
        return
    for entry in _entries(folder):
        is_folder = entry.is_dir(follow_symlinks=False)
        form = FOLDER_NAME if is_folder else disk_cache.UNFINISHED_NAME
        is_ours = form.fullmatch(entry.name) or entry.name in (SECRET, MARKER, ROOT_OF_A_DISK)
        rule = f"a new or empty folder, or one that has {MARKER}: {entry.name} is there"
        check("kv_offloading_backend", value, rule, bool(is_ours))
    disk_cache.write_file(marker, MARKER_TEXT.encode())


def _secret_of(folder: Path) -> bytes:
    """Return the secret of a folder, made if there is none. Raises `OSError` if others might know it."""
    path = folder / SECRET
    if not path.exists():
        unfinished = folder / disk_cache.unfinished_name()
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        with contextlib.suppress(FileExistsError):  # another engine was first
            os.link(unfinished, path)
        unfinished.unlink()
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


def folder_of(folder: Path, space: bytes) -> Path:
    """Return the folder of all blocks of a space."""
    return folder / space.hex()[:16]


def path_of(folder: Path, key: BlockKey) -> Path:
    """Return the path of a block's file."""
    return folder_of(folder, key.space) / f"{key.digest.hex()}{SUFFIX}"


def listed(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files below a tier's folder that have names of blocks. Links are not followed.

    What a killed process left unfinished is removed when it is an hour old.
    """
    for entry in _entries(folder):
        if not FOLDER_NAME.fullmatch(entry.name):
            _remove_if_unfinished(entry)
        elif entry.is_dir(follow_symlinks=False):
            for file in _entries(entry.path):
                if not FILE_NAME.fullmatch(file.name):
                    _remove_if_unfinished(file)
                elif file.is_file(follow_symlinks=False):
                    with contextlib.suppress(OSError):
                        yield Path(file.path), file.stat(follow_symlinks=False)


def _remove_if_unfinished(entry: os.DirEntry[str]) -> None:
    if disk_cache.UNFINISHED_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
        with contextlib.suppress(OSError):
            if entry.stat(follow_symlinks=False).st_mtime < time.time() - disk_cache.UNFINISHED_SECONDS:
                os.unlink(entry.path)


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [*entries]
    except OSError:  # gone, or no folder
        return []


def is_ours(path: Path, secret: bytes) -> bool:
    """Return whether a file's head was written under this name, with this secret. No array is read."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = file.read(length) if length <= MOST_HEAD_BYTES else b""
        outer = read_json(read_json(head)["__metadata__"][FORMAT])
        tag = _tag(secret, path, str(outer["said"]), str(outer["mac"]))
        return hmac.compare_digest(str(outer["tag"]), tag)
    except Exception:  # whatever bytes of anybody make them raise
        return False


def _tag(secret: bytes, path: Path, said: str, mac: str) -> str:
    """Return the keyed digest of a file's name and its head's fields."""
    made = hmac.new(secret, digestmod=hashlib.sha256)
    for part in ("head", path.parent.name, path.name, said, mac):
        made.update(len(part).to_bytes(8, "little") + part.encode())
    return made.hexdigest()


def _mac(secret: bytes, key: BlockKey, said: str, tensors: dict[str, np.ndarray]) -> str:
    """Return the keyed digest of a key, the arrays' description, and the arrays' bytes."""
    made = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (key.space, key.parent, key.token_ids, key.digest, said.encode()):
        made.update(len(part).to_bytes(8, "little") + part)
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        made.update(f"{name} {array.nbytes} ".encode() + b"\n")
        made.update(array.data)
    return made.hexdigest()


def written(key: BlockKey, block: StoredBlock, secret: bytes) -> bytes:
    """Return the bytes of a block's file."""
    arrays = {name: [x.dtype.name, x.shape] for name, x in sorted(block.arrays.items())}
    said = json.dumps({"present": block.present, "arrays": arrays})
    tensors = {n: np.ascontiguousarray(x).reshape(-1).view(np.uint8) for n, x in block.arrays.items()}
    mac = _mac(secret, key, said, tensors)
    tag = _tag(secret, path_of(Path(), key), said, mac)
    return save(tensors, metadata={FORMAT: json.dumps({"said": said, "mac": mac, "tag": tag})})


def read(content: bytes, key: BlockKey, secret: bytes) -> StoredBlock:
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
