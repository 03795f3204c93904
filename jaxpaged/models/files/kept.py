"""A model's arrays kept on disk as programs read them: a later start maps them into memory, and dequantises,
joins and packs nothing.
"""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from jaxpaged import disk_cache

SMALLEST, LARGEST = 2**24, 2**31  # bytes: smaller models load quickly, larger ones take too much disk space
MOST_MODELS = 4
_writer = ThreadPoolExecutor(1)  # writes while the program compiles
ABOUT = "about.json"  # the key, and each array's type: NumPy's files do not know bfloat16


def model[Model: nnx.Module](
    build: Callable[[], Model], abstract: Callable[[], Model], made_from: object
) -> Model:
    """Build a model, or map its arrays from disk where they are kept. They must only be read.

    `made_from`, with a `repr` of its own, is all that they depend on beside the sources; `abstract` gives the
    model with shapes for arrays.
    """
    folder = disk_cache.path_of(("model", made_from), ".model")
    if folder is None:
        return build()
    key = disk_cache.key_of(("model", made_from)).hex()
    if folder.exists() and (mapped := _mapped(folder, key, abstract)):
        return mapped
    built = build()
    leaves = jax.tree.leaves(nnx.state(built))
    if SMALLEST <= sum(leaf.nbytes for leaf in leaves) <= LARGEST:
        _writer.submit(_write, folder, key, [np.asarray(leaf) for leaf in leaves])
    return built


def wait() -> None:
    """Wait until all models are written; the program's end waits for that, too."""
    _writer.submit(int).result()


def _mapped[Model: nnx.Module](folder: Path, key: str, abstract: Callable[[], Model]) -> Model | None:
    """Return the model in a folder; None if it cannot be used, or is not this user's own."""
    try:
        if not disk_cache.is_own(folder):
            return None
        about = json.loads((folder / ABOUT).read_text())
        if about["key"] != key:
            raise ValueError("it was made for something else")
        graphdef, shapes = nnx.split(abstract())
        # NumPy's alignment suffices for JAX's arrays on a CPU, so nothing is copied from the mapped file.
        leaves = [
            jax.device_put(np.load(folder / f"{i}.npy", mmap_mode="r").view(jnp.dtype(dtype)))
            for i, dtype in enumerate(about["dtypes"])
        ]
        os.utime(folder)
        return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(shapes), leaves))
    except Exception as error:  # damaged, or just pruned by another process: it is written again
        logging.warning("the model kept in %s cannot be used: %s", folder, error)
        return None


def _write(folder: Path, key: str, arrays: list[np.ndarray]) -> None:
    try:
        part = disk_cache.new_folder(folder)
        try:
            for i, array in enumerate(arrays):
                np.save(part / f"{i}.npy", array.view(f"u{array.itemsize}"))
            about = {"key": key, "dtypes": [array.dtype.name for array in arrays]}
            (part / ABOUT).write_text(json.dumps(about))
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(part, folder)  # other processes see all of it or nothing
        finally:
            shutil.rmtree(part, ignore_errors=True)
        disk_cache.prune(folder, MOST_MODELS, _key_in)
    except OSError as error:  # a full or read-only disk
        logging.warning("the model cannot be kept in %s: %s", folder, error)


def _key_in(folder: Path) -> bytes:
    """Return the key that a folder says it was made for."""
    return bytes.fromhex(json.loads((folder / ABOUT).read_text())["key"])
