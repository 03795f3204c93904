"""The versions of paged attention, in every implementation, against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jaxpaged.research.verify.cases.decode import CASES, DecodeCase, case
from tests.kernels.checks import OPERATIONS, PROGRAMS, STATIC, assert_close, inputs

QUICK = {version: jax.jit(operation, static_argnames=STATIC) for version, operation in OPERATIONS.items()}


# Sizes between others: to the kernels each is another, to XLA a number like the next. A program each.
LIKE_OTHERS = {
    *(f"group_{g}" for g in (1, 5, 6, 7, 8, 12)),
    *(f"head_dim_{d}" for d in (96, 112, 128, 192)),
    *(f"block_size_{b}" for b in (8, 32, 64)),
    *(f"rising_{size}" for size in (128, 256, 1024)),  # rows of rising_512, each alone
}
# v2 takes v1's steps over a partition at a time, and joins them: what may go wrong there.
IN_PARTITIONS = {
    "around_a_block", "partition_edges", "only_padding", "head_major", "window_over_tiles", "sinks",
    "all_at_once", "thousands", "block_size_1", "block_size_256", "int8_per_head", "sparse_slide_kv",
    "rising_512",
}  # fmt: skip
# In every run the others of them: joins at edges, windows, all options at once, and rows of many partitions.
V2_SLOW = IN_PARTITIONS - {"partition_edges", "window_over_tiles", "all_at_once", "thousands"}
SERVED = {
    "v1": [c for c in CASES if c.name not in LIKE_OTHERS],
    "v2": [c for c in CASES if c.name in IN_PARTITIONS],
}
assert len(SERVED["v1"]) == len(CASES) - len(LIKE_OTHERS)
assert len(SERVED["v2"]) == len(IN_PARTITIONS)


@pytest.mark.parametrize(
    ("version", "c"),
    [
        pytest.param(version, c, id=f"{version}-{c}", marks=pytest.mark.slow if c.name in slow else [])
        for version, cases, slow in (("v1", SERVED["v1"], ()), ("v2", SERVED["v2"], V2_SLOW))
        for c in cases
    ],
)
def test_xla_equals_the_oracle(version: str, c: DecodeCase) -> None:
    arrays, options = inputs(c, version)
    got = QUICK[version](**arrays, **options, implementation="xla")
    assert_close(c, np.asarray(got, np.float64), "float32")


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_row_has_the_same_bits_in_any_company(version: str) -> None:
    """Row 1 beside a long and an empty row, and beside short ones, in another place of the batch."""
    args, options = inputs(case("window_over_tiles"), version)
    operation = functools.partial(PROGRAMS[version], implementation="xla", **options)
    alone = args | {"seq_lens": jnp.array([0, 37, 0], jnp.int32)}
    moved = {
        n: (a[jnp.array([1, 0, 0])] if n in ("q", "block_tables", "seq_lens") else a) for n, a in args.items()
    }
    want = np.asarray(operation(**args))[1]
    np.testing.assert_array_equal(np.asarray(operation(**alone))[1], want)
    np.testing.assert_array_equal(np.asarray(operation(**moved))[0], want)


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("name", ["around_a_tile", "window_over_tiles"])
def test_xla_looks_up_no_table_entry_past_a_row(name: str, version: str) -> None:
    """Out-of-range lookups, which a gather would clamp in silence, are errors here."""
    arrays, options = inputs(case(name))
    operation = functools.partial(OPERATIONS[version], implementation="xla", **options)
    error, _ = jax.jit(checkify.checkify(lambda a: operation(**a), errors=checkify.index_checks))(arrays)
    error.throw()


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_xla_needs_no_more_memory_for_a_longer_table(version: str) -> None:
    def temporary_bytes(max_blocks: int) -> int:
        spec = jax.ShapeDtypeStruct
        cache = spec((8, 16, 2, 64), jnp.bfloat16)
        compiled = (
            jax.jit(functools.partial(OPERATIONS[version], implementation="xla"))
            .lower(
                spec((4, 8, 64), jnp.bfloat16),
                cache,
                cache,
                spec((4, max_blocks), jnp.int32),
                spec((4,), jnp.int32),
            )
            .compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(128), temporary_bytes(4096)
    # v2 keeps a partial output per partition of 512 tokens, by its nature; v1 keeps one chunk.
    partials = (4096 - 128) * 16 // 512 * 4 * 8 * (64 + 2) * 4 if version == "v2" else 0
    assert long - short <= 3 * partials + 4096, f"{short=} {long=} {partials=}"


def test_without_a_partition_size_xla_takes_a_row_in_one_softmax() -> None:
    arrays, options = inputs(case("partition_edges"))
    got, want = (QUICK[version](**arrays, **options, implementation="xla") for version in ("decode", "v1"))
    np.testing.assert_array_equal(got, want)
