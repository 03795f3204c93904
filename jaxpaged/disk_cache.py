"""What is costly to make, kept on disk from one process to the next under a key of all that it is made from.

The keys know the sources of both packages, the versions of JAX and the machine: what another version of ours
made is not found.
"""

import functools
import hashlib
import os
import platform
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import jax

import pallas_kernels

_folder: Path | None = None  # None: nothing is kept. A process has one.


def keep_in(folder: Path | None) -> None:
    """From now on keep things in a folder, or not at all."""
    global _folder
    _folder = folder


def path_of(made_from: object, suffix: str) -> Path | None:
    """Where a thing is kept that is made from `made_from`, whose `repr` says all of it; None where nothing
    is.
    """
    if _folder is None:
        return None
    identity = repr((made_from, _machine()))
    return _folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}{suffix}"


def write_file(path: Path, content: bytes) -> None:
    """Another process sees all of the file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as whole:
        whole.write(content)
    os.replace(whole.name, path)


def prune(like: Path, most: int) -> None:
    """Of all things with this one's suffix leave `most`: the ones used longest ago go."""
    used = sorted(like.parent.glob(f"*{like.suffix}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in used[most:]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@functools.cache
def _machine() -> tuple[object, ...]:
    """All that what is kept depends on beside what it is made from."""
    sources = hashlib.sha256()
    for package in (Path(__file__).parent, Path(str(pallas_kernels.__file__)).parent):
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
        _cpu_features(),
    )


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
