"""Weights from the .safetensors files of a Hugging Face directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy, which safetensors then uses
import numpy as np
from safetensors import safe_open

from jaxpaged.checks import InputError, shown
from jaxpaged.models import hf

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def load(path: Path) -> dict[str, np.ndarray]:
    """The model's tensors, by name, in their own dtype.

    The index says which file has which tensor; without one it is `model.safetensors`, or the only file there
    is. What else lies in the directory is left alone.
    """
    weights: dict[str, np.ndarray] = {}
    for file, names in _files(path).items():
        try:
            with safe_open(path / file, framework="numpy") as tensors:
                held = set(tensors.keys())
                if names is not None and (missing := sorted(names - held)):
                    raise InputError(
                        f"model={str(path)!r}: {file} lacks {missing[0]!r}, which the index names"
                    )
                weights |= {name: tensors.get_tensor(name) for name in sorted(names or held)}
        except InputError:
            raise
        except Exception as error:  # of a damaged header, a missing file, a type that NumPy does not have
            reason = " ".join(str(error).split())
            raise InputError(f"model={str(path)!r}: {file} cannot be read: {reason}") from error
    return weights


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
