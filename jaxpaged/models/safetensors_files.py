"""Weights from the .safetensors files of a Hugging Face directory."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - registers bfloat16 and its like with NumPy
import numpy as np
from safetensors import safe_open

from jaxpaged.checks import InputError, shown
from jaxpaged.models import hf

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


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

    The index says which file has which tensor; without one it is `model.safetensors`, or the only file there
    is. What else lies in the directory is left alone. Raises `InputError`, before any tensor is read, for
    files that are missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[str, _Place] = {}
        for file, names in _files(path).items():
            held = self._places_in(file)
            if names is not None and (missing := sorted(names - held.keys())):
                raise InputError(f"model={str(path)!r}: {file} lacks {missing[0]!r}, which the index names")
            self._places |= {name: held[name] for name in sorted(names or held)}

    def __getitem__(self, name: str) -> np.ndarray:
        place = self._places[name]
        if place.dtype not in DTYPES:
            raise InputError(
                f"model={str(self._path)!r}: {place.file} cannot be read: {name!r} has type {place.dtype}"
            )
        dtype = np.dtype(DTYPES[place.dtype])
        if 0 in place.shape:
            return np.empty(place.shape, dtype)
        return np.memmap(self._path / place.file, dtype, "r", place.offset, place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _places_in(self, file: str) -> "dict[str, _Place]":
        try:
            with safe_open(self._path / file, framework="numpy") as checked:
                names = set(checked.keys())
            with (self._path / file).open("rb") as whole:
                size = int.from_bytes(whole.read(8), "little")
                header = json.loads(whole.read(size))
        except Exception as error:  # of a damaged header, a missing file
            reason = " ".join(str(error).split())
            raise InputError(f"model={str(self._path)!r}: {file} cannot be read: {reason}") from error
        return {
            name: _Place(file, said["dtype"], tuple(said["shape"]), 8 + size + said["data_offsets"][0])
            for name, said in header.items()
            if name in names
        }


class _Place(NamedTuple):
    """Where a tensor lies; `safe_open` has seen to it that it is in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes


def load(path: Path) -> Mapping[str, np.ndarray]:
    """The model's tensors, by name."""
    return Tensors(path)


def _files(path: Path) -> dict[str, set[str] | None]:
    """The files to read, and which of their tensors; None for all."""
    index = path / INDEX
    if index.is_file():
        return _indexed(path, hf.read_object(index))
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if not found:
        raise InputError(f"model={str(path)!r} must contain .safetensors files")
    if SINGLE in found:
        found = [SINGLE]
    if len(found) > 1:
        raise InputError(
            f"model={str(path)!r} must have {INDEX}: it has {len(found)} .safetensors files, none of them "
            f"{SINGLE}"
        )
    return {found[0]: None}


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
