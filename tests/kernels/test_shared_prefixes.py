"""Decode attention of rows behind one prefix: the plan against its oracle, and the bits with and without."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import layouts, native, ops
from pallas_kernels.layouts import LAYOUTS
from pallas_kernels.native import library
from reference import shared_prefixes
from reference.shared_prefixes import Piece, Rows
from tests.kernels import native_targets

PROGRAM = Path(__file__).with_name("native_shared_prefixes.cc")
needs_kernels = pytest.mark.skipif(
    bool(native_targets.why_not("float32")), reason="there are no native kernels"
)
Planner = Callable[..., list[tuple[int, list[Piece]]]]


def forest(seed: int, num_rows: int = 20, block_size: int = 8, width: int = 40, least_kept: int = 0) -> Rows:
    """Draw rows that fork from each other behind any block from least_kept on, some inside a block that both
    share, and some whose tables are equal.
    """
    rng = np.random.default_rng(seed)
    tables = np.zeros((num_rows, width), np.int32)
    tokens, fresh = np.zeros(num_rows, np.int32), 1
    for row in range(num_rows):
        ids = np.arange(fresh, fresh + width)
        fresh += width
        tokens[row] = rng.integers(1, width * block_size + 1)
        if row and rng.random() < 0.8:
            parent = rng.integers(row)
            kept = int(rng.integers(least_kept, width + 1))
            ids[:kept] = tables[parent, :kept]
            tokens[row] = rng.choice([tokens[row], tokens[parent], width * block_size])
        tables[row] = ids
    return Rows(tables, np.maximum(tokens - rng.integers(0, 3, num_rows), 0), tokens, block_size)


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    """Return the C++ planner: (rows, query rows, tokens to save, KV heads, threads) -> each part's items and
    pieces.
    """
    compiler, targets = library.find_compiler(), library.targets()
    if compiler is None or not targets:
        pytest.skip("there is no C++ compiler")
    program = tmp_path_factory.mktemp("shared") / "plan"
    command = [*library.compile_command(library.TARGETS[targets[0]], compiler), "-O0", str(PROGRAM)]
    subprocess.run([*command, "-I", str(library.SOURCES), "-o", str(program)], check=True)

    def plan(rows: Rows, *sizes: int) -> list[tuple[int, list[Piece]]]:
        first, last = sizes[:2], sizes[2:]
        arguments = [*rows.tables.shape, rows.block_size, *first, *last]
        data = b"".join(x.astype(np.int32).tobytes() for x in (rows.tables, rows.shared, rows.tokens))
        command = [str(program), *map(str, arguments)]
        parts: list[tuple[int, list[Piece]]] = []
        for line in subprocess.run(
            command, input=data, stdout=subprocess.PIPE, check=True
        ).stdout.splitlines():
            if line.startswith(b"part"):
                parts.append((int(line.split()[1]), []))
            else:
                begin, end, *tiles = map(int, line.split())
                parts[-1][1].append(Piece(frozenset(tiles), begin, end))
        return parts

    return plan


def check_parts(rows: Rows, parts: list[list[Piece]]) -> None:
    """Check that a row is in one part at most, that its pieces hold all its tokens in their order, and that
    what rows read together is the same memory.
    """
    members = [frozenset().union(*(piece.rows for piece in part)) for part in parts]
    assert sum(map(len, members)) == len(frozenset().union(*members))
    for part, its in zip(parts, members, strict=True):
        for row in its:
            ends = [0] + [piece.end for piece in part if row in piece.rows]
            assert [piece.begin for piece in part if row in piece.rows] == ends[:-1]
            assert ends[-1] == rows.tokens[row]
        for piece in part:
            assert len({rows.prefix(row, piece.end) for row in piece.rows}) == 1
            assert len(piece.rows) == 1 or piece.end <= min(rows.shared[list(piece.rows)])


@pytest.mark.parametrize("least_saved", [0, 100])
def test_a_plan_holds_each_token_of_each_row_once(least_saved: int) -> None:
    saved = 0
    for seed in range(8):
        rows = forest(seed)
        parts = shared_prefixes.plan(rows, 1, least_saved)
        check_parts(rows, parts)
        for part in parts:
            some = frozenset().union(*(piece.rows for piece in part))
            saved += sum(int(rows.tokens[row]) for row in some) - shared_prefixes.tokens_read(part)
    assert saved > 5000


def test_a_plan_without_a_least_reads_each_unit_of_memory_once() -> None:
    for seed in range(8):
        rows = forest(seed)
        parts = shared_prefixes.plan(rows, 1, 0)
        shared = [piece for part in parts for piece in part if len(piece.rows) > 1]
        units = [
            (next(iter(piece.rows)), end)
            for piece in shared
            for end in range(piece.begin + shared_prefixes.UNIT, piece.end + 1, shared_prefixes.UNIT)
        ]
        prefixes = [(*rows.prefix(row, end), end) for row, end in units]
        assert len(set(prefixes)) == len(prefixes), "each unit that some rows share is in one piece"
        seen: dict[tuple[int, ...], int] = {}
        for row, most in enumerate(rows.shared.tolist()):
            for end in range(shared_prefixes.UNIT, most + 1, shared_prefixes.UNIT):
                key = (*rows.prefix(row, end), end)
                seen[key] = seen.get(key, 0) + 1
        assert set(prefixes) == {key for key, count in seen.items() if count > 1}


@pytest.mark.parametrize(("num_query_rows", "least_saved"), [(1, 0), (1, 100), (2, 100), (4, 40)])
def test_the_planner_has_the_plan_of_the_oracle(
    planner: Planner, num_query_rows: int, least_saved: int
) -> None:
    found = 0
    for seed in range(12):
        rows = forest(seed)
        if num_query_rows > 2:  # pays for many rows of a long prefix alone
            full = np.full(20, 320)
            rows = forest(seed, least_kept=39)._replace(shared=full, tokens=full)
        want = shared_prefixes.plan(rows, num_query_rows, least_saved)
        got = planner(rows, num_query_rows, least_saved, 4, 1)
        assert sorted(map(sorted_pieces, want)) == sorted(sorted_pieces(part) for _, part in got)
        check_parts(rows, [part for _, part in got])
        found += len(got)
    assert found > 0


def sorted_pieces(part: list[Piece]) -> list[tuple[int, int, list[int]]]:
    return sorted((piece.begin, piece.end, sorted(piece.rows)) for piece in part)


def test_a_plan_keeps_all_threads_busy(planner: Planner) -> None:
    """One prefix for 32 rows: two items for each thread, or none if rows are too few to share."""
    tables = np.tile(np.arange(1, 41, dtype=np.int32), (32, 1))
    tables[:, 32:] = np.arange(100, 100 + 32 * 8).reshape(32, 8)
    tokens = np.full(32, 300, np.int32)
    rows = Rows(tables, tokens, tokens, 8)
    for num_kv_heads, num_threads, num_parts in [(1, 2, 4), (3, 2, 2), (8, 2, 1), (8, 16, 4), (1, 8, 16)]:
        parts = planner(rows, 1, 0, num_kv_heads, num_threads)
        check_parts(rows, [part for _, part in parts])
        assert len(frozenset().union(*(piece.rows for _, part in parts for piece in part))) == 32
        assert len(parts) == num_parts
        assert sum(num_items for num_items, _ in parts) >= 2 * num_threads
    assert not planner(rows, 1, 0, 1, 64), "rows that share would leave threads without work"


def pool_of(
    layout: Any, dtype: str, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> Any:
    """Return a pool with numbers in all blocks."""
    pool = layouts.create(layout, num_blocks, block_size, num_kv_heads, head_dim, jnp.dtype(dtype))
    slots = np.arange(num_blocks * block_size, dtype=np.int32)
    shape = (2, len(slots), num_kv_heads, head_dim)
    wide = np.random.default_rng(3).standard_normal(shape)
    k, v = wide.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return ops.write(pool, k, v, jnp.asarray(slots))


SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
CASES = [
    pytest.param("", "float32", "token_major", (6, 2, 24), 1, {}, id="float32"),
    pytest.param("", "bfloat16", "token_major", (9, 3, 64), 3, {"soft_cap": 1.5}, id="drafts"),
    pytest.param("", "bfloat16", "head_major", (4, 4, 64), 1, {"window": 200}, id="window", marks=SLOW),
    pytest.param("", "float32", "int8_per_token", (3, 1, 64), 1, {"chunk": 128}, id="int8", marks=SLOW),
    pytest.param("", "bfloat16", "fp8_e4m3", (2, 2, 128), 1, {}, id="fp8", marks=NIGHTLY),
    pytest.param("", "bfloat16", "int4_grouped", (6, 2, 64), 2, {}, id="int4", marks=NIGHTLY),
    pytest.param("avx2", "float32", "token_major", (14, 2, 64), 1, {}, id="avx2, float32", marks=NIGHTLY),
    pytest.param("avx2", "bfloat16", "token_major", (4, 4, 80), 1, {}, id="avx2, bfloat16", marks=NIGHTLY),
    pytest.param("sse2", "float32", "token_major", (5, 1, 64), 1, {}, id="sse2, float32", marks=NIGHTLY),
    pytest.param("sse2", "bfloat16", "fp8_e5m2", (8, 2, 64), 1, {}, id="sse2, fp8", marks=NIGHTLY),
]


@needs_kernels
@pytest.mark.parametrize(("target", "dtype", "name", "heads", "queries", "options"), CASES)
def test_rows_that_share_have_the_bits_that_they_have_alone(
    target: str,
    dtype: str,
    name: str,
    heads: tuple[int, int, int],
    queries: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random trees of tables, rows of which some see too little, or nothing, to share."""
    if target:
        if target not in library.targets():
            pytest.skip(f"this processor is no {target}")
        monkeypatch.setenv("JAXPAGED_NATIVE", target)
    num_q_heads, num_kv_heads, head_dim = heads
    layout = LAYOUTS[name]
    block_size = 32 if name == "int4_grouped" else 8
    rows = forest(5, num_rows=14, block_size=block_size, width=320 // block_size)
    pool = pool_of(layout, dtype, 1 + int(rows.tables.max()), block_size, num_kv_heads, head_dim)
    assert native.why_not_cache(pool.layout, jnp.dtype(dtype)) is None
    lens = rows.tokens.copy()
    lens[3] = 0
    starts = np.where(lens > 0, np.maximum(lens - queries, 0), -1).astype(np.int32)
    q = (
        np.random.default_rng(1)
        .standard_normal((14, queries, num_q_heads, head_dim))
        .astype(jnp.dtype(dtype))
    )
    bounds: dict[str, Any] = {"scale": 0.125, "window": None, "chunk": None, **options}

    def attend(least_saved: int | None, some: slice | list[int] = slice(None)) -> np.ndarray:
        arrays = (q[some], pool, rows.tables[some], starts[some], lens[some], None)
        out = native.tiled_paged_attention(
            *jax.tree.map(jnp.asarray, arrays), least_saved=least_saved, **bounds
        )
        return np.asarray(out)

    apart = attend(-1)
    for least_saved in (0, 40):
        together = attend(least_saved)
        np.testing.assert_array_equal(together.view(np.uint8), apart.view(np.uint8))
    for row in (0, 9):
        np.testing.assert_array_equal(attend(None, [row])[0].view(np.uint8), apart[row].view(np.uint8))
