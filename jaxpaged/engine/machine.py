"""The machine: its memory, what a GPU that fails may still do, and what is kept on its disk."""

import ctypes
import os
from collections.abc import Mapping

import jax

from jaxpaged import disk_cache
from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine import gpu_flags
from jaxpaged.memory.sizing import Budget
from pallas_kernels.compilation_cache import compilation_cache_dir

# Bytes of JAX's memory on a GPU for what runs beside the loop: requests written into rows, reports read, what
# is lost between arrays, and the arena of structured outputs that is taken late.
GPU_BYTES_FREE = 256 * 2**20
# Numbers of two parameters of glibc's `mallopt`, and the threshold up to which glibc adapts by itself.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
_kept_bytes = 32 * 2**20


def memory_stats() -> Mapping[str, int] | None:
    """Return the memory statistics of JAX's GPU, in bytes; None on a CPU, whose memory is shared with
    others.
    """
    device = jax.local_devices()[0]
    return None if device.platform == "cpu" else device.memory_stats() or {}


def may_fail_to_launch(error: Exception) -> bool:
    """Check whether a device that raised this may still run single steps: a GPU that is not out of memory."""
    return jax.default_backend() == "gpu" and "RESOURCE_EXHAUSTED" not in str(error)


def gpu_budget(config: EngineConfig, stats: Mapping[str, int]) -> Budget:
    """Return the memory that `gpu_memory_utilization` gives to JAX on its GPU, less what is in use.

    JAX's own limit bounds it, and where JAX preallocates, what was free when it started. Raises `InputError`
    where JAX does not report the memory of its device.
    """
    if "bytes_limit" not in stats:
        raise InputError(
            "num_blocks=None must be an int where JAX does not say how much memory its device has "
            "(XLA_PYTHON_CLIENT_ALLOCATOR is other than 'default', perhaps)"
        )
    limit, share = stats["bytes_limit"], gpu_flags.memory_share()
    total = round(limit / share)
    budget = min(limit, int(total * config.gpu_memory_utilization))
    what = f"{budget / total:.0%} of the GPU's {total} bytes"
    if config.gpu_memory_utilization > share:
        name = gpu_flags.MEMORY_SHARE_NAMES[0]
        what += f" (JAX has no more: set {name}={config.gpu_memory_utilization} before it starts)"
    pool = stats.get("pool_bytes", 0)
    if gpu_flags.preallocates() and 0 < pool < budget:  # somebody else has the rest
        budget, what = pool, f"the {pool} bytes of the GPU that were free when JAX started"
    in_use = stats.get("bytes_in_use", 0)
    return Budget(budget, what).less(("in use", in_use), ("kept free", GPU_BYTES_FREE))


def keep_on_disk(keep: bool = True) -> None:
    """Keep compiled programs on disk, the loop whole and the rest by JAX, and models as programs read them.

    Without a folder, or without `keep`, nothing is kept or found. It is a setting of the process as a whole.
    """
    folder = compilation_cache_dir() if keep else None
    disk_cache.keep_in(folder)
    jax.config.update("jax_compilation_cache_dir", folder and str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def keep_freed(num_bytes: int) -> None:
    """Let the C library keep freed memory of up to `num_bytes` for the next use.

    On a CPU the loop allocates such memory in each run. glibc returns chunks of more than 32 MiB to the
    system at once, which then has to zero their pages anew. Chunks of more than 64 MiB are always returned,
    since glibc's threads cannot keep them. Nothing changes where MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES is
    set.
    """
    global _kept_bytes
    is_told = not {"MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}.isdisjoint(os.environ)
    threshold = num_bytes + 2**20  # a piece is somewhat more than was asked for
    if is_told or threshold <= _kept_bytes or jax.default_backend() != "cpu" or os.name != "posix":
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        _kept_bytes = threshold
        mallopt(M_MMAP_THRESHOLD, min(threshold, 2**31 - 1))
        mallopt(M_TRIM_THRESHOLD, min(2 * threshold, 2**31 - 1))  # as where glibc learns by itself
