"""The kernels on this machine's GPU, compiled, against the NumPy oracle: right, and the same every time.

    python -m benchmarks.check_kernels [--out FILE]         on an NVIDIA GPU
    python -m benchmarks.check_kernels --kernel prompts     one of the kernels
    python -m benchmarks.check_kernels --case group_3       one case, by its name; may be given several times
    python -m benchmarks.check_kernels --smoke              a few of the cases, interpreted, on a CPU

JSON lines on stdout, one a case and version of the kernel: the error that is largest beside what is allowed
there, and whether more runs gave the same bits. It fails if one is wrong or moves, and at once where JAX uses
no NVIDIA GPU since Ampere. Rows, tables and pools are padded, so that cases that differ in lengths alone
share a compiled program. It needs jax, numpy, jaxtyping and absl-py; the cases are those of the tests.
"""

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import device, record
from jaxpaged.research.verify.cases import tiles
from jaxpaged.research.verify.cases.decode import DecodeCase, case
from pallas_kernels import ops
from pallas_kernels.gpu.decode import attention as paged_attention
from tests.kernels import checks

KERNELS = ["decode", "prompts", "products"]
_SMOKE = flags.DEFINE_boolean("smoke", False, "A few cases, in the interpreter.")
_KERNEL = flags.DEFINE_multi_enum("kernel", KERNELS, KERNELS, "Of which kernel: may be given several times.")
_CASE = flags.DEFINE_multi_string("case", [], "A case by its name: only it, of any kernel named.")
_OUT = flags.DEFINE_string("out", None, "Append one JSON line per case and version to this file.")

CASES = (
    "one_token", "around_a_block", "around_a_tile", "shared_prefix", "only_padding", "partition_edges",
    "thousands", "mqa", "float16", "head_major", "window_1", "window_over_tiles", "sinks", "all_at_once",
    "group_3", "group_16", "head_dim_80", "head_dim_112", "head_dim_192", "head_dim_256", "block_size_8",
    "block_size_256", "float8_e4m3fn_per_head", "float8_e5m2_per_tensor", "int8_per_head", "int8_per_tensor",
    "sparse_nothing", "sparse_slide_q", "sparse_slide_kv",
)  # fmt: skip
IN_PARTITIONS = (
    "partition_edges",
    "thousands",
    "head_dim_192",
    "int8_per_head",
)  # of a given size, too: "v2"
SMOKE = ("head_major",)
PRODUCTS = (  # rows, inputs, outputs, dtype
    (9, 512, 128, "bfloat16"),
    (20, 200, 200, "float16"),
    (1, 64, 64, "bfloat16"),
    (64, 4096, 4096, "bfloat16"),
    (300, 576, 960, "bfloat16"),
    (512, 1024, 28672, "bfloat16"),
    (256, 14336, 256, "bfloat16"),
)
NUM_LAYERS = 2  # of a stack of weights
NUM_RUNS = 4  # of each program: a result that moves is a race
ROWS, TABLE_COLUMNS, BLOCKS = 5, 16, 64  # sizes are padded to multiples of these


def main(argv: list[str]) -> None:
    """Run as a module."""
    record.start(argv)
    results = record.Results("check_kernels", _OUT.value, short=True, **device.described(_SMOKE.value))
    num_wrong = 0
    try:
        names, of_tiles, products = chosen(_KERNEL.value, _CASE.value, smoke=_SMOKE.value)
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    lines = [
        check(names, interpret=_SMOKE.value),
        check_tiles(of_tiles, interpret=_SMOKE.value),
        check_products(products, interpret=_SMOKE.value),
    ]
    for line in itertools.chain(*lines):
        results.put(line)
        num_wrong += not line.get("ok", True)
    if num_wrong:
        sys.exit(f"{num_wrong} of the lines above are not ok")


def chosen(
    kernels: Sequence[str], only: Sequence[str], *, smoke: bool = False
) -> tuple[list[str], list[tiles.TileCase], list[tuple[int, int, int, str]]]:
    """Return the cases of these kernels: decode steps, tiles and products; with `only`, those of these names.

    Raises ValueError for a name that no case of these kernels has.
    """
    decode = [*CASES] if "decode" in kernels else []
    of_tiles = [c for c in tiles.CASES if kernel_of(c) in kernels]
    products = [*PRODUCTS] if "products" in kernels else []
    known = {*decode, *(c.name for c in of_tiles), *map(product_name, products)}
    if unknown := sorted(set(only) - known):
        raise ValueError(f"case={unknown} must be among {sorted(known)}")
    if only:
        decode = [name for name in decode if name in only]
        of_tiles = [c for c in of_tiles if c.name in only]
        products = [sizes for sizes in products if product_name(sizes) in only]
    elif smoke:
        decode = [name for name in decode if name in SMOKE]
        of_tiles = [c for c in of_tiles if c is tiles.CASES[0]]
        products = products[:1]
    return decode, of_tiles, products


def product_name(sizes: tuple[int, int, int, str]) -> str:
    """Return the name of a product's case: rows, inputs, outputs and type."""
    return "x".join(map(str, sizes))


def check(names: Sequence[str], *, interpret: bool) -> Iterator[dict[str, Any]]:
    """Return a line for each case and version."""
    for name in names:
        for version in checks.PROGRAMS:
            if version == "v1" or (version == "v2" and name not in IN_PARTITIONS):
                continue  # "decode" with nothing to merge, or with other partitions
            line: dict[str, Any] = {"case": name, "version": version}
            try:
                yield line | compare(case(name), version, interpret)
            except Exception as error:  # of the compiler, say: the other cases are of interest still
                yield line | failure(error)


def failure(error: Exception) -> dict[str, Any]:
    """Return a line's entries about a case that raised: what this GPU is not served is skipped."""
    if isinstance(error, NotImplementedError) and " does not serve " in str(error):
        return {"skipped": str(error)[:300]}
    return {"ok": False, "raised": f"{type(error).__name__}: {str(error)[:300]}"}


def kernel_of(c: tiles.TileCase) -> str:
    """Return the kernel that takes tiles like these."""
    few = paged_attention.serves(c.tile_len, c.num_q_heads // c.num_kv_heads, c.head_dim)
    return "decode" if few else "prompts"


def check_tiles(cases: list[tiles.TileCase], *, interpret: bool) -> Iterator[dict[str, Any]]:
    """Return a line for each case of tiles of several tokens: prompts, and a few tokens a row."""
    for c in cases:
        line: dict[str, Any] = {"case": c.name, "version": f"tiles of {c.tile_len}"}
        try:
            yield line | compare_tiles(c, interpret)
        except Exception as error:
            yield line | failure(error)


def check_products(
    cases: Sequence[tuple[int, int, int, str]], *, interpret: bool
) -> Iterator[dict[str, Any]]:
    """Return a line for each product with a layer's weights."""
    for sizes in cases:
        line: dict[str, Any] = {"case": product_name(sizes), "version": "product"}
        try:
            yield line | compare_products(*sizes, interpret=interpret)
        except Exception as error:
            yield line | failure(error)


def compare_products(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: str, *, interpret: bool
) -> dict[str, Any]:
    """Compare products with the oracle. Bits must also be the same for rows alone and among fewer others."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_rows, num_inputs), np.float32).astype(jnp.dtype(dtype))
    weights = rng.standard_normal((NUM_LAYERS, num_inputs, num_outputs), np.float32).astype(x.dtype)
    stack, layer = jnp.asarray(weights), jnp.int32(NUM_LAYERS - 1)
    run = jax.jit(functools.partial(ops.product, implementation="mosaic_gpu", interpret=interpret))
    first, *others = (np.asarray(run(x, stack, layer)) for _ in range(1 if interpret else NUM_RUNS))
    for its in {slice(num_rows - 1, num_rows), slice(0, num_rows // 2 + 1)} if not interpret else ():
        others.append(first.copy())
        others[-1][its] = run(x[its], stack, layer)
    wide, its_weights = x.astype(np.float32), weights[-1].astype(np.float32)
    error = np.abs(first - wide @ its_weights) / (np.abs(wide) @ np.abs(its_weights))
    same_bits = all(np.array_equal(first, other) for other in others)
    # A tensor core cuts each of up to 896 sums of 16 terms to 24 bits or a few less.
    allowed = 1e-5
    return {
        "ok": same_bits and float(error.max()) <= allowed,
        "error": float(f"{error.max():.3g}"),
        "allowed": allowed,
        "same_bits": same_bits,
    }


def compare_tiles(c: tiles.TileCase, interpret: bool) -> dict[str, Any]:
    """Compare attention of tiles with the oracle, as `compare` does for decode steps."""
    (q, k, v, tables, seq_lens), starts, _ = tiles.inputs(c)
    arrays = [jnp.asarray(array) for array in (q, k, v, tables, starts, seq_lens)]
    program = functools.partial(
        checks.TILES, *arrays, **c.options, implementation="mosaic_gpu", interpret=interpret
    )
    runs = [np.asarray(program(), np.float64) for _ in range(1 if interpret else NUM_RUNS)]
    error, allowed, _ = checks.worst(c, runs[0])
    same_bits = all(np.array_equal(runs[0], run, equal_nan=True) for run in runs)
    return {
        "ok": same_bits and error <= allowed,
        "error": float(f"{error:.3g}"),
        "allowed": float(f"{allowed:.3g}"),
        "same_bits": same_bits,
    }


def compare(c: DecodeCase, version: str, interpret: bool) -> dict[str, Any]:
    """Run a case, more than once on a device, and compare it with the oracle and with itself."""
    named, options = checks.inputs(c, version)
    arrays = padded(**named)
    program = functools.partial(checks.PROGRAMS[version], **options, implementation="mosaic_gpu")
    num_runs = 1 if interpret else NUM_RUNS
    first, *others = (np.asarray(program(**arrays, interpret=interpret), np.float64) for _ in range(num_runs))
    num_rows = len(c.seq_lens)
    error, allowed, _ = checks.worst(c, first[:num_rows])
    same_bits = all(np.array_equal(first, other, equal_nan=True) for other in others)
    return {
        "ok": same_bits and error <= allowed and not first[num_rows:].any(),
        "error": float(f"{error:.3g}"),
        "allowed": float(f"{allowed:.3g}"),
        "same_bits": same_bits,
    }


def padded(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, block_tables: jax.Array, seq_lens: jax.Array
) -> dict[str, jax.Array]:
    """Extend a case's arrays: more rows, all without tokens, more columns of the table, and more blocks."""

    def pad(x: jax.Array, *multiples: int) -> jax.Array:
        widths = [(0, -size % multiple) for size, multiple in zip(x.shape, multiples, strict=False)]
        return jnp.pad(x, [*widths, *[(0, 0)] * (x.ndim - len(widths))])

    return {
        "q": pad(q, ROWS),
        "k_cache": pad(k_cache, BLOCKS),
        "v_cache": pad(v_cache, BLOCKS),
        "block_tables": pad(block_tables, ROWS, TABLE_COLUMNS),
        "seq_lens": pad(seq_lens, ROWS),
    }


if __name__ == "__main__":
    app.run(main)
