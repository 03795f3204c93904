"""Costs of each layout of the registry, by block size: `python -m benchmarks.layouts`.

    python -m benchmarks.layouts [--layouts fused,int8_per_token] [--block_sizes 16,64] [--draw FOLDER]
                                 [--out FILE] [--table PREFIX]
    python -m benchmarks.layouts --layouts fused,my_module:Mine  one's own beside a built-in one
    python -m benchmarks.layouts --smoke                         tiny sizes, once

K and V of SmolLM2's shape, 16 sequences of 2,048 tokens. A JSON line for each layout and block size that it
has: bytes a token, the share of places that the ragged workload leaves empty in partly filled blocks,
microseconds (the least and the median of the repeats) to write a step's tokens, to copy a block, to swap a
sequence of 512 tokens to the host and back, each through all layers, and to attend with a query a sequence;
`gbs` of K and V read in this, and what share that is of the machine's read bandwidth. `attention` says which
code attends. `error` is that of K and V that are read, relative; `kernels` says which implementations read
the layout. --draw makes layouts.png and .svg. --table writes PREFIX.csv, .md and .tex, of the last block size
that each layout has: its `tokens_per_s` are those for which attention alone would have time.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax

from benchmarks import paper, record, workloads
from benchmarks.peaks import read_gbs
from jaxpaged.arithmetic import cdiv
from jaxpaged.memory import kv_cache
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from pallas_kernels import layouts, native, ops, support
from pallas_kernels.layouts import LAYOUTS, Layout
from pallas_kernels.ops import choice

_LAYOUTS = flags.DEFINE_list(
    "layouts", None, "Of the registry, or module:Name; default: all of the registry."
)
_BLOCK_SIZES = flags.DEFINE_list("block_sizes", ["1", "8", "16", "32", "64", "128"], "Tokens.")
_DTYPE = flags.DEFINE_string("dtype", None, "Of the computation; default: bfloat16.")
_REPEATS = flags.DEFINE_integer("repeats", 10, "Of each measurement.", lower_bound=1)
_SMOKE = flags.DEFINE_boolean("smoke", False, "Tiny sizes, two repeats.")
_DRAW = flags.DEFINE_string("draw", None, "A folder for layouts.png and layouts.svg; needs matplotlib.")
_OUT = flags.DEFINE_string("out", None, "Append the lines to this file as well.")
_TABLE = flags.DEFINE_string("table", None, "Beginning of the names of three files with a table.")

NUM_LAYERS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
NUM_SEQS, NUM_TOKENS, SWAPPED_TOKENS = 16, 2048, 512
FILLED_AT_ONCE = 512  # tokens


def main(argv: list[str]) -> None:
    """Measure, print the lines, and draw them."""
    record.start(argv)
    bandwidth = read_gbs()
    results = record.Results("layouts", _OUT.value, device=jax.devices()[0].device_kind)
    dtype = jnp.dtype(_DTYPE.value or "bfloat16")
    lines = []
    for name in _LAYOUTS.value or LAYOUTS:
        layout = layouts.choose(name)
        for block_size in map(int, _BLOCK_SIZES.value):
            if layout.why_not(block_size, HEAD_DIM, dtype) is not None:
                continue
            line = {"layout": name, "block_size": block_size, "dtype": str(dtype)}
            line |= measure(layout, block_size, dtype, bandwidth)
            lines.append(line)
            results.put(line)
    if _DRAW.value:
        draw(lines, Path(_DRAW.value))
    if _TABLE.value:
        paper.write(_TABLE.value, [*{line["layout"]: line for line in lines}.values()])


def measure(layout: Layout, block_size: int, dtype: jnp.dtype, bandwidth: float) -> dict[str, Any]:
    """Return a result line's numbers."""
    num_layers, num_tokens = (2, 2 * FILLED_AT_ONCE) if _SMOKE.value else (NUM_LAYERS, NUM_TOKENS)
    swapped = min(SWAPPED_TOKENS, num_tokens)
    width, host_blocks = cdiv(num_tokens, block_size), 1 + cdiv(swapped, block_size)
    shape = NUM_KV_HEADS, HEAD_DIM
    create = functools.partial(kv_cache.create, num_layers)
    cache = create(1 + NUM_SEQS * width, block_size, *shape, dtype, layout)
    blocks = 1 + np.random.default_rng(0).permutation(NUM_SEQS * width).reshape(NUM_SEQS, width)
    tables = jnp.asarray(blocks, jnp.int32)
    implementation = choice.default_tiled_implementation(dtype, 1)
    if implementation == "native" and native.why_not_layout(layout, dtype):
        implementation = "xla"
    served = support.SUPPORT["mosaic_gpu"]
    if implementation == "mosaic_gpu" and not (
        served.serves(layout) and block_size in (served.block_sizes_of(layout) or ())
    ):
        implementation = "xla"

    cache = jax.jit(functools.partial(fill, block_size=block_size), donate_argnums=0)(cache, tables)
    times = {}
    last = tables[:, -1] * block_size + block_size - 1
    cache, times["write"] = timed(write_step, cache, last)
    pairs = tables[:1, 0], tables[1:2, 0]
    cache, times["copy"] = timed(kv_cache.copy_within, cache, *pairs)
    host = create(host_blocks, block_size, *shape, dtype, layout)
    host = jax.device_put(host, jax.memory.Space.Host)
    device_blocks = tables[0, : host_blocks - 1]
    (cache, host), times["swap"] = timed(swap_both_ways, (cache, host), device_blocks)

    seq_lens = jnp.full(NUM_SEQS, num_tokens, jnp.int32)
    batch = PassBatch(jnp.zeros(NUM_SEQS, jnp.int32), tables, seq_lens - 1, seq_lens, implementation)
    q = jax.random.normal(jax.random.key(1), (NUM_SEQS, NUM_Q_HEADS, HEAD_DIM), dtype)
    _, times["attend"] = timed(attend_step, cache, q, batch, donates=False)
    bytes_per_token = num_layers * layout.block_bytes(block_size, *shape, dtype) / block_size
    read = NUM_SEQS * num_tokens * bytes_per_token / times["attend"]["min"] / 1e3
    lens = [len(r["prompt_token_ids"]) + r["max_tokens"] for r in workloads.ragged64()["requests"]]
    places = sum(cdiv(n, block_size) for n in lens) * block_size
    return {
        "bytes_per_token": round(bytes_per_token * NUM_LAYERS / num_layers),
        "error": float(f"{paper.error(layout, block_size, *shape, dtype):.3g}"),
        "waste": round(1 - sum(lens) / places, 4),
        "us": times,
        "attention": implementation,
        "gbs": round(read, 1),
        "of_bandwidth": round(read / bandwidth, 3),
        "tokens_per_s": round(NUM_SEQS / times["attend"]["min"] * 1e6 * num_layers / NUM_LAYERS, 1),
        "kernels": paper.kernels(layout, block_size, HEAD_DIM, dtype),
    }


def timed(
    operation: Callable[..., Any], state: Any, *arguments: Any, donates: bool = True
) -> tuple[Any, dict[str, float]]:
    """Return the state after some calls, and their microseconds."""
    program = jax.jit(operation, donate_argnums=0 if donates else ())
    microseconds = []
    for repeat in range(4 if _SMOKE.value else 2 + _REPEATS.value):
        start = time.perf_counter()
        result = jax.block_until_ready(program(state, *arguments))
        if donates:
            state = result
        if repeat > 1:  # the first one compiles, and the next if it gets arrays in another memory
            microseconds.append(1e6 * (time.perf_counter() - start))
    spread = record.spread(microseconds, digits=1)
    return state, {"min": spread["min"], "median": spread["median"]}


def fill(cache: KVCache, tables: jax.Array, *, block_size: int) -> KVCache:
    """Write normal values to all slots of the tables' blocks."""
    slots = (tables[:, :, None] * block_size + jnp.arange(block_size)).reshape(-1, FILLED_AT_ONCE)
    shape = (2, FILLED_AT_ONCE, cache.num_kv_heads, cache.head_dim)

    def of_layer(layer: jax.Array, cache: KVCache) -> KVCache:
        def some(i: jax.Array, cache: KVCache) -> KVCache:
            k, v = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), shape, cache.dtype)
            return kv_cache.write(cache, layer, k, v, slots[i])

        return lax.fori_loop(0, slots.shape[0], some, cache)

    return lax.fori_loop(0, cache.num_layers, of_layer, cache)


def write_step(cache: KVCache, slots: jax.Array) -> KVCache:
    """Write a token of each sequence, in all layers."""
    k = v = jnp.ones((slots.shape[0], cache.num_kv_heads, cache.head_dim), cache.dtype)
    return lax.fori_loop(
        0, cache.num_layers, lambda layer, cache: kv_cache.write(cache, layer, k, v, slots), cache
    )


def swap_both_ways(caches: tuple[KVCache, KVCache], blocks: jax.Array) -> tuple[KVCache, KVCache]:
    """Swap to the host, and back to the same blocks."""
    cache, host = caches
    places = 1 + jnp.arange(blocks.shape[0], dtype=jnp.int32)
    host = kv_cache.copy_blocks(cache, host, blocks, places)
    return kv_cache.copy_blocks(host, cache, places, blocks), host


def attend_step(cache: KVCache, q: jax.Array, batch: PassBatch) -> jax.Array:
    """Compute attention in all layers, each with the queries that the one before gives; nothing is kept."""

    implementation = batch.implementation
    assert isinstance(implementation, str)

    def of_layer(layer: jax.Array, q: jax.Array) -> jax.Array:
        return ops.tiled_paged_attention(
            q[:, None],
            cache.pool(layer),
            None,
            batch.block_tables,
            batch.query_starts,
            batch.seq_lens,
            scale=HEAD_DIM**-0.5,
            implementation=implementation,
        )[:, 0]

    return lax.fori_loop(0, cache.num_layers, of_layer, q)


def draw(lines: list[dict[str, Any]], folder: Path) -> None:
    """Draw a line for each layout over block sizes, a panel for each number."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    panels: dict[str, Callable[[dict[str, Any]], float]] = {
        "bytes a token": lambda line: line["bytes_per_token"],
        "share of places left empty": lambda line: line["waste"],
        "us to write a step's tokens": lambda line: line["us"]["write"]["median"],
        "us to copy a block": lambda line: line["us"]["copy"]["median"],
        "us to swap 512 tokens out and in": lambda line: line["us"]["swap"]["median"],
        "attention, share of read bandwidth": lambda line: line["of_bandwidth"],
    }
    figure = Figure(figsize=(15, 8), layout="constrained")
    for axes, (title, number) in zip(figure.subplots(2, 3).flat, panels.items(), strict=True):
        for name in dict.fromkeys(line["layout"] for line in lines):
            its = [line for line in lines if line["layout"] == name]
            axes.plot([line["block_size"] for line in its], list(map(number, its)), marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens a block")
        axes.set_title(title)
        axes.set_ylim(bottom=0)
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("png", "svg"):
        figure.savefig(folder / f"layouts.{kind}", dpi=150)


if __name__ == "__main__":
    app.run(main)
