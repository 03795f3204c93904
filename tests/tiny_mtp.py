"""A tiny GLM-4.5 with an MTP layer in its files."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

GLM = Path(__file__).parent / "goldens" / "families" / "glm4_moe"
NUMBER = 3  # of the layer behind the last


def write(folder: Path) -> Path:
    """Write the model that transformers has made, with one layer more, of random numbers."""
    shutil.copytree(GLM, folder, dirs_exist_ok=True)
    tensors, rng = load_file(GLM / "model.safetensors"), np.random.default_rng(0)
    like = {name: x for name, x in tensors.items() if name.startswith(f"model.layers.{NUMBER - 1}.")}
    layer = {name.replace(f".{NUMBER - 1}.", f".{NUMBER}.", 1): x for name, x in like.items()}
    hidden = tensors["model.norm.weight"].shape
    for name in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"model.layers.{NUMBER}.{name}.weight"] = np.ones(hidden, np.float32)
    layer[f"model.layers.{NUMBER}.eh_proj.weight"] = np.ones((hidden[0], 2 * hidden[0]), np.float32)
    for name, x in layer.items():
        noise = rng.standard_normal(x.shape)
        layer[name] = (1 + 0.2 * noise if "norm" in name else noise * x.shape[-1] ** -0.5).astype(np.float32)
    for name, of in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        layer[f"model.layers.{NUMBER}.{name}.weight"] = tensors[f"{of}.weight"]  # published files repeat them
    save_file(tensors | layer, folder / "model.safetensors")
    return folder
