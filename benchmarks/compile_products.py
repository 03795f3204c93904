"""Bytes that a GPU moves for a layer's products: `python -m benchmarks.compile_products [NAME ...]`.

Compiled for an H200 on a machine without one (see `cuda_compiler`), by XLA, and by our kernel where it serves
the weight. A JSON line for each name:

* A product of 16 rows, or `--rows`, in bfloat16 with 4,096 x 4,096 weights of a format: bytes of the weights,
  all bytes that the program's kernels read and write, its temporary ones, and its kernels. Where the widened
  weight is written to memory and read again, it is among the second.
* A feed-forward layer of eight experts, of which each of 16 tokens chooses two, in bfloat16: bytes of an
  expert's weights, what the program writes that is as large as the smaller of its two weights, and its
  temporary bytes. A copy is read, written and read again, for each expert that some token chose.
"""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from absl import app, flags
from flax import nnx

from benchmarks import cuda_compiler
from benchmarks.llama import llama_config
from jaxpaged.models import experts, layers, weights
from jaxpaged.models.config import Experts
from jaxpaged.models.files.gguf.blocks import FORMATS
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.quantised.codes import CodeFormat, QuantisedWeight, SegmentSpec, zeros
from pallas_kernels.gpu.quantised_product import why_not
from pallas_kernels.ops import ProductImplementation, choice

_ROWS = flags.DEFINE_integer("rows", 16, "Rows of the product.")

SIZE, DTYPE = 4096, jnp.dtype("bfloat16")
EXPERTS, BY_KERNEL = "experts", ", by the kernel"
WEIGHTS = {
    "bfloat16": None,
    "int8, Q8_0": FORMATS["Q8_0"],
    "int4, Q4_0": FORMATS["Q4_0"],
    "Q6_K": FORMATS["Q6_K"],
    "int4, groups of 128 with zero points": CodeFormat(4, 128, "float32", has_minima=True),
    "int8, by output": CodeFormat(8, SIZE, "float32", has_minima=False),
    "fp8, by output": CodeFormat(8, SIZE, "float32", has_minima=False, is_float=True),
    "fp8, blocks of 128": CodeFormat(8, 128, "float32", has_minima=False, is_float=True),
}
WEIGHTS |= {
    name + BY_KERNEL: form
    for name, form in WEIGHTS.items()
    if form and not why_not(DTYPE, form.halfword_bits, form.group_size, is_float=form.is_float)
}
CHOICE = Experts(num_experts=8, num_chosen=2, renormalise=True)
MODEL = llama_config(
    2, 1024, 3584, num_q_heads=8, num_kv_heads=2, head_dim=128,
    vocab_size=512, max_model_len=512, experts=CHOICE,
)  # fmt: skip
NAMES = [*WEIGHTS, EXPERTS, EXPERTS + BY_KERNEL]


def main(argv: list[str]) -> None:
    """Compile those that are named, or all, and print the lines."""
    cuda_compiler.print_lines(map(line, argv[1:] or NAMES))


def line(name: str) -> dict[str, Any]:
    """Compile the program of a name and return its line."""
    implementation: ProductImplementation = "mosaic_gpu" if name.endswith(BY_KERNEL) else "xla"
    of_name = expert_layer if name.startswith(EXPERTS) else functools.partial(product, WEIGHTS[name])
    return {"weights": name} | of_name(implementation)


def product(form: CodeFormat | None, implementation: ProductImplementation) -> dict[str, Any]:
    """Compile a product with weights in a format, None for plain ones; return its line's numbers."""

    def make() -> jax.Array | QuantisedWeight:
        if form is None:
            return jnp.zeros((SIZE, SIZE), DTYPE)
        return zeros((SegmentSpec(form, SIZE),), SIZE, DTYPE, implementation)

    weight, x = jax.eval_shape(make), jax.ShapeDtypeStruct((_ROWS.value, SIZE), DTYPE)
    program = cuda_compiler.compiled(layers.unembed, x, weight)
    kernels = [
        (its.name, its.num_bytes + its.taken_bytes)
        for its in cuda_compiler.instructions(program.as_text() or "")
        if its.computation == "ENTRY"
    ]
    return {
        "weight_bytes": cuda_compiler.num_bytes(weight),
        "moved_bytes": sum(num_bytes for _, num_bytes in kernels),
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        "kernels": kernels,
    }


def expert_layer(implementation: ProductImplementation) -> dict[str, Any]:
    """Compile a feed-forward layer of experts; return its line's numbers."""
    with mock.patch.object(choice, "default_implementation", return_value=implementation):
        made = nnx.eval_shape(
            lambda: experts.ExpertsMLP(weights.AbstractWeights(MODEL, LoadAs(DTYPE)), CHOICE)
        )
    graphdef, params = nnx.split(made)

    def run(params: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(x, 0, jnp.zeros(len(x), bool))[0]

    x = jax.ShapeDtypeStruct((_ROWS.value, MODEL.hidden_size), DTYPE)
    program = cuda_compiler.compiled(run, params, x)
    down = DTYPE.itemsize * MODEL.hidden_size * MODEL.intermediate_size
    return {
        "expert_bytes": 3 * down,
        "written": {
            its.name: its.num_bytes
            for its in cuda_compiler.instructions(program.as_text() or "")
            if its.num_bytes >= down
        },
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
    }


if __name__ == "__main__":
    app.run(main)
