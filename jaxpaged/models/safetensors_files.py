"""Weights from the .safetensors files of a Hugging Face directory."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy, which safetensors then uses
import numpy as np
from safetensors import safe_open

from jaxpaged.checks import InputError, shown
from jaxpaged.models import hf

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


MAPPED_BYTES = 2**26  # of a file are read before it is mapped anew: what has been read need not stay resident


class Tensors(Mapping[str, np.ndarray]):
    """The model's tensors by name, in their own dtype, each read when it is asked for.

    The index says which file has which tensor; without one it is `model.safetensors`, or the only file there
    is. What else lies in the directory is left alone. Raises `InputError`, before any tensor is read, for
    files that are missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_of: dict[str, str] = {}
        for file, names in _files(path).items():
            held = set(self._open(file).keys())
            if names is not None and (missing := sorted(names - held)):
                raise InputError(f"model={str(path)!r}: {file} lacks {missing[0]!r}, which the index names")
            self._file_of |= dict.fromkeys(sorted(names or held), file)
        self._opened: tuple[str, Any] | None = None
        self._num_read = 0  # bytes, since it was opened

    def __getitem__(self, name: str) -> np.ndarray:
        file = self._file_of[name]
        if self._opened is None or self._opened[0] != file or self._num_read > MAPPED_BYTES:
            self._opened, self._num_read = None, 0
            self._opened = file, self._open(file)
        try:
            tensor: np.ndarray = self._opened[1].get_tensor(name)
        except Exception as error:  # of a type that NumPy does not have
            raise self._unreadable(file, error) from error
        self._num_read += tensor.nbytes
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self._path / file, framework="numpy")
        except Exception as error:  # of a damaged header, a missing file
            raise self._unreadable(file, error) from error

    def _unreadable(self, file: str, error: Exception) -> InputError:
        reason = " ".join(str(error).split())
        return InputError(f"model={str(self._path)!r}: {file} cannot be read: {reason}")


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
