"""Attention from outside in C++, called through `jax.ffi`: compiled when the module is imported."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import jax
import numpy as np

from jaxpaged.contracts import Support, attention

with tempfile.TemporaryDirectory() as folder:
    library = f"{folder}/attention.so"
    source = Path(__file__).with_suffix(".cc")
    command = ["c++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", source]
    subprocess.run([*command, "-o", library], check=True)
    handler = ctypes.cdll.LoadLibrary(library).Outsider
jax.ffi.register_ffi_target("outsider_attention", jax.ffi.pycapsule(handler), platform="cpu")


@attention("decode", Support(dtypes=("float32",), platforms=("cpu",)), contract=1)
def by_ffi(q, k_cache, v_cache, block_tables, seq_lens, *, scale=None):
    """Compute one query a sequence by a call of C++."""
    scale = np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    spec = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return jax.ffi.ffi_call("outsider_attention", spec)(
        q, k_cache, v_cache, block_tables, seq_lens, scale=scale
    )
