"""Copies of experts' weights on a GPU: `python -m benchmarks.compile_experts [NAME ...]`.

A feed-forward part of eight experts, of which each of 16 tokens chooses two, in bfloat16, compiled for an
H200 on a machine without one (see `cuda_compiler`): with products by XLA, and by our kernel, which is told
the expert. A JSON line for each: bytes of an expert's weights, what the compiled program writes to memory
that is as large as the smaller of its two weights, and the program's temporary bytes. What is copied is read,
written and read again, for each expert that some token chose.
"""

import json
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from absl import app
from flax import nnx

from benchmarks import cuda_compiler
from jaxpaged.models import experts, weights
from jaxpaged.models.config import Experts, ModelConfig, Rope, uniform
from jaxpaged.models.load_as import LoadAs
from pallas_kernels.ops import choice

EXPERTS = Experts(num_experts=8, num_chosen=2, renormalise=True)
CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=1024,
    intermediate_size=3584,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=128,
    norm_eps=1e-5,
    layers=uniform(2, rope=Rope(theta=1e4, dim=128)),
    max_model_len=512,
    experts=EXPERTS,
)
NUM_ROWS, DTYPE = 16, jnp.dtype("bfloat16")
NAMES = {"xla": "xla", "kernel": "mosaic_gpu"}


def main(argv: list[str]) -> None:
    """Compile those that are named, or both, and print the lines."""
    for name in argv[1:] or NAMES:
        with mock.patch.object(choice, "default_implementation", return_value=NAMES[name]):
            made = nnx.eval_shape(
                lambda: experts.ExpertsMLP(weights.AbstractWeights(CONFIG, LoadAs(DTYPE)), EXPERTS)
            )
        graphdef, params = nnx.split(made)

        def run(params: Any, x: jax.Array, graphdef: nnx.GraphDef = graphdef) -> jax.Array:
            return nnx.merge(graphdef, params)(x, 0, jnp.zeros(len(x), bool))

        x = jax.ShapeDtypeStruct((NUM_ROWS, CONFIG.hidden_size), DTYPE)
        program = cuda_compiler.compiled(run, params, x)
        down = 2 * CONFIG.hidden_size * CONFIG.intermediate_size
        line = {
            "products": name,
            "expert_bytes": 3 * down,
            "written": {
                its.name: its.num_bytes
                for its in cuda_compiler.instructions(program.as_text() or "")
                if its.num_bytes >= down
            },
            "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    app.run(main)
