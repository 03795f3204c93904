"""Peak rates of this machine: `native_peaks.cc` on a CPU, the sum of a large array on a GPU."""

import os
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.native import library

PEAKS = Path(__file__).parent / "native_peaks.cc"
READ_BYTES = 2**30  # of the sum; once through, it is in no cache


def measure_peaks(target: str) -> dict[str, float]:
    """Return GFLOP/s in float32 and bfloat16, and GB/s, by all cores together."""
    command = library.compile_command(library.TARGETS[target], library.find_compiler() or "c++")
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/peaks"
        subprocess.run(
            [*command, "-pthread", "-I", str(library.SOURCES), str(PEAKS), "-o", program], check=True
        )
        threads = str(len(os.sched_getaffinity(0)))
        printed = subprocess.run([program, threads], check=True, capture_output=True, text=True).stdout
    return dict(zip(("float32", "bfloat16", "read_gbs"), map(float, printed.split()), strict=True))


def read_gbs() -> float:
    """Return the GB/s that are read from the default device's memory."""
    if jax.default_backend() == "cpu" and library.find_compiler() and library.targets():
        return measure_peaks(library.targets()[0])["read_gbs"]
    array = jnp.ones(READ_BYTES // 4, jnp.float32)
    add_up = jax.jit(jnp.sum)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        add_up(array).block_until_ready()
        times.append(time.perf_counter() - start)
    return READ_BYTES / min(times) / 1e9
