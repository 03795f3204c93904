"""Compiled programs kept whole on disk: a later start neither traces nor lowers nor compiles them.

JAX's own cache on disk keeps what XLA has compiled, and finds it by the lowered program: so that has to be
made anew in each process, which takes longer than to read what was compiled. Here a program is found by what
it is made from: the sources of both packages, the versions of JAX, the device, and the sizes of everything
that goes in.
"""

import contextlib
import functools
import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import pallas_kernels
from pallas_kernels import native

# The folder where programs are kept; None: they are not. A process has one.
_folder: Path | None = None
_loaded: dict[str, Callable[..., Any]] = {}  # by key: engines of the same sizes share a program
MOST_FILES = 64  # the ones used longest ago go


def keep_in(folder: Path | None) -> None:
    """From now on keep programs in a folder, or not at all."""
    global _folder
    _folder = folder


def kept(
    lower: Callable[[], jax.stages.Lowered], made_from: object, arrays: tuple[Any, ...], result: Any
) -> Callable[..., Any] | None:
    """The program that `lower` lowers, as a function of arrays of the sizes of `arrays`; None where none is
    kept.

    `made_from`, with a `repr` of its own, is all that the program depends on beside them; `result` is
    anything of the result's structure.
    """
    if _folder is None:
        return None
    key = _key(made_from, arrays)
    if key not in _loaded:
        file = _folder / f"{key}.program"
        loaded = _read(file, arrays, result) if file.exists() else None
        _loaded[key] = loaded or _compile(file, lower)
    return _loaded[key]


def _read(file: Path, arrays: tuple[Any, ...], result: Any) -> Callable[..., Any] | None:
    try:
        structures = jax.tree.structure((arrays, {})), jax.tree.structure(result)
        program: Callable[..., Any] = serialize_executable.deserialize_and_load(
            file.read_bytes(), *structures
        )
        os.utime(file)
    except Exception as error:  # a damaged file, or one that this machine cannot run: it is made anew
        logging.warning("the program in %s cannot be used: %s", file, error)
        return None
    return program


def _compile(file: Path, lower: Callable[[], jax.stages.Lowered]) -> Callable[..., Any]:
    with _without_cache():
        program = lower().compile()
    try:
        payload, *_ = serialize_executable.serialize(program)
        write_whole(file, payload)
        _prune(file.parent)
    except Exception as error:  # a disk that is full, a kind of program that cannot be written down
        logging.warning("the program cannot be kept in %s: %s", file, error)
    return program


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Without JAX's cache on disk: what came out of that cannot be written down again (on a CPU it lacks its
    code).
    """
    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def write_whole(file: Path, content: bytes) -> None:
    """Another process sees all of the file or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as whole:
        whole.write(content)
    os.replace(whole.name, file)


def _prune(folder: Path) -> None:
    files = sorted(folder.glob("*.program"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[MOST_FILES:]:
        file.unlink(missing_ok=True)


def _key(made_from: object, arrays: tuple[Any, ...]) -> str:
    leaves, structure = jax.tree.flatten(arrays)
    sizes = [(x.shape, str(x.dtype), str(getattr(x, "sharding", None))) for x in leaves]
    identity = repr((made_from, sizes, str(structure), _machine()))
    # Functions are part of some structures; where they lie in memory is not what they are.
    identity = re.sub(r" at 0x[0-9a-f]+", "", identity)
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


@functools.cache
def _machine() -> tuple[object, ...]:
    """All that a program depends on beside its arguments."""
    sources = hashlib.sha256()
    for package in (Path(__file__).parents[1], Path(str(pallas_kernels.__file__)).parent):
        for file in sorted(package.rglob("*")):
            if file.suffix in (".py", ".cc", ".h"):
                sources.update(file.read_bytes())
    device = jax.devices()[0]
    return (
        sources.hexdigest(),
        *(metadata.version(name) for name in ("jax", "jaxlib", "flax")),
        device.client.platform_version,
        device.device_kind,
        jax.device_count(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        *(os.environ.get(name) for name in ("XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAXPAGED_NATIVE")),
        [str(native.why_not(jax.numpy.dtype(name))) for name in ("float32", "bfloat16")],
        _cpu_features(),
    )


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
