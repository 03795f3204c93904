"""Tiles behind long contexts, in partitions: by the tile's own position, to the same bits in any company.

`test_mosaic_tiles` has its cases cut, too. Here programs run at the same time, and calls are of many tiles.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.research.verify.cases.tiles import TileCase
from pallas_kernels.gpu import common
from pallas_kernels.gpu.partitioning import Partitioning, PartitionList
from pallas_kernels.gpu.prompt import partitions
from pallas_kernels.gpu.prompt.program import Problem
from pallas_kernels.layouts import TOKEN_MAJOR
from tests.kernels.checks import assert_close
from tests.kernels.interpreter import (
    fresh_interpreter,
    is_run_with_more_threads,
    races_found,
    several_programs,
    shadow_reads,
)
from tests.kernels.primitives import assert_used, interpretable
from tests.kernels.test_mosaic_tiles import launch as launch_in_turn

pytestmark = pytest.mark.usefixtures(fresh_interpreter.__name__)
# Two partitions of 256 tokens, the last of which begins within the tile. One consumer a program: with two,
# programs that run at once may deadlock in the interpreter. `test_mosaic_tiles` runs them in turn.
NARROW = TileCase("narrow", (240,), (272,), num_q_heads=2)
TWO = TileCase("two", (240, 20), (272, 30), num_q_heads=2)  # two partitions of 256, and one
WIDE = TileCase("heads of 256", (110,), (142,), num_q_heads=2, head_dim=256)
WINDOW = TileCase(
    "window, all at once", (600,), (620,), num_q_heads=2, cache_dtype="float8_e4m3fn",
    sliding_window=300, soft_cap=3.0, alibi=True, sinks=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def short_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "partitioning_of", lambda *_, **__: Partitioning(128, 3))


def launch(c: TileCase, tiles: slice = slice(None), **wrong: bool) -> np.ndarray:
    """Run all programs of a call at once."""
    with shadow_reads(), several_programs(**wrong):
        return launch_in_turn(c, tiles)


def problem(window: int | None, chunk: int | None = None) -> Problem:
    view, bfloat16 = TOKEN_MAJOR.view(), jnp.dtype("bfloat16")
    assert view is not None
    return Problem(
        num_kv_heads=1,
        group_size=4,
        tile_len=32,
        query_len=32,
        head_dim=64,
        block_size=16,
        dtype=bfloat16,
        cache_dtype=bfloat16,
        new_dtype=bfloat16,
        view=view,
        scale=1.0,
        has_slopes=False,
        soft_cap=None,
        sliding_window=window,
        attention_chunk=chunk,
        in_registers=True,
        block_stride=1,
        is_interpreted=False,
        tile_kv=128,
        packed=None,
    )


POSITIONS = np.array([0, 96, 100, 360, 368, 500, 740, 992, 64], np.int32)
LENGTHS = np.array([32, 128, 130, 392, 400, 505, 772, 1024, 0], np.int32)  # the last is no tile


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (300, None), (None, 300)])
def test_partitions_follow_from_a_tiles_own_position(window: int | None, chunk: int | None) -> None:
    """Each token that a tile sees is one partition's; the same alone, and in a sequence that ends earlier."""
    partitioning = Partitioning(128, 4)

    @jax.jit
    def plan(positions: jax.Array, seq_lens: jax.Array) -> PartitionList:
        return partitions.plan(problem(window, chunk), positions, seq_lens, 1024, partitioning)

    def partitions_of(positions: np.ndarray, seq_lens: np.ndarray) -> list[list[tuple[int, int]]]:
        found: list[list[tuple[int, int]]] = [[] for _ in positions]
        work = plan(positions, seq_lens)
        items = np.asarray(work.items)[: int(work.num_items[0])].tolist()
        for tile, begin, end, number in items:
            assert number % 2**16 == len(found[tile])
            found[tile].append((begin, end))
        assert all(number // 2**16 == len(found[tile]) for tile, _, _, number in items)
        return found

    together = partitions_of(POSITIONS, LENGTHS)
    for tile, (position, length) in enumerate(zip(POSITIONS, LENGTHS, strict=True)):
        its, first = together[tile], 0 if window is None else max(int(position) + 1 - window, 0)
        first = first if chunk is None else int(position) // chunk * chunk
        assert [t for span in its for t in range(*span)] == list(range(first, length))
        assert 1 <= len(its) <= partitioning.max_partitions
        one = POSITIONS[tile : tile + 1]
        assert partitions_of(one, LENGTHS[tile : tile + 1]) == [its]
        if length:
            (shorter,) = partitions_of(one, one + 1)
            assert [begin for begin, _ in shorter] == [begin for begin, _ in its][: len(shorter)]
    assert len({len(its) for its in together}) > 2


def test_what_is_not_cut_has_the_program_of_one_partition() -> None:
    assert partitions.max_partitions(problem(None), 128, Partitioning(128, 3)) == 1
    assert partitions.max_partitions(problem(256), 1024, Partitioning(128, 3)) == 1
    assert partitions.max_partitions(problem(257), 1024, Partitioning(128, 3)) == 3
    with pytest.raises(ValueError, match=r"partitioning.tokens=192 must be a multiple of the 128"):
        partitions.max_partitions(problem(None), 1024, Partitioning(192, 3))


def test_memory_for_partitions_has_a_bound_whatever_the_number_of_tiles() -> None:
    bytes_of_a_tile = 3 * 2 * 64 * (64 + 16) * 4
    assert partitions.tiles_of_a_launch(problem(None), 9, 1) == 9
    fitting = partitions.PARTIAL_BYTES // bytes_of_a_tile
    assert partitions.tiles_of_a_launch(problem(None), fitting, 3) == fitting
    assert partitions.tiles_of_a_launch(problem(None), fitting + 1, 3) == (fitting + 2) // 2


def test_bits_do_not_depend_on_what_else_is_in_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile alone, among others, and where a call is several launches. One program after the other, in which
    the detector of races would see one.
    """
    monkeypatch.setattr(partitions, "partitioning_of", lambda *_, **__: Partitioning(128, 2))
    monkeypatch.setattr(common, "interpret_params", lambda _: plgpu.InterpretGPUParams(detect_races=False))
    together = launch_in_turn(TWO)
    assert_close(TWO, together)
    for tile in range(len(TWO.starts)):
        np.testing.assert_array_equal(launch_in_turn(TWO, slice(tile, tile + 1))[0], together[tile])
    monkeypatch.setattr(partitions, "PARTIAL_BYTES", 2 * 64 * (64 + 16) * 4)
    np.testing.assert_array_equal(launch_in_turn(TWO), together)


@pytest.mark.parametrize("c", [NARROW, WIDE, WINDOW], ids=str)
def test_the_last_of_programs_that_run_at_once_merges_the_partitions(
    c: TileCase, capsys: pytest.CaptureFixture[str]
) -> None:
    got = launch(c)
    assert_close(c, got)
    assert not races_found(capsys)


@pytest.mark.nightly
def test_partitions_of_sums_in_tensor_memory_are_merged(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if is_run_with_more_threads(request):
        return
    with several_programs(), interpretable("10.0") as used:
        got = launch_in_turn(WINDOW)
    assert_used(used, "10.0", multiply="tcgen05")
    assert_close(WINDOW, got)
    assert not races_found(capsys)


@pytest.mark.parametrize("wrong", [{"last": False}, {"ordered": False}], ids=str)
def test_merging_too_early_or_without_the_arrivals_order_is_noticed(
    wrong: dict[str, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert_close(NARROW, launch(NARROW, **wrong))
        noticed = races_found(capsys)
    except (AssertionError, jax.errors.JaxRuntimeError):
        noticed = True
    assert noticed
