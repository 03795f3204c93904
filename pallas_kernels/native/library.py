"""The kernels' shared libraries: compiled by the machine's C++ compiler when first needed, and cached on
disk.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.compilation_cache import compilation_cache_dir, why_untrusted

SOURCES = Path(__file__).parent


class Function(NamedTuple):
    """A function that XLA's programs call: its source file, which defines a handler of that name, and
    compiler options.
    """

    source: str
    options: tuple[str, ...] = ()


FUNCTIONS = {
    "product": Function("product"),
    "attention": Function("attention"),
    "attention_of_bytes": Function("attention", ("-DCACHE_OF_BYTES",)),  # of 8-bit caches
    "attention_of_nibbles": Function("packed_attention"),
    "quantised_product": Function("quantised_product"),
    "quantised_product_of_floats": Function("quantised_product", ("-DFLOAT_CODES=Float8Codes",)),
    "quantised_product_of_short_floats": Function("quantised_product", ("-DFLOAT_CODES=Float4Codes",)),
    "low_rank": Function("low_rank"),
}
USUAL = ("product", "attention")  # compiled together at first; the others when they are needed
NUMBERS = {
    "float32": "Float32",
    "bfloat16": "BFloat16",
}  # their names in `vector.h`; a library is compiled for one

_LOADING = threading.Lock()  # held while one thread compiles
_OPENING = threading.Lock()
waiting_addresses: list[
    int | None
] = []  # where each library's threads wait for work: the same address for all


class Target(NamedTuple):
    """A kind of processor that the kernels can be compiled for."""

    words: str
    machines: tuple[str, ...]  # as `platform.machine` calls them
    features: tuple[str, ...]  # as Linux calls them


X86, ARM = ("x86_64",), ("aarch64", "arm64")
AVX2 = ("avx2", "fma", "bmi2", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512vl")
SSE2 = "sse2"  # only on request: XLA's code is as fast there, and faster for many rows
# Targets, the fastest first.
TARGETS = {
    "avx512_bf16": Target("AVX-512 with BF16", X86, (*AVX512, "avx512_bf16")),
    "avx512": Target("AVX-512", X86, AVX512),
    "avx2": Target("AVX2 with FMA", X86, AVX2),
    SSE2: Target("SSE2", X86, ("sse2",)),
    "neon": Target("NEON", ARM, ()),
}


def serves(dtype: jnp.dtype, *functions: str) -> bool:
    """Return whether the kernels take arrays of a dtype: those of `USUAL`, and these of FUNCTIONS."""
    return why_not(dtype, *functions) is None


def why_not(dtype: jnp.dtype, *functions: str) -> str | None:
    """Return why XLA must compute on arrays of a dtype, in words; None if the kernels serve them.

    Compiles and registers the kernels of `USUAL`, and these of FUNCTIONS, so that XLA finds them from now on.

    Raises: ValueError if JAXPAGED_NATIVE is neither 0, 1 nor a target of this processor.
    """
    dtype = jnp.dtype(dtype)
    if jax.default_backend() != "cpu":
        return f"the device is a {jax.default_backend()}"
    if os.environ.get("JAXPAGED_NATIVE") == "0":
        return "JAXPAGED_NATIVE is 0"
    if dtype.name not in NUMBERS:
        return f"the dtype is {dtype.name}"
    name = target()
    if name is None:
        return f"there are no faster kernels for this {platform.machine()}"
    for these in (USUAL, *map(_with, functions)):
        if problem := _load(name, dtype, these):
            return problem
    return None


def instructions() -> str:
    """Return the name of the instruction set that the kernels use; "none" if XLA computes everything."""
    name = target()
    return TARGETS[name].words if name else "none"


def target() -> str | None:
    """Return the target that the kernels are compiled for; None if the processor has none faster than XLA's
    code.

    JAXPAGED_NATIVE names one; by default it is the processor's fastest.

    Raises: ValueError if JAXPAGED_NATIVE names no target of this processor.
    """
    requested, served = os.environ.get("JAXPAGED_NATIVE", ""), targets()
    if requested in ("", "0", "1"):
        return next((name for name in served if name != SSE2), None)
    if requested not in served:
        names = ", ".join(served) or "none"
        raise ValueError(f"JAXPAGED_NATIVE={requested!r} must be 0, 1 or a target of this processor: {names}")
    return requested


def targets() -> list[str]:
    """List the targets that this processor can run, the fastest first."""
    machine, features = platform.machine(), _cpu_features()
    return [name for name, t in TARGETS.items() if machine in t.machines and features.issuperset(t.features)]


def registered(function: str, dtype: jnp.dtype) -> str:
    """Return the name under which XLA finds one of FUNCTIONS, for a dtype and the target in use.

    Raises: NotImplementedError if it cannot be compiled.
    """
    name = target()
    if name is None or (why := _load(name, dtype, _with(function))):
        raise NotImplementedError(f"there is no native {function}: {why}")
    return _registered(function, dtype, name)


def _registered(function: str, dtype: jnp.dtype, name: str) -> str:
    return f"jaxpaged_{function}_{dtype.name}_{name}"


def prepare(dtype: jnp.dtype) -> None:
    """Compile the kernels in a thread of their own, if they are not cached, for callers that will soon need
    them.
    """
    threading.Thread(target=_prepare, args=(dtype,), daemon=True).start()


def _prepare(dtype: jnp.dtype) -> None:
    with contextlib.suppress(ValueError):  # a wrong JAXPAGED_NATIVE is reported when a kernel is called
        serves(dtype)


def _with(function: str) -> tuple[str, ...]:
    """Return the functions that are compiled together with one."""
    return USUAL if function in USUAL else (function,)


def _load(name: str, dtype: jnp.dtype, functions: tuple[str, ...]) -> str | None:
    """Compile functions for a target and register them with JAX. Return what prevents it, in words; None if
    nothing.
    """
    with _LOADING:
        return load_once(name, dtype, functions)


@functools.cache
def load_once(name: str, dtype: jnp.dtype, functions: tuple[str, ...]) -> str | None:
    compiler = find_compiler()
    if compiler is None:
        return _without("there is no C++ compiler", "install one, for example with apt install g++")
    try:
        with ThreadPoolExecutor() as pool:  # the compiler runs for all of them at the same time
            made = [
                pool.submit(handler_of, function, dtype, TARGETS[name], compiler) for function in functions
            ]
        handlers = dict(zip(functions, (each.result() for each in made), strict=True))
    except subprocess.CalledProcessError as error:
        messages = error.stderr.strip().splitlines()[:1]
        problem = ": ".join([f"failed with exit code {error.returncode}", *messages])
    except (OSError, ValueError, AttributeError) as error:
        problem = f"makes no library: {error}"
    else:
        for function, handler in handlers.items():
            pointer = jax.ffi.pycapsule(handler)
            jax.ffi.register_ffi_target(_registered(function, dtype, name), pointer, platform="cpu")
        return None
    return _without(f"the C++ compiler {compiler!r} {problem}", "let CXX name one that works")


def _without(problem: str, remedy: str) -> str:
    """Return a problem with its effect and its remedy, and log it."""
    words = f"{problem}: XLA's attention and products take two to three times as long; {remedy}"
    logging.getLogger(__name__).warning("no native kernels: %s", words)
    return words


def handler_of(function: str, dtype: jnp.dtype, target: Target, compiler: str) -> Any:
    """Return one function's handler from its cached library. Compile and cache the library if there is
    none.
    """
    source, options = FUNCTIONS[function]
    command = [*compile_command(target, compiler), *options, f"-DNUMBERS={NUMBERS[dtype.name]}"]
    sources = [file.read_text() for file in sorted(SOURCES.iterdir()) if file.suffix in (".cc", ".h")]
    key = hashlib.sha256("\0".join([jax.__version__, *command, *sources]).encode()).hexdigest()
    name, folder = f"native-{function}-{dtype.name}-{key[:16]}.so", compilation_cache_dir()
    if folder and (folder / name).exists() and not why_untrusted(folder / name):
        with contextlib.suppress(OSError):  # a damaged library is compiled again
            return _open(folder / name, source)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / name
        command += ["-I", jax.ffi.include_dir(), "-fPIC", "-shared"]
        command += [str(SOURCES / f"{source}.cc"), "-o", str(made)]
        subprocess.run(
            command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        handler = _open(made, source)
        if folder:
            made.chmod(0o700)
            os.replace(made, folder / name)  # whole and at once: another process may look at the same moment
    return handler


def _open(file: Path, source: str) -> Any:
    """Load a library and return its handler. Its threads wait at the address that the first library chose."""
    library = ctypes.CDLL(str(file))
    handler = getattr(library, f"jaxpaged_{source}")
    wait_at = library.jaxpaged_wait_at
    wait_at.argtypes, wait_at.restype = [ctypes.c_void_p], ctypes.c_void_p
    with _OPENING:
        waiting_addresses.append(wait_at(waiting_addresses[0] if waiting_addresses else None))
    return handler


def find_compiler() -> str | None:
    """Find the C++ compiler: `CXX`, else the first of c++, g++ and clang++; None if there is none."""
    compilers = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    return os.environ.get("CXX") or next(filter(None, compilers), None)


def compile_command(target: Target, compiler: str) -> list[str]:
    """Return a compiler's command and options for a target. Raise ValueError if `compiler` has no words."""
    words = shlex.split(compiler)
    if not words:
        raise ValueError("its name is empty")
    # Compilers name features as Linux does, without underscores.
    features = [f"-m{feature.replace('_', '')}" for feature in target.features]
    return [*words, "-std=c++17", "-O3", "-ffp-contract=fast", *features, "-w"]


@functools.cache
def _cpu_features() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
