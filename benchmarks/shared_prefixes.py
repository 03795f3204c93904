"""Decode attention on a CPU of rows behind one prompt: read by each row, or once for all.

    python -m benchmarks.shared_prefixes [--rounds 10] [--out FILE]

JSON lines on stdout. First what all cores can do (`benchmarks.peaks`). Then a line for each model, cache
and number of rows: the least and the median milliseconds of a layer's attention both ways, in turns. Blocks
lie in a random order, and nothing of them is in the caches. `times` is the ratio of the least. `cpu_ms` is
the time of all cores, which counts no waiting for other programs, and `cpu_times` its ratio. A prompt of 0
tokens shows what it costs to look for prefixes where there are none.

`floor` has milliseconds: K and V of each row, and of each token once, at the bandwidth of memory; and the
products at the peak, scores in the cache's type and sums of V in float32, as the kernels compute them.
`most_times` is what sharing gains at most: the longer one of reading alone and arithmetic, over the longer
one of reading once and arithmetic. Rows that are read one after the other may find a short prompt in the last
cache, so that less is gained.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import record
from benchmarks.peaks import measure_peaks
from pallas_kernels import layouts, native, ops
from pallas_kernels.layouts import LAYOUTS, Pool
from pallas_kernels.native import attention, library

_ROUNDS = flags.DEFINE_integer("rounds", 10, "through all layers, of each way")
_OUT = flags.DEFINE_string("out", None, "append the lines to this file as well")

BLOCK_SIZE, NUM_LAYERS = 16, 2
FLUSHED_BYTES = 2**26  # more than a last-level cache holds
MODELS = {  # query heads, KV heads, head_dim
    "Llama-2-7B": (32, 32, 128),
    "Llama-3-8B": (32, 8, 128),
    "Qwen2.5-0.5B": (14, 2, 64),
    "SmolLM2-135M": (9, 3, 64),
}
CASES = [  # model, dtype of queries, layout, rows, tokens of the prompt, own tokens
    *((model, "bfloat16", "token_major", rows, 2000, 16) for model in MODELS for rows in (32, 8)),
    ("Llama-2-7B", "float32", "token_major", 32, 2000, 16),
    ("Llama-2-7B", "bfloat16", "fp8_e4m3", 32, 2000, 16),
    ("Llama-3-8B", "bfloat16", "token_major", 32, 0, 352),
    ("SmolLM2-135M", "bfloat16", "token_major", 64, 0, 96),
]


class Case(NamedTuple):
    """Arguments of a layer's attention: queries, each layer's pool, block tables and lengths."""

    q: jax.Array
    pools: list[Pool]
    tables: jax.Array
    lens: jax.Array


def main(argv: Sequence[str]) -> None:
    """Run as a module."""
    record.start(argv)
    results, target = record.Results("shared_prefixes", _OUT.value), library.targets()[0]
    peaks = measure_peaks(target)
    results.put({"what": "peaks", "target": target, **peaks})
    for model, dtype, layout, num_rows, prompt, own in CASES:
        line: dict[str, Any] = {"model": model, "dtype": dtype, "layout": layout}
        line |= {"rows": num_rows, "prompt": prompt, "own": own}
        case = case_of(MODELS[model], dtype, layout, num_rows, prompt, own)
        found = measure(case, _ROUNDS.value)
        floor = floor_of(case, peaks, prompt)
        for name, its in found.items():
            line |= {f"{name}ms": its}
            line |= {f"{name}times": round(its["alone"]["min"] / its["together"]["min"], 2)}
        results.put(line | {"floor": floor})


def case_of(
    heads: tuple[int, int, int], dtype: str, layout: str, num_rows: int, prompt: int, own: int
) -> Case:
    """Draw rows of own tokens behind one prompt."""
    num_q_heads, num_kv_heads, head_dim = heads
    shared, each = prompt // BLOCK_SIZE, -(-own // BLOCK_SIZE)
    num_blocks = 1 + shared + num_rows * each
    blocks = 1 + np.random.default_rng(0).permutation(num_blocks - 1)
    behind = blocks[shared:].reshape(num_rows, each)
    tables = np.concatenate([np.tile(blocks[:shared], (num_rows, 1)), behind], axis=1)
    pools = [pool_of(layout, dtype, num_blocks, num_kv_heads, head_dim, seed) for seed in range(NUM_LAYERS)]
    q = jax.random.normal(jax.random.key(1), (num_rows, 1, num_q_heads, head_dim), dtype)
    native.why_not_cache(pools[0].layout, jnp.dtype(dtype))  # registers the kernel
    lens = jnp.full(num_rows, shared * BLOCK_SIZE + own, jnp.int32)
    return Case(q, pools, jnp.asarray(tables, jnp.int32), lens)


def pool_of(layout: str, dtype: str, num_blocks: int, num_kv_heads: int, head_dim: int, seed: int) -> Pool:
    pool = layouts.create(LAYOUTS[layout], num_blocks, BLOCK_SIZE, num_kv_heads, head_dim, jnp.dtype(dtype))
    slots = jnp.arange(num_blocks * BLOCK_SIZE, dtype=jnp.int32)
    shape = (len(slots), num_kv_heads, head_dim)
    k, v = (jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(seed)))
    return jax.block_until_ready(ops.write(pool, k, v, slots))


def measure(case: Case, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return milliseconds of a layer, the prompt read by each row and once, in turns: by the clock (""), and
    of all cores ("cpu_").
    """
    ways = {"alone": -1, "together": attention.LEAST_SAVED}
    clocks = {"": time.perf_counter, "cpu_": time.process_time}
    programs = {name: program_of(case, least_saved) for name, least_saved in ways.items()}
    times: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in ways} for clock in clocks}
    answers: dict[str, bytes] = {}
    flushed = np.zeros(FLUSHED_BYTES, np.uint8)
    for turn in range(rounds + 1):
        for pool in case.pools:
            for name, program in programs.items():
                flushed += 1
                starts = {clock: read() for clock, read in clocks.items()}
                out = jax.block_until_ready(program(case.q, pool))
                for clock, start in starts.items():
                    if turn:  # the first one warms up
                        times[clock][name].append(1e3 * (clocks[clock]() - start))
                answers[name] = np.asarray(out).tobytes()
            assert answers["alone"] == answers["together"], "the bits differ"
    return {
        clock: {
            name: {key: record.spread(its)[key] for key in ("min", "median")} for name, its in both.items()
        }
        for clock, both in times.items()
    }


def program_of(case: Case, least_saved: int) -> Callable[[jax.Array, Pool], jax.Array]:
    """Compile a layer's attention."""
    attend = functools.partial(
        native.tiled_paged_attention,
        scale=case.q.shape[-1] ** -0.5,
        window=None,
        chunk=None,
        least_saved=least_saved,
    )

    def run(q: jax.Array, pool: Pool) -> jax.Array:
        return attend(q, pool, case.tables, case.lens - 1, case.lens, None)

    return jax.jit(run).lower(case.q, case.pools[0]).compile()


def floor_of(case: Case, peaks: dict[str, float], prompt: int) -> dict[str, float]:
    """Return the milliseconds that nothing can beat, of either way, and by how much sharing can gain."""
    num_rows, _, num_q_heads, head_dim = case.q.shape
    num_tokens = int(case.lens.sum())
    distinct = num_tokens - (num_rows - 1) * (prompt // BLOCK_SIZE * BLOCK_SIZE)
    sizes = case.pools[0].sizes
    token_bytes = sum(x.nbytes for x in case.pools[0].arrays.values()) / sizes.num_blocks / BLOCK_SIZE
    flops = 2 * num_tokens * num_q_heads * head_dim
    type_of_k = "bfloat16" if token_bytes == 4 * sizes.num_kv_heads * head_dim else "float32"
    arithmetic = (flops / peaks[type_of_k] + flops / peaks["float32"]) / 1e6
    alone, once = (count * token_bytes / peaks["read_gbs"] / 1e6 for count in (num_tokens, distinct))
    most = max(alone, arithmetic) / max(once, arithmetic)
    floor = {"read_alone": alone, "read_once": once, "arithmetic": arithmetic, "most_times": most}
    return {name: round(value, 3) for name, value in floor.items()}


if __name__ == "__main__":
    app.run(main)
