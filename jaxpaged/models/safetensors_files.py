"""Weights from the .safetensors files of a Hugging Face directory."""

from pathlib import Path

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy, which safetensors then uses
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpaged.config import InputError


def load(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of every .safetensors file in the directory, by name, in its own dtype."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError(f"model={str(path)!r} must contain .safetensors files")
    weights: dict[str, np.ndarray] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                weights |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError) as error:
            raise InputError(f"model={str(path)!r}: {file.name} is damaged: {error}") from error
    return weights
