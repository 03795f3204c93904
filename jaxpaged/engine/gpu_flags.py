"""XLA's options for the serving loop on a GPU, set before JAX starts unless the user has set them."""

import importlib.metadata
import os

import jax
from absl import logging

from jaxpaged.config import EngineConfig

# By default XLA makes CUDA graphs of kernels and branches, but not of loops. With this the serving loop is
# one graph, launched once a run: `tests/step/test_compile_h200.py` reads it from the compiled program.
FLAGS = {"xla_gpu_enable_command_buffer": "+WHILE"}
# Options of a step that the host launches: CUDA graphs between loops and branches, whatever XLA_FLAGS says.
STEP_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"
}

# The share of a GPU's memory that JAX takes when it starts; by the second, deprecated name, too.
MEMORY_SHARE_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
DEFAULT_MEMORY_SHARE = 0.75


def set_defaults(config: EngineConfig | None = None) -> None:
    """Add the flags of `FLAGS` that XLA_FLAGS lacks, and give JAX the config's fraction of the GPU's memory.

    Call it before JAX's first computation. It does nothing where JAX will not use an NVIDIA GPU. Where it is
    too late for the flags, it logs that; too late for the memory is logged where the cache is sized.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"--{name}={value}" for name, value in FLAGS.items() if name not in _names(flags)]
    has_share = config is None or any(os.environ.get(name) for name in MEMORY_SHARE_NAMES)
    if (has_share and not missing) or not _may_use_cuda():
        return
    has_started = jax_has_started()
    if config is not None and not (has_share or has_started):
        os.environ[MEMORY_SHARE_NAMES[0]] = str(config.gpu_memory_utilization)
    if not missing:
        return
    if flags and not flags.lstrip().startswith("-"):
        logging.warning("XLA_FLAGS is the file %s: %s should be in it", flags, " ".join(missing))
    elif has_started:
        logging.warning("JAX has started already, without XLA_FLAGS %s: steps are slower", " ".join(missing))
    else:
        os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *missing])


def memory_share() -> float:
    """Return the fraction of a GPU's memory that JAX may have, from the variables that XLA reads."""
    given = [os.environ[name] for name in MEMORY_SHARE_NAMES if os.environ.get(name)]
    return float(given[0]) if given else DEFAULT_MEMORY_SHARE


def preallocates() -> bool:
    """Check whether JAX takes all its memory when it starts."""
    return os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("false", "False", "0")


def jax_has_started() -> bool:
    """Check whether a backend of JAX has started, without starting one.

    No public function tells, but JAX has options that cannot be changed from then on. The option used here
    only matters to CPUs of several processes, so another value for a moment does no harm.
    """
    option = "jax_cpu_get_local_topology_timeout_minutes"
    minutes = getattr(jax.config, option)
    try:
        for other in (minutes + 1, minutes):
            jax.config.update(option, other)
    except RuntimeError:
        return True
    return False


def _names(flags: str) -> set[str]:
    return {flag.lstrip("-").split("=", 1)[0] for flag in flags.split()}


def _may_use_cuda() -> bool:
    """Check whether JAX's plugin for CUDA is installed, and not ruled out by JAX_PLATFORMS."""
    platforms = jax.config.jax_platforms
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return False
    return any(p.name.startswith("xla_cuda") for p in importlib.metadata.entry_points(group="jax_plugins"))
