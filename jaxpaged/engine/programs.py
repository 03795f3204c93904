"""Compiled programs kept whole on disk: a later start neither traces nor lowers nor compiles them.

JAX's own cache on disk keeps what XLA has compiled, and finds it by the lowered program: so that has to be
made anew in each process, which takes longer than to read what was compiled. Here a program is found by what
it is made from.
"""

import contextlib
import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding

from jaxpaged import disk_cache


@dataclass(frozen=True)
class Program:
    """A compiled function of arrays, and the memory of the device that it takes beside them."""

    call: jax.stages.Compiled
    temporary_bytes: int  # while it runs, by XLA's own analysis
    result_bytes: int  # of what it returns and does not write in place

    def __call__(self, *arrays: Any) -> Any:
        return self.call(*arrays)


# Engines of the same sizes share a program; the ones asked for last are at the end.
_loaded: dict[Path, Program] = {}
# At the beginning of a file: the key that it was made for, a digest of all that follows, and two sizes, which
# what is read back does not say on every device.
HEAD = struct.Struct("<32s32s")
SIZES = struct.Struct("<qq")
CALLBACK = re.compile(r"@xla\w*_python_\w*callback")
MOST_LOADED = 8  # each maps its code in a thousand pieces, of which the system allows a process some 65,000
MOST_PROGRAMS = 64


def kept(
    lower: Callable[[], jax.stages.Lowered],
    made_from: object,
    arrays: tuple[Any, ...],
    result: Any,
    options: dict[str, str] | None = None,
    *,
    may_call_back: bool = False,
) -> Program | None:
    """Return the program that `lower` lowers, read from disk or kept there from now on; None where none is
    kept.

    made_from: all that the program depends on beside `options`, `arrays` and the sources; found by its
        `repr`.
    arrays: the arguments, or shapes with shardings.
    result: anything with the structure of the result.
    options: XLA's.
    may_call_back: whether it may have callbacks, which are functions of one process: then it is not kept.
    """
    leaves, structure = jax.tree.flatten(arrays)
    sizes = [(x.shape, str(x.dtype), str(getattr(x, "sharding", None))) for x in leaves]
    optimized = not jax.config.read("jax_disable_most_optimizations")
    # Functions are part of some structures; where they lie in memory is not what they are.
    identity = re.sub(r" at 0x[0-9a-f]+", "", repr((made_from, sizes, str(structure), optimized)))
    path = disk_cache.path_of(identity, ".program")
    if path is None:
        return None
    key = disk_cache.key_of(identity)
    program = _loaded.pop(path, None)
    if program is None and path.exists():
        program = _read(path, key, arrays, result)
    if program is None:
        with disk_cache.alone(path) as has_waited:
            if has_waited and path.exists():
                program = _read(path, key, arrays, result)
            program = program or _compile(path, key, lower, options, may_call_back)
    _loaded[path] = program
    if len(_loaded) > MOST_LOADED:
        del _loaded[next(iter(_loaded))]
    return program


def compiled(lower: Callable[[], jax.stages.Lowered], options: dict[str, str] | None = None) -> Program:
    """Compile the program that `lower` lowers, and keep it nowhere."""
    program = lower().compile(options)
    memory = program.memory_analysis()
    assert memory is not None  # XLA has one for CPUs and GPUs
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Program(program, memory.temp_size_in_bytes, results)


def _read(path: Path, key: bytes, arrays: tuple[Any, ...], result: Any) -> Program | None:
    """Return the program in a file; None if it cannot be used, or is not this user's own."""
    try:
        if not disk_cache.is_own(path):
            return None
        structures = jax.tree.structure((arrays, {})), jax.tree.structure(result)
        content = path.read_bytes()
        its_key, its_digest = HEAD.unpack_from(content)
        body = memoryview(content)[HEAD.size :]
        if its_key != key or its_digest != hashlib.sha256(body).digest():
            raise ValueError("it is damaged, or was made for something else")
        call = serialize_executable.deserialize_and_load(
            bytes(body[SIZES.size :]), *structures, execution_devices=_devices_of(arrays)
        )
        os.utime(path)
        return Program(call, *SIZES.unpack_from(body))
    except Exception as error:  # a damaged file, or one that this machine cannot run: it is made anew
        logging.warning("the program in %s cannot be used: %s", path, error)
        return None


def _devices_of(arrays: tuple[Any, ...]) -> list[jax.Device] | None:
    """Return the devices of the mesh, in its order, or the one device. JAX would take all there are."""
    shardings = [x.sharding for x in jax.tree.leaves(arrays) if getattr(x, "sharding", None) is not None]
    meshes = (list(s.mesh.devices.flat) for s in shardings if isinstance(s, NamedSharding))
    return next(meshes, list(shardings[0].device_set) if shardings else None)


def _compile(
    path: Path,
    key: bytes,
    lower: Callable[[], jax.stages.Lowered],
    options: dict[str, str] | None,
    may_call_back: bool,
) -> Program:
    lowered = lower()
    has_callbacks = may_call_back and CALLBACK.search(lowered.as_text()) is not None
    with _without_cache():
        program = compiled(lambda: lowered, options)
    if has_callbacks:
        return program
    try:
        payload, *_ = serialize_executable.serialize(program.call)
        body = SIZES.pack(program.temporary_bytes, program.result_bytes) + payload
        disk_cache.write_file(path, HEAD.pack(key, hashlib.sha256(body).digest()) + body)
        disk_cache.prune(path, MOST_PROGRAMS, disk_cache.key_at_start)
    except Exception as error:  # a disk that is full, a kind of program that cannot be written down
        logging.warning("the program cannot be kept in %s: %s", path, error)
    return program


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Turn off JAX's cache on disk for a while.

    A program that came from that cache cannot be serialised again: on a CPU it lacks its code.
    """
    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
