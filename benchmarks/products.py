"""Products with a layer's weights on a GPU: our kernel, which is told the layer, beside cuBLAS.

    python -m benchmarks.products [--out FILE] [--budget 160]    on an NVIDIA GPU
    python -m benchmarks.products --smoke                        tiny shapes, interpreted, on a CPU

JSON lines on stdout, one a shape, number of rows and implementation: microseconds of a product, adding up
what programs share included, with its share of the bytes and of the operations that an H200 can do, and
which of the two is its floor. Answers are compared first. Layers are read in turn, so weights come from
memory. The shapes are those of Llama 3.1 8B, outputs x inputs.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import device, record
from pallas_kernels import ops

_BUDGET = flags.DEFINE_float("budget", 160, "Seconds after which no case begins.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Runs over all layers.", lower_bound=1)
_SMOKE = flags.DEFINE_boolean("smoke", False, "A tiny shape in the interpreter.")
_OUT = flags.DEFINE_string("out", None, "Append the lines to this file as well.")

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (16, 64, 256, 512)
TINY, TINY_ROWS = {"tiny": (128, 128)}, (9,)
STACK_BYTES = 3e8  # of weights at least, several times what a second-level cache holds
# Of a sum over up to 14,336 inputs: the two add up in other orders.
ALLOWED = 1e-5


def main(argv: list[str]) -> None:
    """Run as a module."""
    record.start(argv)
    budget = record.Budget(_BUDGET.value)
    results = record.Results("products", _OUT.value, short=True, **device.described(_SMOKE.value))
    shapes, rows = (TINY, TINY_ROWS) if _SMOKE.value else (SHAPES, ROWS)
    for (name, shape), num_rows in itertools.product(shapes.items(), rows):
        if budget.is_spent():
            break
        for line in measure(*shape, num_rows):
            results.put({"role": name} | line)


def measure(num_outputs: int, num_inputs: int, num_rows: int) -> list[dict[str, Any]]:
    """Return a line for each implementation."""
    num_bytes = 2 * num_outputs * num_inputs
    num_layers = 2 if _SMOKE.value else math.ceil(STACK_BYTES / num_bytes)
    stack = _normal(jax.random.key(0), (num_layers, num_inputs, num_outputs))
    x = _normal(jax.random.key(1), (num_rows, num_inputs))
    by_kernel = jax.jit(
        lambda stack, layer: ops.product(x, stack, layer, implementation="mosaic_gpu", interpret=_SMOKE.value)
    )
    by_xla = jax.jit(lambda weights: ops.product(x, weights, implementation="xla"))
    told = [(stack, jnp.int32(layer)) for layer in range(num_layers)]
    own = [(stack[layer],) for layer in range(num_layers)]
    of_size = jnp.abs(x).astype(jnp.float32) @ jnp.abs(own[-1][0]).astype(jnp.float32)
    error = np.max(np.abs(by_kernel(*told[-1]) - by_xla(*own[-1])) / of_size)
    if not error <= ALLOWED:
        raise RuntimeError(f"{error=} of {num_rows} rows by {num_outputs} x {num_inputs} is not right")
    moved = num_bytes + num_rows * (2 * num_inputs + 4 * num_outputs)
    operations = 2 * num_rows * num_outputs * num_inputs
    peak = device.peak()
    floor = peak.floor_s(moved, operations)
    found = []
    for what, run, arguments in (("kernel", by_kernel, told), ("cublas", by_xla, own)):
        took = device.times(run, arguments, _REPEATS.value)
        found.append(
            {
                "what": what,
                "shape": [num_outputs, num_inputs],
                "num_rows": num_rows,
                **took.line,
                "floor_us": floor and round(floor * 1e6, 2),
                **peak.share_of_bytes(moved / took.median),
                **peak.share_of_flops(operations / took.median),
            }
        )
    return found


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.jit(lambda: jax.random.normal(key, shape, jnp.bfloat16))()


if __name__ == "__main__":
    app.run(main)
