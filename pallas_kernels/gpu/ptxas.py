"""The assembler that Mosaic compiles with, ptxas: its version, and versions that must not be used."""

import functools
import os
import re
import subprocess

# The first version that compiles causal masks wrongly, and the first that no longer does: CUDA 12.8.0 and
# 12.9.1. JAX refuses its own attention kernels for the same reason.
WRONG, RIGHT = (12, 8, 0), (12, 9, 86)


def refuse(version: tuple[int, ...] | None) -> None:
    """Raise NotImplementedError if this version of ptxas, None for none, must not compile a causal mask."""
    if version is not None and WRONG <= version < RIGHT:
        given, wanted = (".".join(map(str, numbers)) for numbers in (version, RIGHT))
        raise NotImplementedError(
            f"ptxas {given} compiles causal masks wrongly, as all do from CUDA 12.8.0 to before 12.9.1: for "
            f"prompts on mosaic_gpu it must be {wanted} or later (CUDA_ROOT names the CUDA in use). "
            "Or use implementation='xla'."
        )


@functools.cache
def version() -> tuple[int, ...] | None:
    """Return the version, such as (12, 9, 86), of the ptxas that Mosaic finds; None if there is none."""
    places = [f"{os.environ.get('MOSAIC_GPU_CUDA_ROOT')}/bin/ptxas", "ptxas", "/usr/local/cuda/bin/ptxas"]
    for command in places:
        try:
            output = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        if match := re.search(r"V(\d+)\.(\d+)\.(\d+)", output):
            return tuple(map(int, match.groups()))
    return None
