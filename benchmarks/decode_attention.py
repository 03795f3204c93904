"""Decode attention on a GPU: correctness first, then microseconds and share of the read bandwidth.

    python -m benchmarks.decode_attention --out results.jsonl     the grid, until --budget seconds are spent
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

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import decode_peers
from pallas_kernels import ops, support, tuning
from pallas_kernels import paged_attention_v1 as mosaic_v1
from pallas_kernels import paged_attention_v2 as mosaic_v2
from reference import attention

MODELS = {  # query heads, kv heads, head_dim
    "llama-3-8b": (32, 8, 128),
    "llama-70b/8": (8, 1, 128),
    "qwen3-64": (64, 8, 128),
    "mha-32": (32, 32, 128),
}
CONTEXTS: tuple[int | str, ...] = (512, 2048, 8192, 32768, "ragged")
VERSIONS = ("v1", "v2", "dispatched")


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


@dataclasses.dataclass(frozen=True)
class Pool:
    """Blocks of K and V in random content."""

    model: str
    cache_dtype: str
    block_size: int
    k: jax.Array
    v: jax.Array
    scales: dict[str, jax.Array]


def main() -> None:
    """Run as a module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, in the interpreter")
    parser.add_argument("--sweep", action="store_true", help="try configurations instead of the grid")
    parser.add_argument("--budget", type=float, default=420, help="seconds after which no measurement begins")
    parser.add_argument("--out", type=Path, help="append one JSON line per measurement to this file")
    arguments = parser.parse_args()
    setup = SMOKE if arguments.smoke else Setup()
    if not arguments.smoke and ops.default_implementation() != "mosaic_gpu":
        parser.error(f"{jax.devices()[0].device_kind} is not a Hopper GPU; --smoke runs anywhere")
    deadline = time.monotonic() + arguments.budget
    common = conditions()

    def record(line: dict[str, Any]) -> None:
        line = common | line
        shown = {key: value for key, value in line.items() if key not in common}
        print(json.dumps(shown), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for line in check(setup):
        record(line)
    bandwidth = read_bandwidth(setup)
    record({"what": "read bandwidth", "gb_per_s": round(bandwidth / 1e9, 1)})
    work = sweep(setup, bandwidth) if arguments.sweep else grid(setup, bandwidth)
    for line in work:
        record(line)
        if time.monotonic() > deadline:
            record({"what": "stopped", "because": f"the budget of {arguments.budget:.0f} s is spent"})
            break


def conditions() -> dict[str, Any]:
    """What a number means nothing without."""

    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    device = jax.devices()[0]
    query = "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit"
    return {
        "commit": output("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "gpu": output("nvidia-smi", query, "--format=csv,noheader") if device.platform == "gpu" else "",
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def make_pool(setup: Setup, model: str, cache_dtype: str, block_size: int) -> Pool:
    """Blocks to fill setup.pool_bytes, made on the device."""
    _, num_kv_heads, head_dim = MODELS[model]
    dtype = jnp.dtype(cache_dtype)
    num_blocks = setup.pool_bytes // (2 * block_size * num_kv_heads * head_dim * dtype.itemsize)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)

    @jax.jit
    def fill(key: jax.Array) -> jax.Array:  # block by block: the generator's 32-bit numbers would not fit
        def one(_: None, key: jax.Array) -> tuple[None, jax.Array]:
            return None, jax.random.normal(key, shape[1:], jnp.bfloat16).astype(dtype)

        return lax.scan(one, None, jax.random.split(key, num_blocks))[1]

    scales = {}
    if cache_dtype in support.QUANTISED_DTYPES:
        scales = {name: jnp.float32(1) for name in ("k_scale", "v_scale")}
    k, v = fill(jax.random.key(0)), fill(jax.random.key(1))
    return Pool(model, cache_dtype, block_size, k, v, scales)


def lengths(context: int | str, num_seqs: int, capacity: int) -> np.ndarray:
    """Tokens per row; "ragged" draws them log-uniformly from 1/64 of the capacity to all of it."""
    if isinstance(context, int):
        return np.full(num_seqs, context, np.int32)
    drawn = np.exp(np.random.default_rng(0).uniform(np.log(capacity / 64), np.log(capacity), num_seqs))
    return drawn.astype(np.int32)


def tables(pool: Pool, setup: Setup, num_seqs: int, count: int) -> jax.Array:
    """[count, num_seqs, max_blocks] block ids drawn from the whole pool."""
    shape = (count, num_seqs, setup.capacity // pool.block_size)
    return jax.random.randint(jax.random.key(2), shape, 1, pool.k.shape[0], jnp.int32)


def operation_of(version: str, pool: Pool, setup: Setup) -> Callable[..., jax.Array]:
    """The public operation, with the pool's scales."""
    name = "paged_attention" if version == "dispatched" else f"paged_attention_{version}"
    return functools.partial(
        getattr(ops, name), implementation="mosaic_gpu", interpret=setup.interpret, **pool.scales
    )


def check(setup: Setup) -> Iterator[dict[str, Any]]:
    """Each version on this device against the float64 oracle, on a few rows and one group of heads."""
    for model, cache_dtype, block_size in itertools.product(
        setup.models, setup.cache_dtypes, setup.block_sizes
    ):
        small = dataclasses.replace(setup, pool_bytes=min(setup.pool_bytes, 10**8))
        pool = make_pool(small, model, cache_dtype, block_size)
        num_q_heads, num_kv_heads, head_dim = MODELS[model]
        lens = np.array([1, block_size + 1, 0, min(1030, setup.capacity)], np.int32)
        table = tables(pool, setup, len(lens), 1)[0]
        q = jax.random.normal(jax.random.key(3), (len(lens), num_q_heads, head_dim), jnp.bfloat16)
        heads = slice(0, num_q_heads // num_kv_heads)  # the oracle is slow: one group
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


def read_bandwidth(setup: Setup) -> float:
    """Bytes per second of summing up a large buffer."""
    x = jnp.ones((max(1, setup.pool_bytes // 8), 2), jnp.float32)

    @jax.jit
    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(x)

    total(x).block_until_ready()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        total(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return x.nbytes / min(times)


def loop_time(
    operation: Callable[..., jax.Array],
    pool: Pool,
    setup: Setup,
    lens: np.ndarray,
    compiled: dict[tuple[str, int, int], Any],
    name: str = "",
) -> tuple[float, float]:
    """(median, spread) of the seconds of one call; `compiled` keeps loops by name, rows and length."""
    num_q_heads, _, head_dim = MODELS[pool.model]
    num_bytes = kv_bytes(pool, lens)
    # Few different numbers of calls, so that few loops are compiled.
    count = 1 if setup.interpret else 64 if num_bytes < 10**8 else 16 if num_bytes < 10**9 else 4
    q = jax.random.normal(jax.random.key(3), (len(lens), num_q_heads, head_dim), jnp.bfloat16)
    args = (q, pool.k, pool.v, tables(pool, setup, len(lens), count), jnp.asarray(lens))

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


def kv_bytes(pool: Pool, lens: np.ndarray) -> int:
    """What one call has to read."""
    _, num_kv_heads, head_dim = MODELS[pool.model]
    return int(lens.astype(np.int64).sum()) * 2 * num_kv_heads * head_dim * pool.k.dtype.itemsize


def grid(setup: Setup, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Every model, type, block size and batch; the loops are compiled once per batch, for all contexts.

    The first model in bfloat16 with its peers comes first, so that a short budget still tells most.
    """
    for cache_dtype, block_size, model in itertools.product(
        setup.cache_dtypes, setup.block_sizes, setup.models
    ):
        pool = make_pool(setup, model, cache_dtype, block_size)
        with_peers = cache_dtype == "bfloat16" and block_size == 16
        compiled: dict[tuple[str, int, int], Any] = {}
        for num_seqs, context in itertools.product(setup.num_seqs, setup.contexts):
            lens = lengths(context, num_seqs, setup.capacity)
            shape = {"model": model, "cache": cache_dtype, "block_size": block_size}
            shape |= {"num_seqs": num_seqs, "context": context}
            for version in VERSIONS:
                operation = operation_of(version, pool, setup)
                seconds, spread = loop_time(operation, pool, setup, lens, compiled, version)
                yield shape | measured(version, seconds, spread, kv_bytes(pool, lens), bandwidth)
            if with_peers and (
                setup.interpret or (num_seqs, context) in ((1, 32768), (32, 8192), (64, 2048))
            ):
                for peer, peer_seconds, spread, note in decode_peers.measure(pool, lens, setup.repeats):
                    line = {"what": peer, "note": note}
                    if peer_seconds is not None:
                        line |= measured(peer, peer_seconds, spread, kv_bytes(pool, lens), bandwidth)
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
        pool = make_pool(setup, model, cache_dtype, block_size)
        for tile_kv, num_stages in itertools.product(tiles, stages):
            config = tuning.TuningConfig(tile_kv=tile_kv, num_stages=num_stages)
            busy = lengths(
                contexts[-2 if len(contexts) > 1 else 0], setup.num_seqs[len(setup.num_seqs) // 2], 0
            )
            trials: list[tuple[str, Any, np.ndarray]] = [("v1", None, busy)]
            trials += [("v2", size, np.array([contexts[-1]], np.int32)) for size in (256, 512, 1024, 2048)]
            for version, partition_size, lens in trials:
                line = {"model": model, "cache": cache_dtype, "block_size": block_size, "num_seqs": len(lens)}
                line |= {
                    "context": int(lens[0]),
                    "partition_size": partition_size,
                    **dataclasses.asdict(config),
                }
                operation = functools.partial(launch, pool, setup, config, partition_size)
                try:
                    seconds, spread = loop_time(operation, pool, setup, lens, {})
                except (ValueError, NotImplementedError) as error:  # too much shared memory, say
                    yield line | {"what": version, "note": str(error)[:200]}
                    continue
                yield line | measured(version, seconds, spread, kv_bytes(pool, lens), bandwidth)


def launch(
    pool: Pool,
    setup: Setup,
    config: tuning.TuningConfig,
    partition_size: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    lens: jax.Array,
) -> jax.Array:
    """A kernel with a given configuration: v2 if there is a partition size."""
    num_kv_heads, head_dim = MODELS[pool.model][1:]
    scale = jnp.ones(num_kv_heads, jnp.float32) if pool.scales else None
    arrays = support.Arrays(q, k, v, table, lens)
    options = support.Options(scale=head_dim**-0.5, k_scale=scale, v_scale=scale)
    keywords: dict[str, Any] = {"config": config, "interpret": setup.interpret}
    if partition_size is None:
        return mosaic_v1.paged_attention_v1(arrays, options, **keywords)
    return mosaic_v2.paged_attention_v2(arrays, options, partition_size, **keywords)


if __name__ == "__main__":
    main()
