"""The Mosaic GPU kernel of decode attention in Pallas' GPU interpreter, with race detection on.

`interpreter.py` makes the race detector see a tile that is used too early or overwritten too soon.
`test_every_barrier_is_needed` takes the synchronising calls of a kernel away, one at a time. What that
cannot show is named in INVISIBLE.

`several_programs` makes programs run at the same time.
"""

import functools
import os
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend import core

from jaxpaged.research.verify.cases.decode import CASES, DecodeCase, case
from jaxpaged.research.verify.oracles.attention import BlockSparse
from pallas_kernels import ops
from pallas_kernels.gpu import common, tuning
from pallas_kernels.gpu.decode import attention as mosaic
from pallas_kernels.gpu.partitioning import Partitioning
from pallas_kernels.ops.checks import check_attention
from pallas_kernels.support import Arrays
from tests.kernels.checks import OPERATIONS, assert_close, inputs, is_served
from tests.kernels.interpreter import (
    OPTIONAL,
    fresh_interpreter,
    is_race_to_release_early,
    races_found,
    recorded_blocks,
    several_programs,
    shadow_reads,
    slot_of_scratch,
    unfenced_wgmmas,
    unnoticed_calls,
    without_call,
)

# A case takes two to five seconds, whatever is in it: so each has several features, and each feature is in
# one or two. JAXPAGED_EXHAUSTIVE=1 runs the whole list as well, in which features come one at a time.
EXHAUSTIVE = bool(os.environ.get("JAXPAGED_EXHAUSTIVE"))
ALONE = {"num_q_heads": 3, "num_kv_heads": 1}
LEAN = {
    "decode": (
        # Around blocks, tiles and partitions; rows without tokens between others, and alone.
        DecodeCase("lengths", seq_lens=(15, 16, 17, 0, 1, 63, 64, 65, 127, 128, 129, 256), **ALONE),
        case("only_padding"),
        DecodeCase(
            "shared prefix, head_major, float16, group of 12",
            seq_lens=(70, 90, 33), shared_blocks=3, kv_layout="head_major", dtype="float16", num_q_heads=24,
        ),
        DecodeCase(
            "window in a tile, blocks of 8, head_dim 80",
            seq_lens=(37, 70, 12), sliding_window=20, block_size=8, head_dim=80, **ALONE,
        ),
        DecodeCase(
            "window over tiles, blocks of 128, group of 16",
            seq_lens=(300, 37, 101), sliding_window=100, block_size=128, num_q_heads=16, num_kv_heads=1,
        ),
        DecodeCase("chunks over tiles", seq_lens=(300, 37, 101, 100), attention_chunk=100, **ALONE),
        case("all_at_once"),
        DecodeCase(
            "sinks, blocks of 256, head_dim 256",
            seq_lens=(257, 0, 1), sinks=True, block_size=256, head_dim=256,
        ),
        DecodeCase(
            "float8_e4m3fn by head, sparse by kv head",
            cache_dtype="float8_e4m3fn", scale_per_head=True, seq_lens=(200, 33, 0), num_q_heads=6,
            block_sparse=BlockSparse(16, 1, 4, head_sliding_step=-1, tp_rank=1),
        ),
        DecodeCase(
            "float8_e5m2, sparse by query head",
            cache_dtype="float8_e5m2", seq_lens=(200, 33), num_q_heads=6,
            block_sparse=BlockSparse(32, 1, 3, head_sliding_step=1),
        ),
        DecodeCase(
            "int8, sparse without local blocks, sinks",
            cache_dtype="int8", seq_lens=(100, 5), sinks=True, block_sparse=BlockSparse(16, 0, 1000),
        ),
    ),
    "v1": (
        DecodeCase("around a tile, head_dim 112", seq_lens=(63, 64, 65, 127, 129), head_dim=112),
        case("all_at_once"),
    ),
    "v2": (
        DecodeCase(
            "edges of partitions, head_dim 192",
            seq_lens=(127, 128, 129, 256), head_dim=192, partition_size=128,
        ),
        case("int8_per_head"),
    ),
}  # fmt: skip
# Others have their features too: windows, sizes of blocks, sinks, a sparse pattern, a row without tokens.
NOT_QUICK = {
    "only_padding", "window over tiles, blocks of 128, group of 16", "sinks, blocks of 256, head_dim 256",
    "chunks over tiles", "float8_e5m2, sparse by query head", "around a tile, head_dim 112", "int8_per_head",
}  # fmt: skip
pytestmark = pytest.mark.usefixtures(fresh_interpreter.__name__)
SHORT = Partitioning(
    64, 3
)  # so that rows of a few hundred tokens have several partitions, of different lengths


def owned_blocks(c: DecodeCase) -> set[int]:
    """Return the blocks of each row's window or chunk, or of all its tokens; what a sparse pattern leaves out
    is fetched as well.
    """
    tables, found = np.asarray(inputs(c)[0]["block_tables"]), set()
    for row, length in enumerate(c.seq_lens):
        first = max(0, length - (c.sliding_window or length)) // c.block_size
        if c.attention_chunk:
            first = (length - 1) // c.attention_chunk * c.attention_chunk // c.block_size
        found |= {int(block) for block in tables[row, first : -(-length // c.block_size)]}
    return found


def interpret(c: DecodeCase, version: str) -> np.ndarray:
    """Run the case through `ops`, traced anew so that it calls a test's replacements of Pallas' functions."""
    arrays, options = inputs(c, version)
    operation = functools.partial(OPERATIONS[version], **options, interpret=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mosaic, "default_partitioning", lambda *_: SHORT)
        return np.asarray(jax.jit(operation)(**arrays), np.float64)


def chosen(version: str) -> list[Any]:
    cases = {c.name: c for c in (*LEAN[version], *(CASES if EXHAUSTIVE else ()))}
    return [
        pytest.param(c, version, id=f"{version}-{name}", marks=pytest.mark.slow if name in NOT_QUICK else [])
        for name, c in cases.items()
    ]


@pytest.mark.parametrize(("c", "version"), [param for version in LEAN for param in chosen(version)])
def test_the_kernel_equals_the_oracle_without_a_race(
    c: DecodeCase, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No table entry past a row's tokens, or before its window, is looked up."""
    if not is_served(c):
        assert c not in LEAN[version]
        pytest.skip("not served by mosaic_gpu, by the support table")
    cache_shape = inputs(c)[0]["k_cache"].shape
    with shadow_reads(), recorded_blocks(cache_shape) as fetched:
        got = interpret(c, version)
    assert_close(c, got)
    assert not races_found(capsys)
    assert fetched == owned_blocks(c)


@pytest.mark.parametrize(
    ("window", "chunk"), [(None, None), (1, None), (100, None), (300, None), (None, 100), (None, 1)]
)
@pytest.mark.parametrize("partitioning", [SHORT, Partitioning(64, 1), Partitioning(128, 4)], ids=str)
def test_partitions_hold_each_token_of_a_row_once_and_are_few(
    partitioning: Partitioning, window: int | None, chunk: int | None
) -> None:
    """Partitions follow from the row's own length: a list of all lengths equals one list a length."""
    capacity, new_tokens = 512, 2
    lengths = np.array([0, 2, 63, 64, 65, 191, 192, 193, 300, 400, 511, 512], np.int32)

    def partitions_of(lengths: np.ndarray) -> list[list[tuple[int, int]]]:
        plan = mosaic.plan(
            *(lengths, np.maximum(lengths - new_tokens, 0), new_tokens, window, partitioning, capacity),
            chunk=chunk,
        )
        rows: list[list[tuple[int, int]]] = [[] for _ in lengths]
        for row, start, end, number in np.asarray(plan.items)[: int(plan.num_items[0])]:
            assert number % 2**16 == len(rows[row])
            rows[row].append((int(start), int(end)))
        for row, start, end, number in np.asarray(plan.items)[: int(plan.num_items[0])]:
            assert number // 2**16 == len(rows[row]), (start, end)
        return rows

    found = partitions_of(lengths)
    for length, spans in zip(lengths, found, strict=True):
        position = max(length - new_tokens, 0)
        first = 0 if window is None else max(position + 1 - window, 0)
        first = first if chunk is None else position // chunk * chunk
        assert [t for span in spans for t in range(*span)] == list(range(first, length))
        assert 1 <= len(spans) <= partitioning.bound(capacity)
        assert partitions_of(np.array([length], np.int32)) == [spans]


def launch(
    c: DecodeCase, partitioning: Partitioning, num_stages: int = 2, num_programs: int = 1
) -> np.ndarray:
    """Run the kernel with a small ring, so that slots are used again within and across units of work."""
    named, given = inputs(c)
    arrays = Arrays(**named)
    _, options = check_attention(arrays, given)
    config = tuning.TuningConfig(num_stages=num_stages)
    got = mosaic.paged_attention(
        arrays, options, partitioning=partitioning, config=config, num_programs=num_programs, interpret=True
    )
    return np.asarray(got, np.float64)


RING = DecodeCase("ring", seq_lens=(330, 150, 60), num_q_heads=2, num_kv_heads=1)
CUT = Partitioning(128, 2)  # RING's rows have two partitions of 256 tokens, two of 128, and one
WHOLE = Partitioning(512, 1)


@functools.cache
def one_program() -> np.ndarray:
    return launch(RING, CUT, 3)


def test_int8_is_float16_by_its_bits() -> None:
    """What `common.widened` computes on a GPU, and no interpreter knows: of all numbers, by NumPy."""
    x = np.arange(-128, 128).astype(np.int8)
    words = x.view(np.uint32) ^ np.uint32(common.SIGNS)
    # prmt: each digit of the pair, the lowest first, names one of the bytes of both operands.
    choice = (
        words.view(np.uint8).reshape(-1, 4),
        np.tile(np.uint32([common.UPPER_BYTE]).view(np.uint8), (64, 1)),
    )
    places = [[pair >> 4 * digit & 15 for digit in range(4)] for pair in common.PAIRS]
    halves = np.hstack(choice)[:, np.array(places).reshape(-1)].copy().view(np.float16)
    too_much = np.uint32([common.TOO_MUCH]).view(np.float16)
    np.testing.assert_array_equal((halves - too_much[0]).reshape(-1), x)
    assert too_much[0] == too_much[1]


@pytest.mark.parametrize("num_programs", [3, 5])
def test_rows_do_not_depend_on_how_many_programs_share_the_work(
    num_programs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs have one unit of work each, or several."""
    with shadow_reads(), several_programs():
        got = launch(RING, CUT, 2, num_programs)
    np.testing.assert_array_equal(got, one_program())
    assert_close(RING, got)
    assert not races_found(capsys)


@pytest.mark.parametrize("wrong", [{"last": False}, {"ordered": False}], ids=str)
def test_merging_too_early_or_without_the_arrivals_order_is_noticed(
    wrong: dict[str, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        with shadow_reads(), several_programs(**wrong):
            got = launch(RING, CUT, 2, 3)
        assert_close(RING, got)
        noticed = races_found(capsys)
    except (AssertionError, jax.errors.JaxRuntimeError):
        noticed = True
    assert noticed


# What neither the race detector nor the oracle notices when it is missing: the fences between an ordinary
# store to shared memory and the wgmma that reads it. `test_every_store_is_fenced_before_a_wgmma` sees these.
INVISIBLE = {("commit_smem", caller) for caller in ("_load_queries", "_await_tile", "take")}
# Without it the producer waits for ever. `test_an_early_release_is_a_race` moves it instead.
DEADLOCK = {("barrier_arrive", "take"), ("barrier_arrive", "_load_queries")}


@pytest.mark.slow
def test_every_barrier_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """Leave out each wait, arrival and fence in turn: an error, a race or a wrong result must follow."""
    calls, unnoticed = unnoticed_calls(
        lambda: assert_close(RING, launch(RING, CUT)), DEADLOCK.__contains__, capsys
    )
    assert len(calls) == 12, calls
    assert unnoticed - OPTIONAL == INVISIBLE & set(calls)


def test_an_early_release_is_a_race(capsys: pytest.CaptureFixture[str]) -> None:
    """Hand a slot back before its V is read."""
    slot_in = slot_of_scratch(
        "_await_tile", "take", barriers=lambda scratch: (scratch.ring.k_full, scratch.ring.k_free)
    )
    assert is_race_to_release_early(lambda: launch(RING, WHOLE), slot_in, capsys)


@pytest.mark.parametrize("c", [RING, case("float8_e4m3fn_per_head")], ids=str)
def test_every_store_is_fenced_before_a_wgmma(c: DecodeCase) -> None:
    """The fence is commit_smem. Without any one of those named INVISIBLE, the check fails."""
    if not is_served(c):
        pytest.skip("not served by mosaic_gpu, by the support table")
    assert unfenced_wgmmas(trace(c))[0] == 0
    with without_call(-1, shadows=False) as met:
        trace(c)
    for number, call in enumerate(met):
        # With a quantised cache the fence after widening covers the queries as well.
        if call in INVISIBLE and not (c.is_quantised and call[1] == "_load_queries"):
            with without_call(number, shadows=False):
                jaxpr = trace(c)
            assert unfenced_wgmmas(jaxpr)[0] > 0, call


def trace(c: DecodeCase) -> core.Jaxpr:
    arrays, options = inputs(c)
    operation = functools.partial(ops.paged_attention, **options)
    return jax.make_jaxpr(lambda a: operation(**a, implementation="mosaic_gpu"))(arrays).jaxpr
