"""Compiled programs kept whole on disk: a later start neither traces nor lowers nor compiles them.

JAX's own cache on disk keeps what XLA has compiled, and finds it by the lowered program: so that has to be
made anew in each process, which takes longer than to read what was compiled. Here a program is found by what
it is made from.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from jaxpaged import disk_cache

# Engines of the same sizes share a program; the ones asked for last are at the end.
_loaded: dict[Path, Callable[..., Any]] = {}
MOST_LOADED = 8  # each maps its code in a thousand pieces, of which the system allows a process some 65,000
MOST_PROGRAMS = 64


def kept(
    lower: Callable[[], jax.stages.Lowered], made_from: object, arrays: tuple[Any, ...], result: Any
) -> Callable[..., Any] | None:
    """The program that `lower` lowers, as a function of arrays of the sizes of `arrays`; None where none is
    kept.

    `made_from`, with a `repr` of its own, is all that the program depends on beside them and the sources;
    `result` is anything of the result's structure.
    """
    leaves, structure = jax.tree.flatten(arrays)
    sizes = [(x.shape, str(x.dtype), str(getattr(x, "sharding", None))) for x in leaves]
    optimized = not jax.config.read("jax_disable_most_optimizations")
    # Functions are part of some structures; where they lie in memory is not what they are.
    identity = re.sub(r" at 0x[0-9a-f]+", "", repr((made_from, sizes, str(structure), optimized)))
    path = disk_cache.path_of(identity, ".program")
    if path is None:
        return None
    program = _loaded.pop(path, None)
    if program is None and path.exists():
        program = _read(path, arrays, result)
    program = _loaded[path] = program or _compile(path, lower)
    if len(_loaded) > MOST_LOADED:
        del _loaded[next(iter(_loaded))]
    return program


def _read(path: Path, arrays: tuple[Any, ...], result: Any) -> Callable[..., Any] | None:
    try:
        structures = jax.tree.structure((arrays, {})), jax.tree.structure(result)
        program: Callable[..., Any] = serialize_executable.deserialize_and_load(
            path.read_bytes(), *structures
        )
        os.utime(path)
    except Exception as error:  # a damaged file, or one that this machine cannot run: it is made anew
        logging.warning("the program in %s cannot be used: %s", path, error)
        return None
    return program


def _compile(path: Path, lower: Callable[[], jax.stages.Lowered]) -> Callable[..., Any]:
    with _without_cache():
        program = lower().compile()
    try:
        payload, *_ = serialize_executable.serialize(program)
        disk_cache.write_file(path, payload)
        disk_cache.prune(path, MOST_PROGRAMS)
    except Exception as error:  # a disk that is full, a kind of program that cannot be written down
        logging.warning("the program cannot be kept in %s: %s", path, error)
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
