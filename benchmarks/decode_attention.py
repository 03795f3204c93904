"""Decode attention on a GPU: correctness first, then microseconds and the share of what memory can give.

    python -m benchmarks.decode_attention --out results.jsonl     the grid, as far as --budget seconds go
    python -m benchmarks.decode_attention --first                 256 rows of 1,126 tokens, bfloat16 and fp8
    python -m benchmarks.decode_attention --sweep                 tile sizes, stages and partition sizes
    python -m benchmarks.decode_attention --smoke                 everything once, tiny, on a CPU

How it is timed. One pool of blocks per model, larger than any cache on the chip, and many block tables drawn
from it at random, so that no call finds its blocks in the L2. A program is compiled for a number of rows, is
compared with the oracle, and serves all lengths; `us` is what its kernel takes (`benchmarks.device`), the
median over several rounds, with the spread.

Bytes are the K and V of the tokens seen, read once. They are compared with the H200's datasheet and with what
is measured here, a sum over a buffer of the pool's size. Each line of the output is one measurement, with
what it needs to be repeated; `benchmarks.attention_peers` has the peers'.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import attention_pool, device, record
from benchmarks.attention_pool import MODELS, Pool
from pallas_kernels import ops, support
from pallas_kernels.gpu import tuning
from pallas_kernels.gpu.decode import attention as mosaic
from pallas_kernels.gpu.partitioning import Partitioning
from reference import attention

_SMOKE = flags.DEFINE_boolean("smoke", False, "Tiny sizes, in the interpreter.")
_FIRST = flags.DEFINE_boolean("first", False, "256 rows of 1,126 tokens alone, in bfloat16 and in fp8.")
_SWEEP = flags.DEFINE_boolean("sweep", False, "Try configurations instead of the grid.")
_BUDGET = flags.DEFINE_float("budget", 240, "Seconds in which measurements begin.")
_OUT = flags.DEFINE_string("out", None, "Append one JSON line per measurement to this file.")

CONTEXTS: tuple[int | str, ...] = (1126, 512, 2048, 8192, 32768, "ragged")
# Rows cut by their own length, and rows in one piece: what cutting and merging gains or costs.
VERSIONS = {"decode": ops.paged_attention, "v1": ops.paged_attention_v1}
KERNEL = "paged_attention_kernel"


@dataclasses.dataclass(frozen=True)
class Setup:
    """Sizes of one run, which fit the machine."""

    models: tuple[str, ...] = tuple(MODELS)
    num_seqs: tuple[int, ...] = (256, 1, 32, 64, 8, 128)
    contexts: tuple[int | str, ...] = CONTEXTS
    cache_dtypes: tuple[str, ...] = ("bfloat16", "float8_e4m3fn")
    block_sizes: tuple[int, ...] = (16, 64)
    capacity: int = 32768  # tokens a row of a table can hold
    pool_bytes: int = 8 * 10**9  # K and V together
    repeats: int = 7
    versions: tuple[str, ...] = ("decode", "v1")
    interpret: bool = False


FIRST = Setup(  # what decides whether an 8-bit cache is read as fast as memory gives it
    models=("llama-3-8b",),
    num_seqs=(256,),
    contexts=(1126,),
    block_sizes=(16,),
    capacity=2048,
    versions=("decode",),
)
SMOKE = Setup(
    models=("llama-70b/8",),
    num_seqs=(2,),
    contexts=("ragged",),
    cache_dtypes=("bfloat16",),
    block_sizes=(16,),
    capacity=128,
    pool_bytes=2 * 10**6,
    repeats=1,
    versions=("decode",),
    interpret=True,
)


def main(argv: list[str]) -> None:
    """Run as a module."""
    record.start(argv)
    budget = record.Budget(_BUDGET.value)
    setup = SMOKE if _SMOKE.value else FIRST if _FIRST.value else Setup()
    results = record.Results("decode_attention", _OUT.value, short=True, **device.described(setup.interpret))
    bandwidth = device.read_bandwidth(setup.pool_bytes)
    results.put({"what": "read bandwidth", "gb_per_s": round(bandwidth / 1e9, 1)})
    for line in sweep(setup, bandwidth) if _SWEEP.value else grid(setup, bandwidth):
        results.put(line)
        if line.get("ok") is False:
            raise SystemExit(f"the kernel is wrong: {line}")
        if budget.is_spent():
            break


def lengths(context: int | str, num_seqs: int, capacity: int) -> np.ndarray:
    """Return the tokens per row; "ragged" draws them log-uniformly from 1/64 of the capacity to all of it."""
    if isinstance(context, int):
        return np.full(num_seqs, context, np.int32)
    drawn = np.exp(np.random.default_rng(0).uniform(np.log(capacity / 64), np.log(capacity), num_seqs))
    return drawn.astype(np.int32)


def program_of(operation: Callable[..., jax.Array], pool: Pool, setup: Setup, num_seqs: int) -> Any:
    """Compile the operation for a number of rows: (q, k, v, table, lens) -> output."""
    table = jax.ShapeDtypeStruct((num_seqs, setup.capacity // pool.block_size), jnp.int32)
    lens = jax.ShapeDtypeStruct((num_seqs,), jnp.int32)
    return jax.jit(operation).lower(pool.queries(num_seqs), pool.k, pool.v, table, lens).compile()


def check(program: Any, pool: Pool, setup: Setup, num_seqs: int) -> dict[str, Any]:
    """Compare a compiled program on this device with the float64 oracle: a few rows, one group of heads."""
    longest = min(1030, setup.capacity)
    some = np.array([longest, 1, 0, pool.block_size + 1], np.int32)
    lens = np.resize(some, num_seqs)
    table = pool.table(num_seqs, setup.capacity // pool.block_size)
    q, rows, heads = pool.queries(num_seqs), slice(0, len(some)), slice(0, pool.group_size)
    got = np.asarray(program(q, pool.k, pool.v, table, jnp.asarray(lens)), np.float64)[rows, heads]
    few = pool.read(table[rows, : -(-longest // pool.block_size)])
    want = attention.paged_attention(np.asarray(q)[rows, heads], *few, lens[rows])
    return attention_pool.verdict(got, want)


def measure(program: Any, pool: Pool, setup: Setup, lens: np.ndarray, bandwidth: float) -> dict[str, Any]:
    """Time a compiled program for rows of these lengths."""
    num_bytes = pool.bytes_read(lens)
    count = 1 if setup.interpret else max(4, min(64, 10**9 // num_bytes))
    tables = pool.tables(len(lens), setup.capacity // pool.block_size, count)
    q, lens_on_device = pool.queries(len(lens)), jnp.asarray(lens)
    sets = [(q, pool.k, pool.v, table, lens_on_device) for table in tables]
    return measured(device.times(program, sets, setup.repeats, KERNEL), num_bytes, bandwidth)


def measured(found: device.Times, num_bytes: int, bandwidth: float) -> dict[str, Any]:
    """Return the numbers of one measurement."""
    return {
        **found.line,
        "gb_per_s": round(num_bytes / found.median / 1e9, 1),
        **device.peak().share_of_bytes(num_bytes / found.median),
        "share_of_measured_read": round(num_bytes / found.median / bandwidth, 4),
    }


def grid(setup: Setup, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Return every model, type, block size and batch, the most telling ones first."""
    for cache_dtype, block_size, model in itertools.product(
        setup.cache_dtypes, setup.block_sizes, setup.models
    ):
        pool = attention_pool.create(model, cache_dtype, block_size, setup.pool_bytes)
        for num_seqs in setup.num_seqs:
            shape = {"model": model, "cache": cache_dtype, "block_size": block_size, "num_seqs": num_seqs}
            programs = {}
            for version in setup.versions:
                operation = VERSIONS[version]
                options: dict[str, Any] = {
                    "implementation": "mosaic_gpu",
                    "interpret": setup.interpret,
                    **pool.scales,
                }
                program = program_of(functools.partial(operation, **options), pool, setup, num_seqs)
                programs[version] = program
                found = check(program, pool, setup, num_seqs)
                yield shape | {"what": version, "check": "against the oracle"} | found
            for context, (version, program) in itertools.product(setup.contexts, programs.items()):
                lens = lengths(context, num_seqs, setup.capacity)
                found = measure(program, pool, setup, lens, bandwidth)
                yield shape | {"context": context, "what": version} | found


def sweep(setup: Setup, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Time every configuration that fits, on a batch that fills the GPU and on one long row."""
    tiles: tuple[int, ...] = (64,) if setup.interpret else (64, 128)
    stages: tuple[int, ...] = (2,) if setup.interpret else (2, 3, 4, 6)
    busy = lengths(min(8192, setup.capacity), 2 if setup.interpret else 64, 0)
    long = np.array([setup.capacity], np.int32)
    for cache_dtype, block_size, model in itertools.product(
        setup.cache_dtypes, setup.block_sizes, setup.models
    ):
        pool = attention_pool.create(model, cache_dtype, block_size, setup.pool_bytes)
        for tile_kv, num_stages in itertools.product(tiles, stages):
            config = tuning.TuningConfig(tile_kv=tile_kv, num_stages=num_stages)
            partitionings = [Partitioning(tokens, most) for tokens in (128, 256, 512) for most in (32, 64)]
            trials = [
                (Partitioning(setup.capacity, 1), busy),
                *((partitioning, lens) for partitioning in partitionings for lens in (busy, long)),
            ]
            for partitioning, lens in trials:
                line = {"model": model, "cache": cache_dtype, "block_size": block_size, "num_seqs": len(lens)}
                line |= {
                    "context": int(lens[0]),
                    "what": "decode",
                    "partitioning": partitioning,
                    **dataclasses.asdict(config),
                }
                operation = functools.partial(launch, pool, setup, config, partitioning)
                try:
                    program = program_of(operation, pool, setup, len(lens))
                    yield line | measure(program, pool, setup, lens, bandwidth)
                except (ValueError, NotImplementedError) as error:  # too much shared memory, say
                    yield line | {"note": str(error)[:200]}


def launch(
    pool: Pool,
    setup: Setup,
    config: tuning.TuningConfig,
    partitioning: Partitioning,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    lens: jax.Array,
) -> jax.Array:
    """Call the kernel with a given configuration and partitioning."""
    num_kv_heads, head_dim = MODELS[pool.model][1:]
    scale = jnp.ones(num_kv_heads, jnp.float32) if pool.scales else None
    arrays = support.Arrays(q, k, v, table, lens)
    options = support.Options(scale=head_dim**-0.5, k_scale=scale, v_scale=scale)
    return mosaic.paged_attention(
        arrays, options, partitioning=partitioning, config=config, interpret=setup.interpret
    )


if __name__ == "__main__":
    app.run(main)
