"""The XLA flags that the serving loop wants on a GPU, set unless the user has set them."""

import importlib.metadata
import os

import jax
from absl import logging

# By default XLA makes CUDA graphs of kernels and branches, but not of loops. With this the serving loop is
# one graph, launched once a run: `tests/engine/test_compile_h200.py` reads it from the compiled program.
FLAGS = {"xla_gpu_enable_command_buffer": "+WHILE"}


def set_defaults() -> None:
    """Add to XLA_FLAGS those of `FLAGS` that it does not name; call it before JAX's first computation.

    Does nothing where JAX will not use a GPU of NVIDIA's, and where it is too late: then it logs.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"--{name}={value}" for name, value in FLAGS.items() if name not in _names(flags)]
    if not missing or not _may_use_cuda():
        return
    if flags and not flags.lstrip().startswith("-"):
        logging.warning("XLA_FLAGS is the file %s: %s should be in it", flags, " ".join(missing))
    elif jax_has_started():
        logging.warning("JAX has started already, without XLA_FLAGS %s: steps are slower", " ".join(missing))
    else:
        os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *missing])


def jax_has_started() -> bool:
    """Whether a backend of JAX's has started, asked without starting one.

    No public name says so, but JAX has options that it refuses to change from then on. This one matters to
    CPUs of several processes alone, so it does no harm that it has another value for a moment.
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
    """Whether JAX's plugin for CUDA is installed, and not ruled out by JAX_PLATFORMS."""
    platforms = jax.config.jax_platforms
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return False
    return any(p.name.startswith("xla_cuda") for p in importlib.metadata.entry_points(group="jax_plugins"))
