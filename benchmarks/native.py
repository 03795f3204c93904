"""The native kernels for each target of this processor, beside XLA's own code and the machine's limits.

    python -m benchmarks.native [--targets avx512_bf16,avx2] [--rounds 10] [--out FILE]

JSON lines on stdout. First what all cores can do at most (`native_peaks.cc`): GFLOP/s with each target's
instructions, GB/s read from memory. Then products with weights of SmolLM2's shapes, wide and quantised, in
all more than caches hold, and attention of its 30 layers; rows that are not live are zeros, as padding is.
For each form, XLA's and each target's, a line has the least and the median microseconds of one product or one
layer's attention, the forms in turns. A program has a few of them, one after the other: so short that some
run undisturbed on a machine that others use as well, and the next one finds nothing in the caches. A target's
floor is its bytes (weights, K and V) at the bandwidth or its arithmetic at the peak, whichever takes longer,
and `of_floor` the floor's share of the least time. XLA uses the instructions that it finds.
"""

import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import record
from benchmarks.peaks import measure_peaks
from jaxpaged.models import layers
from jaxpaged.models.files.gguf.blocks import FORMATS
from jaxpaged.models.quantised import codes as quantised
from jaxpaged.models.quantised.codes import QuantisedWeight, SegmentSpec
from pallas_kernels import native, ops
from pallas_kernels.native import library
from pallas_kernels.xla import products as xla

_TARGETS = flags.DEFINE_list("targets", None, "of library.TARGETS; default: all that this processor can run")
_ROUNDS = flags.DEFINE_integer("rounds", 10, "through all weights or layers, of each form")
_OUT = flags.DEFINE_string("out", None, "append the lines to this file as well")

PRODUCTS = [(576, 1536), (576, 3072)]  # inputs, outputs
ROWS = [(1, 1), (8, 8), (16, 16), (32, 5), (32, 32), (256, 256)]  # and how many of them are live
WEIGHT_BYTES = 2**27
TOGETHER = 5  # products or layers in a program
ATTENTIONS = {
    "16 rows of 96": (16, 1, 96),
    "32 rows of 350": (32, 1, 350),
    "8 prompt tiles at 256": (8, 32, 288),
}
NUM_LAYERS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16


Form = tuple[Callable[..., list[jax.Array]], list[tuple[Any, ...]]]  # a program, and arguments for each call


class Case(NamedTuple):
    """One line: the forms of a program, and what each of its products or layers moves and computes."""

    line: dict[str, Any]
    xla: Form
    native: Form
    num_bytes: int
    num_flops: int


def main(argv: Sequence[str]) -> None:
    """Run as a module."""
    record.start(argv)
    targets, context = _TARGETS.value or library.targets(), record.context("benchmarks.native")

    def put(line: dict[str, Any]) -> None:
        print(json.dumps(context | line), flush=True)
        record.append(context | line, _OUT.value)

    peaks = {target: measure_peaks(target) for target in targets}
    bandwidth = max(peak["read_gbs"] for peak in peaks.values())
    put({"operation": "peaks", "read_gbs": bandwidth, "targets": peaks})
    for dtype in ("float32", "bfloat16"):
        for case in itertools.chain(products(dtype), quantised_products(dtype), attentions(dtype)):
            times = measure(case, ["xla", *targets], _ROUNDS.value)
            for target in targets:
                floor = max(case.num_bytes / bandwidth, case.num_flops / peaks[target][dtype]) / 1e3
                times[target] |= {
                    "floor": round(floor, 1),
                    "of_floor": round(floor / times[target]["min"], 2),
                }
            put({"dtype": dtype, **case.line, "us": times})


def measure(case: Case, forms: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Return the microseconds of each form, run in turns."""
    programs = {}
    for form in forms:
        os.environ["JAXPAGED_NATIVE"] = "0" if form == "xla" else form
        program, calls = case.xla if form == "xla" else case.native
        # A partial of its own: what is traced once for a function is not traced again for another target.
        programs[form] = jax.jit(functools.partial(program)).lower(*calls[0]).compile(), calls
    times: dict[str, list[float]] = {form: [] for form in forms}
    for turn in range(rounds + 1):
        for form, (compiled, calls) in programs.items():
            for arguments in calls:
                start = time.perf_counter()
                jax.block_until_ready(compiled(*arguments))
                if turn:  # the first one warms up
                    times[form].append(1e6 * (time.perf_counter() - start) / TOGETHER)
    spreads = {form: record.spread(us) for form, us in times.items()}
    return {form: {"min": spread["min"], "median": spread["median"]} for form, spread in spreads.items()}


def products(dtype: str) -> Iterator[Case]:
    """Yield cases that multiply all weights of a shape by the same rows."""
    for inputs, outputs in PRODUCTS:
        num_bytes = inputs * outputs * jnp.dtype(dtype).itemsize
        count = WEIGHT_BYTES // num_bytes // TOGETHER * TOGETHER
        weights = [draw(i, dtype, outputs, inputs) for i in range(count)]
        plain, packed = [jnp.array(weight.T) for weight in weights], [native.pack(w) for w in weights]
        for num_rows, num_live in ROWS:
            x = draw(count, dtype, num_rows, inputs).at[num_live:].set(0)
            line = {"operation": "product", "inputs": inputs, "outputs": outputs}
            line |= {"rows": num_rows, "live": num_live}
            own = functools.partial(native_products, outputs=outputs)
            xla_form, own_form = (
                (program, [(x, some) for some in itertools.batched(kernels, TOGETHER)])
                for program, kernels in ((xla_products, plain), (own, packed))
            )
            yield Case(line, xla_form, own_form, num_bytes, 2 * num_live * inputs * outputs)


def xla_products(x: jax.Array, kernels: Sequence[jax.Array]) -> list[jax.Array]:
    """Multiply as `jaxpaged.models.layers` does."""
    return [xla.product(x, kernel, contract=0) for kernel in kernels]


def native_products(x: jax.Array, kernels: Sequence[jax.Array], outputs: int) -> list[jax.Array]:
    return [native.product(x, kernel, outputs) for kernel in kernels]


def quantised_products(dtype: str) -> Iterator[Case]:
    """Yield cases with weights of 8 and of 4 bits, and with minima; XLA's form widens them."""
    for kind, (inputs, outputs) in itertools.product(("Q8_0", "Q4_0", "Q4_1"), PRODUCTS):
        its = FORMATS[kind]
        weight = jax.tree.map(
            np.asarray, quantised.zeros([SegmentSpec(its, outputs)], inputs, jnp.dtype(dtype))
        )
        num_bytes = sum(side.nbytes for side in jax.tree.leaves(weight))
        count = WEIGHT_BYTES // num_bytes // TOGETHER * TOGETHER
        rng = np.random.default_rng(0)

        def drawn(side: np.ndarray, rng: np.random.Generator = rng) -> np.ndarray:
            if side.dtype == np.uint32:
                return rng.integers(0, 2**32, side.shape, np.uint32)
            return rng.uniform(-0.01, 0.01, side.shape).astype(side.dtype)

        weights = [jax.tree.map(lambda side: jnp.asarray(drawn(side)), weight) for _ in range(count)]
        calls_of = functools.partial(itertools.batched, weights, TOGETHER)
        for num_rows, num_live in ROWS:
            x = draw(count, dtype, num_rows, inputs).at[num_live:].set(0)
            line = {"operation": "product", "weight": kind, "inputs": inputs, "outputs": outputs}
            line |= {"rows": num_rows, "live": num_live}
            form = multiply, [(x, some) for some in calls_of()]
            yield Case(line, form, form, num_bytes, 2 * num_live * inputs * outputs)


def multiply(x: jax.Array, weights: Sequence[QuantisedWeight]) -> list[jax.Array]:
    """Multiply by XLA or natively, as the environment says when it is traced."""
    return [layers.quantised_product(x, weight) for weight in weights]


def attentions(dtype: str) -> Iterator[Case]:
    """Yield cases of attention, each layer over a cache of its own with blocks in a random order."""
    for name, (num_tiles, tile_len, seq_len) in ATTENTIONS.items():
        width = -(-seq_len // BLOCK_SIZE)
        shape = (1 + num_tiles * width, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        caches = [(draw(2 * i, dtype, *shape), draw(2 * i + 1, dtype, *shape)) for i in range(NUM_LAYERS)]
        q = draw(0, dtype, num_tiles, tile_len, NUM_Q_HEADS, HEAD_DIM)
        blocks = np.random.default_rng(0).permutation(num_tiles * width).reshape(num_tiles, width)
        lens = jnp.full(num_tiles, seq_len, jnp.int32)
        tables = jnp.asarray(1 + blocks, jnp.int32)
        calls = [(q, some, tables, lens - tile_len, lens) for some in itertools.batched(caches, TOGETHER)]
        # A query sees the tokens up to its own.
        num_seen = num_tiles * sum(range(seq_len - tile_len + 1, seq_len + 1))
        num_bytes = 2 * num_tiles * seq_len * NUM_KV_HEADS * HEAD_DIM * q.dtype.itemsize
        xla, own = (functools.partial(attend, implementation=name) for name in ("xla", "native"))
        num_flops = 4 * num_seen * NUM_Q_HEADS * HEAD_DIM
        line = {"operation": "attention", "case": name}
        yield Case(line, (xla, calls), (own, calls), num_bytes, num_flops)


def attend(
    q: jax.Array,
    caches: Sequence[tuple[jax.Array, jax.Array]],
    tables: jax.Array,
    starts: jax.Array,
    lens: jax.Array,
    implementation: ops.TiledImplementation,
) -> list[jax.Array]:
    return [
        ops.tiled_paged_attention(q, k, v, tables, starts, lens, scale=0.125, implementation=implementation)
        for k, v in caches
    ]


def draw(seed: int, dtype: str, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


if __name__ == "__main__":
    app.run(main)
