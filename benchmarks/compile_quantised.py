"""Bytes that a GPU reads for a product with quantised weights: `python -m benchmarks.compile_quantised [NAME
...]`.

A product of 16 rows, or `--rows`, in bfloat16 with 4,096 x 4,096 weights of each kind, compiled for an H200
on a machine without one (see `cuda_compiler`), as XLA multiplies, and by our kernel where that serves the
weight; by the sizes of what the compiled program's kernels take and give. A JSON line for each: bytes of the
weights, all bytes that kernels read and write, the program's temporary ones, and its kernels. Where the
widened weight is written to memory and read again, it is among the second.
"""

import functools
import json

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks import cuda_compiler
from jaxpaged.models import layers
from jaxpaged.models.files.gguf.blocks import FORMATS
from jaxpaged.models.quantised.codes import CodeFormat, QuantisedWeight, SegmentSpec, zeros
from pallas_kernels.gpu.quantised_product import why_not
from pallas_kernels.ops import ProductImplementation

_ROWS = flags.DEFINE_integer("rows", 16, "Rows of the product.")

SIZE, DTYPE = 4096, jnp.dtype("bfloat16")
FORMS = {
    "bfloat16": None,
    "int8, Q8_0": FORMATS["Q8_0"],
    "int4, Q4_0": FORMATS["Q4_0"],
    "Q6_K": FORMATS["Q6_K"],
    "int4, groups of 128 with zero points": CodeFormat(4, 128, "float32", has_minima=True),
    "int8, by output": CodeFormat(8, SIZE, "float32", has_minima=False),
    "fp8, by output": CodeFormat(8, SIZE, "float32", has_minima=False, is_float=True),
    "fp8, blocks of 128": CodeFormat(8, 128, "float32", has_minima=False, is_float=True),
}
BY_KERNEL = ", by the kernel"
FORMS |= {
    name + BY_KERNEL: kind
    for name, kind in FORMS.items()
    if kind and not why_not(DTYPE, kind.halfword_bits, kind.group_size, is_float=kind.is_float)
}


def main(argv: list[str]) -> None:
    """Compile those that are named, or all, and print the lines."""
    for name in argv[1:] or FORMS:
        implementation: ProductImplementation = "mosaic_gpu" if name.endswith(BY_KERNEL) else "xla"
        weight = jax.eval_shape(functools.partial(_weight, FORMS[name], implementation))
        program = cuda_compiler.compiled(_product, jax.ShapeDtypeStruct((_ROWS.value, SIZE), DTYPE), weight)
        memory = program.memory_analysis()
        assert memory is not None
        kernels = [
            (its.name, its.num_bytes + its.taken_bytes)
            for its in cuda_compiler.instructions(program.as_text() or "")
            if its.computation == "ENTRY"
        ]
        line = {
            "weights": name,
            "weight_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight)),
            "moved_bytes": sum(num_bytes for _, num_bytes in kernels),
            "temporary_bytes": memory.temp_size_in_bytes,
            "kernels": kernels,
        }
        print(json.dumps(line), flush=True)


def _weight(kind: CodeFormat | None, implementation: ProductImplementation) -> jax.Array | QuantisedWeight:
    if kind is None:
        return jnp.zeros((SIZE, SIZE), DTYPE)
    return zeros((SegmentSpec(kind, SIZE),), SIZE, DTYPE, implementation)


def _product(x: jax.Array, weight: jax.Array | QuantisedWeight) -> jax.Array:
    return layers.unembed(x, weight)


if __name__ == "__main__":
    app.run(main)
