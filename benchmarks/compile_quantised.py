"""What a GPU reads for a product with quantised weights: `python -m benchmarks.compile_quantised [NAME ...]`.

A product of 16 rows in bfloat16 with 4,096 x 4,096 weights of each kind, compiled for an H200 on a machine
without one (see `cuda_compiler`), by the sizes of what the compiled program's kernels take and give. A JSON
line for each: bytes of the weights, all bytes that kernels read and write, the program's temporary ones, and
its kernels. Where the widened weight is written to memory and read again, it is among the second.
"""

import json
import math
import re

import jax
import jax.numpy as jnp
from absl import app
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import cuda_compiler
from jaxpaged.models import layers
from jaxpaged.models.gguf_blocks import KINDS
from jaxpaged.models.quantised import Kind, QuantisedWeight, Segment, zeros

SIZE, ROWS, DTYPE = 4096, 16, jnp.dtype("bfloat16")
FORMS = {
    "bfloat16": None,
    "int8, Q8_0": KINDS["Q8_0"],
    "int4, Q4_0": KINDS["Q4_0"],
    "int4, groups of 128 with zero points": Kind(4, 128, "float32", has_minima=True),
    "int8, by output": Kind(8, SIZE, "float32", has_minima=False),
    "fp8, by output": Kind(8, SIZE, "float32", has_minima=False, is_float=True),
    "fp8, blocks of 128": Kind(8, 128, "float32", has_minima=False, is_float=True),
}


def main(argv: list[str]) -> None:
    """Compile those that are named, or all, and print the lines."""
    mesh = Mesh(cuda_compiler.topology().devices, "x")
    place = NamedSharding(mesh, PartitionSpec())
    for name in argv[1:] or FORMS:
        kind = FORMS[name]
        weight = jax.eval_shape(lambda kind=kind: _weight(kind))
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            (jax.ShapeDtypeStruct((ROWS, SIZE), DTYPE), weight),
        )
        program = jax.jit(_product).lower(*arguments).compile()
        memory = program.memory_analysis()
        assert memory is not None
        kernels = kernels_of(program.as_text() or "")
        line = {
            "weights": name,
            "weight_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight)),
            "moved_bytes": sum(num_bytes for _, num_bytes in kernels),
            "temporary_bytes": memory.temp_size_in_bytes,
            "kernels": kernels,
        }
        print(json.dumps(line), flush=True)


def kernels_of(hlo: str) -> list[tuple[str, int]]:
    """The instructions of a compiled program's entry that move numbers, and the bytes of what each takes and
    gives.
    """
    sizes: dict[str, int] = {}
    kernels = []
    for line in hlo[hlo.index("\nENTRY") :].splitlines():
        found = re.match(r"\s+(?:ROOT )?%(\S+) = (.+?) ([a-z][a-z-]*)\((.*?)\)(?:,|$)", line)
        if found is None:
            continue
        name, types, operation, operands = found.groups()
        sizes[name] = sum(_num_bytes(*each) for each in re.findall(r"([a-z]+[0-9a-z]*)\[([0-9,]*)\]", types))
        if operation not in ("parameter", "bitcast", "constant", "get-tuple-element", "tuple"):
            taken = sum(sizes.get(operand, 0) for operand in re.findall(r"%([^\s,)]+)", operands))
            kernels.append((f"{operation} {name}", sizes[name] + taken))
    return kernels


def _num_bytes(dtype: str, dimensions: str) -> int:
    bits = int(next(iter(re.findall(r"\d+", dtype)), "8"))  # pred
    return math.prod(int(size) for size in dimensions.split(",") if size) * bits // 8


def _weight(kind: Kind | None) -> jax.Array | QuantisedWeight:
    if kind is None:
        return jnp.zeros((SIZE, SIZE), DTYPE)
    return zeros((Segment(kind, SIZE),), SIZE, DTYPE)


def _product(x: jax.Array, weight: jax.Array | QuantisedWeight) -> jax.Array:
    return layers.unembed(x, weight)


if __name__ == "__main__":
    app.run(main)
