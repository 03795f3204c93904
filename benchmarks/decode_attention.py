"""Decode attention on a GPU: correctness first, then microseconds and share of the read bandwidth.

    python -m benchmarks.decode_attention --out results.jsonl     the grid, as far as --budget seconds go
    python -m benchmarks.decode_attention --sweep                 tile sizes, stages and partition sizes
    python -m benchmarks.decode_attention --smoke                 everything once, tiny, on a CPU

How it is timed. One pool of blocks per model, larger than any cache on the chip, and many block tables
drawn from it at random; one jitted loop runs the operation over the tables, each call's query being the
call before's output. So calls follow one another on the device, none finds its blocks in the L2, and
launching is paid once per loop. The time of a call is the loop's, divided; the median of several loops,
with the spread.

Bytes are the K and V of the tokens seen, read once. The read bandwidth they are compared with is measured
here, as a sum over a buffer of the pool's size. Each line of the output is one measurement, with what it
needs to be repeated.
"""

import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax

from benchmarks import decode_peers, decode_pool, record
from benchmarks.decode_pool import MODELS, Pool
from pallas_kernels import ops, support, tuning
from pallas_kernels import paged_attention as mosaic
from reference import attention

_SMOKE = flags.DEFINE_boolean("smoke", False, "Tiny sizes, in the interpreter.")
_SWEEP = flags.DEFINE_boolean("sweep", False, "Try configurations instead of the grid.")
_BUDGET = flags.DEFINE_float("budget", 420, "Seconds after the checks in which measurements begin.")
_OUT = flags.DEFINE_string("out", None, "Append one JSON line per measurement to this file.")

CONTEXTS: tuple[int | str, ...] = (512, 2048, 8192, 32768, "ragged")
# Rows cut by their own length, and rows in one piece: what cutting and merging gains or costs.
VERSIONS = {"decode": ops.paged_attention, "v1": ops.paged_attention_v1}


@dataclasses.dataclass(frozen=True)
class Setup:
    """What one run does: sizes that fit the machine."""

    models: tuple[str, ...] = tuple(MODELS)
    num_seqs: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    contexts: tuple[int | str, ...] = CONTEXTS
    cache_dtypes: tuple[str, ...] = ("bfloat16", "float8_e4m3fn")
    block_sizes: tuple[int, ...] = (16, 64)
    capacity: int = 32768  # tokens a row of a table can hold
    pool_bytes: int = 8 * 10**9  # K and V together
    repeats: int = 7
    interpret: bool = False


SMOKE = Setup(
    models=("llama-70b/8",),
    num_seqs=(1, 2),
    contexts=(48, "ragged"),
    block_sizes=(16,),
    capacity=128,
    pool_bytes=2 * 10**6,
    repeats=2,
    interpret=True,
)


def main(argv: list[str]) -> None:
    """Run as a module."""
    record.start(argv)
    setup = SMOKE if _SMOKE.value else Setup()
    device = jax.devices()[0]
    if not setup.interpret and ops.default_implementation() != "mosaic_gpu":
        raise app.UsageError(f"{device.device_kind} is not a Hopper GPU; --smoke runs anywhere")
    context = record.context("benchmarks.decode_attention")
    context |= {"device": device.device_kind, "gpu": record.gpu()}

    def put(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        record.append(context | line, _OUT.value)

    for line in check(setup):
        put(line)
    bandwidth = decode_pool.read_bandwidth(setup.pool_bytes)
    put({"what": "read bandwidth", "gb_per_s": round(bandwidth / 1e9, 1)})
    deadline = time.monotonic() + _BUDGET.value
    for line in sweep(setup, bandwidth) if _SWEEP.value else grid(setup, bandwidth):
        put(line)
        if time.monotonic() > deadline:
            put({"what": "stopped", "because": f"the budget of {_BUDGET.value:.0f} s is spent"})
            break


def lengths(context: int | str, num_seqs: int, capacity: int) -> np.ndarray:
    """Tokens per row; "ragged" draws them log-uniformly from 1/64 of the capacity to all of it."""
    if isinstance(context, int):
        return np.full(num_seqs, context, np.int32)
    drawn = np.exp(np.random.default_rng(0).uniform(np.log(capacity / 64), np.log(capacity), num_seqs))
    return drawn.astype(np.int32)


def operation_of(version: str, pool: Pool, setup: Setup) -> Callable[..., jax.Array]:
    """The public operation, with the pool's scales."""
    operation: Callable[..., jax.Array] = VERSIONS[version]
    return functools.partial(operation, implementation="mosaic_gpu", interpret=setup.interpret, **pool.scales)


def check(setup: Setup) -> Iterator[dict[str, Any]]:
    """Each version on this device against the float64 oracle, on a few rows and one group of heads."""
    for model, cache_dtype, block_size in itertools.product(
        setup.models, setup.cache_dtypes, setup.block_sizes
    ):
        pool = decode_pool.create(model, cache_dtype, block_size, min(setup.pool_bytes, 10**8))
        lens = np.array([1, block_size + 1, 0, min(1030, setup.capacity)], np.int32)
        table = pool.tables(len(lens), setup.capacity // block_size, 1)[0]
        q = pool.queries(len(lens))
        heads = slice(0, pool.group_size)  # the oracle is slow: one group
        want = attention.paged_attention(
            np.asarray(q)[:, heads],
            np.asarray(pool.k[:, :, :1]),
            np.asarray(pool.v[:, :, :1]),
            np.asarray(table),
            lens,
        )
        for version in VERSIONS:
            got = jax.jit(operation_of(version, pool, setup))(q, pool.k, pool.v, table, jnp.asarray(lens))
            error = float(np.abs(np.asarray(got, np.float64)[:, heads] - want).max())
            # The rounding of the weights and of the output to bfloat16, for values of up to five or so.
            ok = error < 2 * 2.0**-8 * 5
            line = {"what": "check", "model": model, "cache": cache_dtype, "block_size": block_size}
            yield line | {"version": version, "max_error": round(error, 5), "ok": ok}
            if not ok:
                raise SystemExit(f"{version} is wrong: {error=} for {line}")


def loop_time(
    operation: Callable[..., jax.Array],
    pool: Pool,
    setup: Setup,
    lens: np.ndarray,
    compiled: dict[tuple[str, int, int], Any],
    name: str = "",
) -> tuple[float, float]:
    """(median, spread) of the seconds of one call; `compiled` keeps loops by name, rows and length."""
    num_bytes = pool.bytes_read(lens)
    # Few different numbers of calls, so that few loops are compiled.
    count = 1 if setup.interpret else 64 if num_bytes < 10**8 else 16 if num_bytes < 10**9 else 4
    tables = pool.tables(len(lens), setup.capacity // pool.block_size, count)
    args = (pool.queries(len(lens)), pool.k, pool.v, tables, jnp.asarray(lens))

    def loop(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, lens: jax.Array) -> jax.Array:
        def step(q: jax.Array, table: jax.Array) -> tuple[jax.Array, None]:
            return operation(q, k, v, table, lens), None

        return lax.scan(step, q, tables)[0]

    key = (name, len(lens), count)
    if key not in compiled:
        compiled[key] = jax.jit(loop).lower(*args).compile()
    run = compiled[key]
    run(*args).block_until_ready()
    times = []
    for _ in range(setup.repeats):
        start = time.perf_counter()
        run(*args).block_until_ready()
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times), max(times) - min(times)


def grid(setup: Setup, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Every model, type, block size and batch; the loops are compiled once per batch, for all contexts.

    The first model in bfloat16 with its peers comes first, so that a short budget still tells most.
    """
    for cache_dtype, block_size, model in itertools.product(
        setup.cache_dtypes, setup.block_sizes, setup.models
    ):
        pool = decode_pool.create(model, cache_dtype, block_size, setup.pool_bytes)
        with_peers = cache_dtype == "bfloat16" and block_size == 16
        compiled: dict[tuple[str, int, int], Any] = {}
        for num_seqs, context in itertools.product(setup.num_seqs, setup.contexts):
            lens = lengths(context, num_seqs, setup.capacity)
            shape = {"model": model, "cache": cache_dtype, "block_size": block_size}
            shape |= {"num_seqs": num_seqs, "context": context}
            for version in VERSIONS:
                operation = operation_of(version, pool, setup)
                seconds, spread = loop_time(operation, pool, setup, lens, compiled, version)
                yield shape | measured(version, seconds, spread, pool.bytes_read(lens), bandwidth)
            if with_peers and (
                setup.interpret or (num_seqs, context) in ((1, 32768), (32, 8192), (64, 2048))
            ):
                for peer, peer_seconds, spread, note in decode_peers.measure(pool, lens, setup.repeats):
                    line = {"what": peer, "note": note}
                    if peer_seconds is not None:
                        line |= measured(peer, peer_seconds, spread, pool.bytes_read(lens), bandwidth)
                    yield shape | line


def measured(what: str, seconds: float, spread: float, num_bytes: int, bandwidth: float) -> dict[str, Any]:
    """The numbers of one measurement."""
    return {
        "what": what,
        "us": round(seconds * 1e6, 2),
        "spread_us": round(spread * 1e6, 2),
        "gb_per_s": round(num_bytes / seconds / 1e9, 1),
        "share_of_read_bandwidth": round(num_bytes / seconds / bandwidth, 4),
    }


def sweep(setup: Setup, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Every configuration that fits, on a batch that fills the GPU and on one long row."""
    tiles: tuple[int, ...] = (64,) if setup.interpret else (64, 128)
    stages: tuple[int, ...] = (2,) if setup.interpret else (2, 3, 4, 6)
    contexts = [c for c in setup.contexts if isinstance(c, int)]
    for cache_dtype, block_size, model in itertools.product(
        setup.cache_dtypes, setup.block_sizes, setup.models
    ):
        pool = decode_pool.create(model, cache_dtype, block_size, setup.pool_bytes)
        for tile_kv, num_stages in itertools.product(tiles, stages):
            config = tuning.TuningConfig(tile_kv=tile_kv, num_stages=num_stages)
            busy = lengths(
                contexts[-2 if len(contexts) > 1 else 0], setup.num_seqs[len(setup.num_seqs) // 2], 0
            )
            long = np.array([contexts[-1]], np.int32)
            cuts = [mosaic.Cut(tokens, most) for tokens in (128, 256, 512) for most in (32, 64)]
            trials = [
                (mosaic.Cut(setup.capacity, 1), busy),
                *((cut, lens) for cut in cuts for lens in (busy, long)),
            ]
            for cut, lens in trials:
                line = {"model": model, "cache": cache_dtype, "block_size": block_size, "num_seqs": len(lens)}
                line |= {
                    "context": int(lens[0]),
                    "cut": cut,
                    **dataclasses.asdict(config),
                }
                operation = functools.partial(launch, pool, setup, config, cut)
                try:
                    seconds, spread = loop_time(operation, pool, setup, lens, {})
                except (ValueError, NotImplementedError) as error:  # too much shared memory, say
                    yield line | {"what": "decode", "note": str(error)[:200]}
                    continue
                yield line | measured("decode", seconds, spread, pool.bytes_read(lens), bandwidth)


def launch(
    pool: Pool,
    setup: Setup,
    config: tuning.TuningConfig,
    cut: mosaic.Cut,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    lens: jax.Array,
) -> jax.Array:
    """The kernel with a given configuration and cut."""
    num_kv_heads, head_dim = MODELS[pool.model][1:]
    scale = jnp.ones(num_kv_heads, jnp.float32) if pool.scales else None
    arrays = support.Arrays(q, k, v, table, lens)
    options = support.Options(scale=head_dim**-0.5, k_scale=scale, v_scale=scale)
    return mosaic.paged_attention(arrays, options, cut=cut, config=config, interpret=setup.interpret)


if __name__ == "__main__":
    app.run(main)
