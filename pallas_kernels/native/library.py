"""The kernels' shared library: compiled by the machine's C++ compiler when it is first needed, and kept."""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

SOURCES = Path(__file__).parent
TARGETS = ("jaxpaged_product", "jaxpaged_attention")


def serves(dtype: jnp.dtype) -> bool:
    """Whether arrays of a dtype may be given to the kernels, on the default device."""
    return why_not(dtype) is None


def why_not(dtype: jnp.dtype) -> str | None:
    """In words, why arrays of a dtype are left to XLA; None if they are not."""
    dtype = jnp.dtype(dtype)
    if jax.default_backend() != "cpu":
        return f"the device is a {jax.default_backend()}"
    if os.environ.get("JAXPAGED_NATIVE") == "0":
        return "JAXPAGED_NATIVE is 0"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"the dtype is {dtype.name}"
    features = ["avx512f", "avx512bw", "avx512vl", *["avx512_bf16"] * (dtype == jnp.bfloat16)]
    if missing := [name for name in features if name not in _cpu_features()]:
        return f"the processor lacks {missing[0]}"
    return _load()


@functools.cache
def _load() -> str | None:
    """Compile the library and make its functions known to JAX; in words, what prevents it."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "there is no C++ compiler"
    try:
        library = ctypes.CDLL(str(compiled(compiler)))
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        return f"{compiler} failed with exit code {error.returncode}" + "".join(
            f": {line}" for line in said[:1]
        )
    except OSError as error:
        return str(error)
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return None


def compiled(compiler: str) -> Path:
    """The library in the user's cache, made first if there is none of these sources yet."""
    files = sorted([*SOURCES.glob("*.cc"), *SOURCES.glob("*.h")])
    features = ["-mavx512f", "-mavx512bw", "-mavx512vl"]
    features += ["-mavx512bf16"] * ("avx512_bf16" in _cpu_features())
    command = [*shlex.split(compiler), "-std=c++17", "-O3", *features, "-fPIC", "-shared", "-w"]
    identity = [jax.__version__, *command, *(file.read_text() for file in files)]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    library = Path(cache_home) / "jaxpaged" / f"native-{key[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        command += ["-I", jax.ffi.include_dir(), *(str(file) for file in files if file.suffix == ".cc")]
        # Under another name until it is whole: another process may look at the same moment.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, text=True)
            os.replace(made, library)
    return library


@functools.cache
def _cpu_features() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
