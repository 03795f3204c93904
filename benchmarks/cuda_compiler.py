"""Compiling for an H200 on a machine without one: the GPU as XLA describes it, and a process that can.

Needs the `cuda-compile` extra: the CUDA plugin of jax and ptxas, no driver and no GPU.
"""

import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks import record

PROCESS_LIMIT_S = 900  # by the clock, for all programs of a process together
PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-runtime-cu12")

# The H200 as XLA describes it. The three versions matter: without them it plans command buffers differently.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def missing_packages() -> list[str]:
    """Return the packages of the `cuda-compile` extra that are not installed."""
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    return [name for name in PACKAGES if name not in installed]


def run(module: str, arguments: list[str], flags: str = "") -> list[dict[str, Any]]:
    """Return the JSON lines of `python -m module`, run so that it compiles for a GPU, with XLA `flags`."""
    if missing := missing_packages():
        raise RuntimeError(f"{missing=}: install the cuda-compile extra")
    nvcc = importlib.util.find_spec("nvidia.cuda_nvcc")
    assert nvcc is not None
    assert nvcc.submodule_search_locations is not None
    folder = nvcc.submodule_search_locations[0]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",
        "JAXPAGED_NATIVE": "0",  # a model takes this machine's kernels, if they are there
        "XLA_FLAGS": f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={folder} {flags}",
        "PYTHONPATH": str(record.ROOT),
    }
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"the compiler process ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def topology(num_devices: int = 1) -> Any:
    """Return H200s of one machine, to compile for; the process must have the environment that `run` sets."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x1x{num_devices}", target_config=H200
    )


def compiled(operation: Callable[..., Any], *arguments: Any) -> Any:
    """Compile an operation for one H200, for arguments of these shapes."""
    import jax
    import numpy as np
    from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

    place = NamedSharding(Mesh(np.array(topology().devices), ("x",)), PartitionSpec())
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    jitted = jax.jit(lambda *args: operation(*args), in_shardings=place, out_shardings=place)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.compile()


class Instruction(NamedTuple):
    """One of a compiled program's that moves numbers."""

    computation: str  # that it is in; "ENTRY" for the program's own
    name: str  # with its operation
    num_bytes: int  # of what it gives
    taken_bytes: int  # of what it takes of the same computation


def instructions(hlo: str) -> Iterator[Instruction]:
    """Return the instructions of a compiled program's text, but for those inside fusions.

    The numbers of these stay in registers.
    """
    fused = set(re.findall(r"calls=%([\w.-]+)", hlo))
    computation, sizes = "", dict[str, int]()
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.-]+) \(", line):
            computation, sizes = "ENTRY" if head.group(1) else head.group(2), {}
        found = re.match(r"\s+(?:ROOT )?%(\S+) = (.+?) ([a-z][a-z-]*)\((.*?)\)(?:,|$)", line)
        if found is None or computation in fused:
            continue
        name, types, operation, operands = found.groups()
        sizes[name] = sum(_num_bytes(*each) for each in re.findall(r"([a-z]+[0-9a-z]*)\[([0-9,]*)\]", types))
        if operation not in _NOTHING:
            taken = sum(sizes.get(operand, 0) for operand in re.findall(r"%([^\s,)]+)", operands))
            yield Instruction(computation, f"{operation} {name}", sizes[name], taken)


# What moves nothing itself.
_NOTHING = ("parameter", "bitcast", "constant", "get-tuple-element", "tuple", "while", "conditional")


def _num_bytes(dtype: str, dimensions: str) -> int:
    bits = int(next(iter(re.findall(r"\d+", dtype)), "8"))  # pred
    return math.prod(int(size) for size in dimensions.split(",") if size) * bits // 8
