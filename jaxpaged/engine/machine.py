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

# Bytes of JAX's memory on a GPU for what runs beside the loop: requests written into rows, reports read, and
# what is lost between arrays.
GPU_BYTES_FREE = 256 * 2**20
# Numbers of two parameters of glibc's `mallopt`, and the threshold up to which glibc adapts by itself.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
_kept_bytes = 32 * 2**20


def memory_stats() -> Mapping[str, int] | None:
    """What JAX says of its GPU's memory, in bytes; None on a CPU, where other programs live beside us."""
    device = jax.local_devices()[0]
    return None if device.platform == "cpu" else device.memory_stats() or {}


def may_fail_to_launch(error: Exception) -> bool:
    """Whether a device that raised this may still run a step, if not the loop: a GPU, and it has memory."""
    return jax.default_backend() == "gpu" and "RESOURCE_EXHAUSTED" not in str(error)


def gpu_budget(config: EngineConfig, stats: Mapping[str, int]) -> Budget:
    """The memory that `gpu_memory_utilization` gives to JAX on its GPU, as far as there is so much, less what
    it has in use.
    """
    if "bytes_limit" not in stats:
        raise InputError(
            "num_blocks=None must be an int where JAX does not say how much memory its device has "
            "(XLA_PYTHON_CLIENT_ALLOCATOR is other than 'default', perhaps)"
        )
    limit, share = stats["bytes_limit"], gpu_flags.memory_share()
    total = round(limit / share)
    most = min(limit, int(total * config.gpu_memory_utilization))
    what = f"{most / total:.0%} of the GPU's {total} bytes"
    if config.gpu_memory_utilization > share:
        name = gpu_flags.MEMORY_SHARE_NAMES[0]
        what += f" (JAX has no more: set {name}={config.gpu_memory_utilization} before it starts)"
    pool = stats.get("pool_bytes", 0)
    if gpu_flags.preallocates() and 0 < pool < most:  # somebody else has the rest
        most, what = pool, f"the {pool} bytes of the GPU that were free when JAX started"
    in_use = stats.get("bytes_in_use", 0)
    return Budget(most, what).less(("in use", in_use), ("kept free", GPU_BYTES_FREE))


def keep_on_disk(keep: bool = True) -> None:
    """Keep on disk what is compiled, the loop whole and the rest by JAX, and models as programs read them.

    Nothing is kept, or found, where there is no folder for it, or without `keep`: for the process as a whole.
    """
    folder = compilation_cache_dir() if keep else None
    disk_cache.keep_in(folder)
    jax.config.update("jax_compilation_cache_dir", folder and str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def keep_freed(num_bytes: int) -> None:
    """Let the C library keep pieces of memory of up to so many bytes when they are freed, for the next use.

    They are what the loop takes on a CPU while it runs. glibc gives pieces of more than 32 MiB back to the
    system at once, which has to zero their pages in each run of the loop anew. It does so with pieces of more
    than 64 MiB in any case, for its threads cannot keep them. Who has set MALLOC_MMAP_THRESHOLD_ or
    GLIBC_TUNABLES has chosen already.
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
