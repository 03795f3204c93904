"""Weights from the .safetensors files of a Hugging Face directory."""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - registers bfloat16 and its like with NumPy
import numpy as np
from absl import logging
from safetensors import safe_open

from jaxpaged.checks import InputError, shown
from jaxpaged.models.files import hf

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
MOST_SHARDS = 10_000

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
}


class Tensors(Mapping[str, np.ndarray]):
    """The model's tensors by name, in their own dtype: each is mapped when it is asked for, not copied.

    The index says which file has which tensor; without one it is `model.safetensors`, or all of the shards
    that their names tell, or the only file there is. What else lies in the directory is left alone. Raises
    `InputError`, before any tensor is read, for files that are missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stored: dict[str, _StoredTensor] = {}
        for file, names in _files(path).items():
            held = self._tensors_in(file)
            if names is not None and (missing := sorted(names - held.keys())):
                raise InputError(f"model={str(path)!r}: {file} lacks {missing[0]!r}, which the index names")
            self._stored |= {name: held[name] for name in sorted(names or held)}

    def __getitem__(self, name: str) -> np.ndarray:
        stored = self._stored[name]
        if stored.dtype not in DTYPES:
            raise InputError(
                f"model={str(self._path)!r}: {stored.file} cannot be read: {name!r} has type {stored.dtype}"
            )
        dtype = np.dtype(DTYPES[stored.dtype])
        if 0 in stored.shape:
            return np.empty(stored.shape, dtype)
        return np.memmap(self._path / stored.file, dtype, "r", stored.offset, stored.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def _tensors_in(self, file: str) -> "dict[str, _StoredTensor]":
        hf.refuse_pointer(self._path / file)
        try:
            with safe_open(self._path / file, framework="numpy") as checked:
                names = set(checked.keys())
            with (self._path / file).open("rb") as whole:
                size = int.from_bytes(whole.read(8), "little")
                header = json.loads(whole.read(size))
        except Exception as error:  # a damaged header or a missing file
            reason = " ".join(str(error).split())
            raise InputError(f"model={str(self._path)!r}: {file} cannot be read: {reason}") from error
        return {
            name: _StoredTensor(file, said["dtype"], tuple(said["shape"]), 8 + size + said["data_offsets"][0])
            for name, said in header.items()
            if name in names
        }


class _StoredTensor(NamedTuple):
    """The location of a tensor; `safe_open` has checked that it is in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes


def load(path: Path) -> Mapping[str, np.ndarray]:
    """Return the model's tensors, by name."""
    return Tensors(path)


def _files(path: Path) -> dict[str, set[str] | None]:
    """Return the files to read, and which of their tensors; None for all.

    The index goes before `model.safetensors`, as in vLLM, unless files that it names are gone: what saves a
    model anew deletes these and leaves the index.
    """
    index = path / INDEX
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if index.is_file():
        files = _indexed(path, hf.read_object(index))
        if SINGLE not in names or SINGLE in files:
            return files
        missing = sorted(files.keys() - set(names))
        if not missing:
            _warn(f"{path} has {SINGLE} and {INDEX}: the index's files are read")
            return files
        _warn(f"{path}: {SINGLE} is read, for {INDEX} names {missing[0]}, which is missing")
        return {SINGLE: None}
    if not names:
        raise InputError(f"model={str(path)!r} must contain .safetensors files{_instead(path)}")
    if SINGLE in names:
        return {SINGLE: None}
    if len(names) == 1 and SHARD.fullmatch(names[0]) is None:
        return {names[0]: None}
    return dict.fromkeys(_shards(path, names))


def _shards(path: Path, file_names: list[str]) -> list[str]:
    """Return the shards of a directory without an index, by their names.

    Raises `InputError` if one is missing.
    """
    matches = [match for name in file_names if (match := SHARD.fullmatch(name))]
    sets = {(match["stem"], int(match["count"])) for match in matches}
    if len(sets) != 1:
        raise InputError(
            f"model={str(path)!r} must have {INDEX}: it has {len(file_names)} .safetensors files, none of "
            f"them {SINGLE}, and not called NAME-00001-of-00002.safetensors and so on"
        )
    [(stem, count)] = sets
    names = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, min(count, MOST_SHARDS) + 1)]
    if missing := sorted(set(names) - set(file_names)):
        raise InputError(f"model={str(path)!r}: {missing[0]} is missing of {count} shards")
    return names


@functools.cache  # files are searched several times, and reported once
def _warn(message: str) -> None:
    logging.warning("%s", message)


def _instead(path: Path) -> str:
    """Return what weights a directory has in other forms, as the end of a sentence."""
    others = sorted(file.name for ending in ("bin", "pt", "pth", "npz") for file in path.glob(f"*.{ending}"))
    return f": {others[0]} is of another form, which is not read" if others else ""


def _indexed(path: Path, index: Mapping[str, Any]) -> dict[str, set[str] | None]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"model={str(path)!r}: {INDEX} must have a weight_map")
    files: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise InputError(
                f"model={str(path)!r}: {INDEX} names the file {shown(file)}, must be a .safetensors file in "
                "the same directory"
            )
        names = files.setdefault(file, set())
        assert names is not None
        names.add(name)
    return files
