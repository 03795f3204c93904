"""Compiling for an H200 on a machine without one: the GPU as XLA describes it, and a process that can.

Needs the `cuda-compile` extra: the CUDA plugin of jax and ptxas, no driver and no GPU.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
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


def described(capability: str) -> str:
    """Return a GPU of this compute capability as XLA describes it: an H200, or a card of that major version
    of `targets.CARDS` with the target's memory.
    """
    from pallas_kernels.gpu.targets import CARDS, HOPPER, TARGETS

    if capability == HOPPER.capability:
        return H200
    major, minor = capability.split(".")
    card, target = next(c for c in CARDS if c.capability.split(".")[0] == major), TARGETS[capability]
    extension = "" if major == "8" else "feature_extension: ACCELERATED_FEATURES "
    values = {
        "shared_memory_per_core": target.core_bytes,
        "threads_per_core_limit": target.core_threads,
        "core_count": card.num_cores,
        "memory_bandwidth": int(card.bandwidth),
        "shared_memory_per_block_optin": target.program_bytes,
    }
    text = H200.replace("{ major: 9 minor: 0 }", f"{{ major: {major} minor: {minor} {extension}}}")
    for name, value in values.items():
        text = re.sub(rf"\b{name}: \d+", f"{name}: {value}", text)
    return text.replace("NVIDIA H200", f"NVIDIA {card.name}")


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


def print_lines(lines: Iterable[dict[str, Any]]) -> None:
    """Print a JSON line for each, as soon as it is there."""
    for line in lines:
        print(json.dumps(line), flush=True)


def named[T](cases: Sequence[T], name: str) -> T:
    """Return the case of this name. ValueError: there is none."""
    for case in cases:
        if str(case) == name:
            return case
    raise ValueError(f"{name=} must be one of {list(map(str, cases))}")


def num_bytes(tree: Any) -> int:
    """Return the bytes of all arrays of a tree, or of their shapes."""
    import jax

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@contextlib.contextmanager
def dumping(module: str) -> Iterator[str]:
    """Make a folder for XLA's dumps of a module; yield the XLA flags that write them."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={module}"


def dumped_thunks() -> list[tuple[int, str]]:
    """Return the thunks of the program compiled last; this process must have the flags of `dumping`."""
    [folder] = re.findall(r"--xla_dump_to=(\S+)", os.environ["XLA_FLAGS"])
    dumps = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
    return read_thunks(max(dumps, key=lambda file: file.stat().st_mtime_ns).read_text())


def read_thunks(dump: str) -> list[tuple[int, str]]:
    """Return depth (in spaces) and kind of each thunk of a dumped sequence, in order."""
    found = re.findall(r"^( *)\d+: (k\w+)", dump, re.MULTILINE)
    return [(len(indent), kind) for indent, kind in found]


def outermost(thunks: list[tuple[int, str]]) -> tuple[str, ...]:
    """Return the kinds of the thunks that are in no other."""
    return tuple(kind for depth, kind in thunks if depth == 0)


def topology(num_devices: int = 1, capability: str = "9.0") -> Any:
    """Return GPUs of one machine, to compile for; the process must have the environment that `run` sets."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x1x{num_devices}", target_config=described(capability)
    )


def abstract_mesh(capability: str) -> Any:
    """Return a mesh of one GPU as Mosaic asks for it, which takes one without a capability for Hopper."""
    from jax.sharding import AbstractDevice, AbstractMesh

    @dataclasses.dataclass(frozen=True)
    class Device(AbstractDevice):
        """A device with the field that Mosaic reads."""

        compute_capability: str = capability

    device = Device(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    return AbstractMesh((1,), ("x",), abstract_device=device)


def compiled(operation: Callable[..., Any], *arguments: Any, capability: str = "9.0") -> Any:
    """Compile an operation for one GPU, an H200 by default, for arguments of these shapes."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    place = NamedSharding(Mesh(np.array(topology(1, capability).devices), ("x",)), PartitionSpec())
    jitted = jax.jit(lambda *args: operation(*args), in_shardings=place, out_shardings=place)
    with jax.sharding.use_abstract_mesh(abstract_mesh(capability)):
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
