"""Launches of our kernels for a target that is not here, for the interpreter of PTX (`jaxpaged verify ptx`).

    python -m benchmarks.compile_ptx --capability=9.0 --out FILE.npz NAME ...
    python -m benchmarks.compile_ptx --list                     names of cases

A kernel is compiled for a described GPU (`benchmarks.cuda_compiler`). What comes before it in its operation
runs in XLA on this machine, which gives the kernel's arguments. A case is these, what the oracle says, and
the error that is allowed. It needs the cuda-compile extra.
"""

import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import cuda_compiler
from jaxpaged.research.ptx import launch

_CAPABILITY = flags.DEFINE_multi_string(
    "capability", ["9.0"], "A compute capability; may be given several times."
)
_OUT = flags.DEFINE_string("out", "launches.npz", "The file to write.")
_LIST = flags.DEFINE_boolean("list", False, "Print the names of cases.")
_HERE = flags.DEFINE_boolean("here", False, "Compile in this process, which must have the environment.")

KERNEL_PRIMITIVES = ("mpmd_map",)
CALLS = ("jit", "pjit", "closed_call", "custom_vmap_call", "custom_jvp_call")  # what is run inside
SMALL = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
ONE_HEAD = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 64}
STEADY = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 128}
EIGHT_BITS = {"cache_dtype": "float8_e4m3fn"}
# Fields of a `DecodeCase`, and tokens of a partition, the most of a row, and multiprocessors of the launch.
DECODE: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "decode_small": ({"seq_lens": (70, 0, 17), **ONE_HEAD}, (512, 1, 1)),
    "decode_merge": ({"seq_lens": (15, 0, 130), **ONE_HEAD}, (64, 3, 2)),
    "decode_plain": ({"seq_lens": (70, 0, 17), **SMALL}, (512, 1, 1)),
    "decode_partitions": ({"seq_lens": (15, 0, 256, 130), **SMALL}, (64, 3, 2)),
    "decode_edges": ({"seq_lens": (1, 15, 16, 17, 63, 64, 65), **SMALL}, (64, 3, 1)),
    "decode_d128": ({"seq_lens": (100, 7), "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}, (64, 3, 1)),
    "decode_d80_window": (
        {"seq_lens": (90, 70, 12), "sliding_window": 20, "head_dim": 80, "num_q_heads": 3, "num_kv_heads": 1,
         "block_size": 8}, (64, 3, 1)),
    "decode_d256": (
        {"seq_lens": (70, 12), "head_dim": 256, "num_q_heads": 16, "num_kv_heads": 1}, (64, 3, 1)),
    "decode_e4m3": (
        {"seq_lens": (130, 5), "sinks": True, "scale_per_head": True, **EIGHT_BITS, **SMALL}, (64, 3, 1)),
    "decode_int8": (
        {"seq_lens": (66, 5), "cache_dtype": "int8", "scale_per_head": True, **SMALL}, (64, 3, 1)),
    "decode_everything": (
        {"seq_lens": (61, 130, 9), "alibi": True, "sliding_window": 50, "soft_cap": 3.0, "sinks": True,
         "num_q_heads": 10, "num_kv_heads": 2, "head_dim": 128}, (64, 3, 1)),
    "steady_bf16_1": ({"seq_lens": (64,), **STEADY}, (512, 1, 1)),
    "steady_bf16_5": ({"seq_lens": (320,), **STEADY}, (512, 1, 1)),
    "steady_e4m3_1": ({"seq_lens": (64,), **EIGHT_BITS, **STEADY}, (512, 1, 1)),
    "steady_e4m3_5": ({"seq_lens": (320,), **EIGHT_BITS, **STEADY}, (512, 1, 1)),
}  # fmt: skip


@dataclasses.dataclass
class Case:
    """An operation, its arrays, and what it must compute."""

    name: str
    operation: Callable[..., Any]
    arrays: Sequence[Any]
    wanted: np.ndarray[Any, Any]
    allowed: np.ndarray[Any, Any]
    is_summed: bool = False
    result_shape: tuple[int, ...] | None = None  # None: that of the kernel's first output


def main(argv: list[str]) -> None:
    """Run as a module."""
    if _LIST.value:
        print("\n".join(DECODE))
        return
    if _HERE.value:
        [capability] = _CAPABILITY.value
        launch.save(_OUT.value, [compiled(case_of(name), capability) for name in argv[1:]])
        return
    launches = []
    for capability in _CAPABILITY.value:  # in a process each: Mosaic keeps the first target's
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/launches.npz"
            arguments = ["--here", f"--out={file}", f"--capability={capability}", *argv[1:]]
            cuda_compiler.run("benchmarks.compile_ptx", arguments)
            launches += launch.load(file)
    launch.save(_OUT.value, launches)


def case_of(name: str) -> Case:
    """Return the case of a name. ValueError: there is none."""
    if name not in DECODE:
        raise ValueError(f"{name=} must be one of {list(DECODE)}")
    return decode_case(name, *DECODE[name])


def decode_case(name: str, fields: dict[str, Any], how: tuple[int, int, int]) -> Case:
    """Return decode attention of a case, launched for so many multiprocessors."""
    import jax.numpy as jnp

    from jaxpaged.research.verify.cases.decode import DecodeCase
    from jaxpaged.research.verify.cases.frame import oracle
    from pallas_kernels import ops
    from pallas_kernels.gpu import common, tuning
    from pallas_kernels.gpu.decode import attention
    from pallas_kernels.gpu.partitioning import Partitioning
    from tests.kernels import checks

    one = DecodeCase(name=name, **fields)
    tokens, most, cores = how
    attention.default_partitioning = lambda *_: Partitioning(tokens, most)
    tuning.num_cores = lambda: cores
    common.jitted_kernel.cache_clear()
    named, options = checks.inputs(one)
    arrays = dict(named) | {k: jnp.asarray(v) for k, v in options.items() if hasattr(v, "shape")}
    static = {k: v for k, v in options.items() if k not in arrays}
    wanted = np.asarray(oracle(one)[0], np.float64)
    allowed = np.asarray(one.errors(wanted, checks.weights_dtype(one))[1])

    def operation(*values: Any) -> Any:
        given = dict(zip(arrays, values, strict=True))
        return ops.paged_attention(**given, **static, implementation="mosaic_gpu")

    return Case(name, operation, list(arrays.values()), wanted, np.broadcast_to(allowed, wanted.shape))


def compiled(case: Case, capability: str) -> Any:
    """Compile a case's one kernel for a target; return its launch."""
    import jax

    from jaxpaged.research.ptx import host
    from pallas_kernels.gpu.targets import TARGETS

    with jax.sharding.use_abstract_mesh(cuda_compiler.abstract_mesh(capability)):
        traced = jax.jit(lambda *arrays: case.operation(*arrays)).trace(*case.arrays)
    name, operands, outputs = kernel_arguments(traced.jaxpr, case.arrays)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in case.arrays]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        cuda_compiler.compiled(case.operation, *shapes, capability=capability)
        [text] = [file.read_text() for file in Path(folder).glob("*.ptx")]
        [passes] = [file.read_text(errors="replace") for file in Path(folder).glob("*.mlir-passes.log")]
    call = host.read(passes)
    buffers = [
        launch.Buffer(f"operand {n}", str(array.dtype), array.shape, as_bytes(array), is_reference)
        for n, (array, is_reference) in enumerate(operands)
    ]
    result = len(buffers)
    buffers += [launch.Buffer(name, str(aval.dtype), aval.shape, None) for aval in outputs]
    shape = buffers[result].shape[1:] if case.is_summed else buffers[result].shape
    wanted, allowed = np.full(shape, np.nan, np.float32), np.ones(shape, np.float32)
    where = tuple(slice(size) for size in case.wanted.shape)
    if case.wanted.size == wanted.size:
        wanted, allowed = (x.reshape(shape).astype(np.float32) for x in (case.wanted, case.allowed))
    else:
        wanted[where], allowed[where] = case.wanted, case.allowed
    return launch.Launch(
        case.name,
        TARGETS[capability].architecture,
        _without_locations(text),
        call.grid,
        call.shared_bytes,
        tuple(call.parameters),
        tuple(call.maps),
        tuple(buffers),
        result,
        wanted,
        allowed,
        case.is_summed,
    )


def as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array's bytes."""
    return np.frombuffer(array.tobytes(), np.uint8)


def _without_locations(text: str) -> str:
    """Return a text without its lines of source, comments and debugging sections."""
    text = re.sub(r"^\s*(//|\.loc|\.file)[^\n]*\n", "", text, flags=re.MULTILINE)
    return text[: text.index("$L__func_end")] + "}\n" if "$L__func_end" in text else text


class _Reached(Exception):
    """The kernel of an operation, with its operands."""


def kernel_arguments(
    closed: Any, arguments: Sequence[Any]
) -> tuple[str, list[tuple[np.ndarray[Any, Any], bool]], list[Any]]:
    """Run a traced operation until its kernel. Return the kernel's name, operands, and its outputs' avals.

    An operand comes with whether it is a reference, which the kernel may change.
    """
    try:
        _run_until_kernel(closed, arguments)
    except _Reached as reached:
        one, given = reached.args
        operands = [(np.asarray(x[...]), True) if _is_reference(x) else (np.asarray(x), False) for x in given]
        return one.params["name"], operands, [var.aval for var in one.outvars]
    raise ValueError("the operation must have a Mosaic GPU kernel")


def _run_until_kernel(closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """Run a traced function one primitive after another: those compiled for a mesh that is not here, too."""
    from jax.extend import core

    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for one in jaxpr.eqns:
        given = [read(atom) for atom in one.invars]
        if one.primitive.name in KERNEL_PRIMITIVES:
            raise _Reached(one, given)
        inner = [p for p in one.params.values() if hasattr(p, "jaxpr")]
        if one.primitive.name in CALLS and len(inner) == 1:
            results = _run_until_kernel(inner[0], given)
        else:
            bound = one.primitive.get_bind_params(one.params)
            functions, params = bound if isinstance(bound, tuple) else ((), bound)  # a pair before JAX 0.12
            results = one.primitive.bind(*functions, *given, **params)
            results = results if one.primitive.multiple_results else [results]
        values.update(zip(one.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_reference(value: Any) -> bool:
    return "Ref" in type(value).__name__


if __name__ == "__main__":
    sys.exit(app.run(main))
