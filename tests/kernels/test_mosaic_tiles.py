"""The Mosaic GPU kernels on tiles of several tokens, in Pallas' GPU interpreter with race detection on.

Prompts have a kernel of their own; a few tokens are the decode kernel's. Every query is compared with the
oracle of a decode step at its place. On a GPU the prompt kernel keeps P in registers and adds up O in place,
which the interpreter cannot do: of that only the compiler's word is known, all else is shown here.
"""

import functools
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.research.verify.cases.tiles import CASES, TileCase, inputs
from pallas_kernels import ops
from pallas_kernels.gpu.decode import attention as mosaic
from pallas_kernels.gpu.partitioning import Partitioning
from pallas_kernels.gpu.prompt import attention as prompt_attention
from pallas_kernels.gpu.prompt import softmax
from pallas_kernels.ops.checks import check_attention
from pallas_kernels.support import Arrays
from tests.kernels.checks import assert_close
from tests.kernels.interpreter import (
    OPTIONAL,
    Slot,
    fresh_interpreter,
    is_race_to_release_early,
    races_found,
    recorded_blocks,
    shadow_reads,
    unfenced_wgmmas,
    unnoticed_calls,
    without_call,
)

pytestmark = pytest.mark.usefixtures(fresh_interpreter.__name__)


def launch(c: TileCase, tiles: slice = slice(None)) -> np.ndarray:
    """Run some of the case's tiles through `ops`, traced anew."""
    (q, k, v, tables, seq_lens), starts, _ = inputs(c)

    def operation(*arrays: jax.Array) -> jax.Array:
        return ops.tiled_paged_attention(*arrays, **c.options, interpret=True)

    arrays = q[tiles], k, v, tables[tiles], starts[tiles], seq_lens[tiles]
    return np.asarray(jax.jit(operation)(*map(jnp.asarray, arrays)), np.float64)


# Each takes two to four seconds. Together these have each width of a cache, kernel, kind of head and window.
QUICK = {
    "first tiles, padding", "window within a tile", "three heads, float16", "longest tiles, sinks",
    "odd tiles, all at once", "two tokens", "float8_e5m2 cache, head_dim 256",
    "four tokens, int8 cache",
}  # fmt: skip


@pytest.mark.parametrize(
    "c", [pytest.param(c, id=str(c), marks=[] if c.name in QUICK else pytest.mark.slow) for c in CASES]
)
def test_tiles_equal_the_oracle_without_a_race(
    c: TileCase, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No table entry that no query of the tile sees is looked up."""
    monkeypatch.setattr(mosaic, "default_partitioning", lambda *_: Partitioning(64, 3))
    arrays, _, seen = inputs(c)
    with shadow_reads(), recorded_blocks(arrays.k_cache.shape) as fetched:
        got = launch(c)
    assert_close(c, got)
    assert not races_found(capsys)
    assert fetched == seen


@pytest.mark.slow
def test_a_tile_has_the_same_bits_in_any_company() -> None:
    c = CASES[2]
    together = launch(c)
    for tile in range(len(c.starts)):
        np.testing.assert_array_equal(launch(c, slice(tile, tile + 1))[0], together[tile])


def test_the_tile_with_the_most_keys_starts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs in the order in which a GPU starts them."""
    rows: list[int] = []
    load = softmax.load_queries

    def recording_load(p: Any, q: Any, *rest: Any) -> None:
        jax.debug.callback(lambda row: rows.append(int(row)), q.transforms[-1].indices[0], ordered=True)
        load(p, q, *rest)

    monkeypatch.setattr(softmax, "load_queries", recording_load)
    c = TileCase("prompt", (0, 32, 64), (32, 64, 96), num_q_heads=1)
    got = launch(c)
    jax.effects_barrier()
    assert rows == [2, 1, 0]
    assert_close(c, got)


def test_few_queries_take_the_decode_kernel() -> None:
    assert mosaic.serves(16, 4, 128)
    assert not mosaic.serves(16, 5, 64)  # 80 columns
    assert not mosaic.serves(17, 1, 64)
    assert mosaic.serves(8, 4, 256)
    assert not mosaic.serves(8, 8, 256)


RING = TileCase("ring", (300,), (330,))  # three tiles of K and V in two slots, the last at the edge
RINGS = TileCase("rings", (300,), (330,), num_q_heads=2, cache_dtype="float8_e4m3fn")  # likewise, widened
# What neither the race detector nor the oracle notices when it is missing, but `unfenced_wgmmas` does.
P_FENCE, V_FENCE = ("commit_smem", "_add_weighted"), ("commit_smem", "_zero_stale_tokens")
WIDEN_FENCE = ("commit_smem", "widen_tile")


@pytest.mark.slow
def test_every_barrier_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """Leave out each wait and fence in turn; without an arrival, a warpgroup would wait for ever."""
    calls, unnoticed = unnoticed_calls(
        lambda: assert_close(RING, launch(RING)), lambda call: call[0] == "barrier_arrive", capsys
    )
    assert len(calls) == 16, calls
    assert unnoticed - OPTIONAL == {P_FENCE, V_FENCE}


@pytest.mark.slow
def test_every_barrier_of_who_widens_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """The others are as above."""
    calls, unnoticed = unnoticed_calls(
        lambda: assert_close(RINGS, launch(RINGS)),
        lambda call: call[0] == "barrier_arrive" or call[1] not in ("widen_tile", "_wait_for_readers"),
        capsys,
    )
    assert [call for call in calls if call[1] in ("widen_tile", "_wait_for_readers")] == [
        ("barrier_wait", "_wait_for_readers"),
        ("barrier_wait", "widen_tile"),
        WIDEN_FENCE,
        ("barrier_arrive", "widen_tile"),
        ("barrier_arrive", "widen_tile"),
    ]
    assert unnoticed == {WIDEN_FENCE}


@pytest.mark.parametrize(
    ("c", "early"), [(RING, "k"), (RING, "v"), (RINGS, "k"), (RINGS, "v")], ids=lambda x: str(x)
)
def test_an_early_release_is_a_race(c: TileCase, early: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Hand a slot back as soon as it is there, instead of when it has been read, or widened."""
    readers = ("widen_tile",) if c.cache_dtype else ("take", "wait_for_v")

    def slot_in(frame: FrameType) -> Slot | None:
        if frame.f_code.co_name not in readers:
            return None
        names = frame.f_locals
        ring, slot = (names["raw"], names["raw_slot"]) if c.cache_dtype else (names["ring"], names["slot"])
        return Slot(getattr(ring, f"{early}_full"), getattr(ring, f"{early}_free"), slot)

    assert is_race_to_release_early(lambda: launch(c), slot_in, capsys)


@pytest.mark.parametrize(
    ("c", "in_registers"), [(RING, False), (RING, True), (RINGS, True)], ids=lambda x: str(x)
)
def test_every_store_is_fenced_before_a_wgmma(c: TileCase, in_registers: bool) -> None:
    """Traced as the interpreter runs it, and as a GPU does. The widening warpgroup stores for another's
    wgmma.
    """
    (q, k, v, tables, seq_lens), starts, _ = inputs(c)

    def trace() -> int:
        arrays = Arrays(*map(jnp.asarray, (q, k, v, tables, seq_lens)))
        _, options = check_attention(arrays._replace(q=arrays.q[:, 0]), {"scale": 1.0, **c.scales})
        launcher = functools.partial(prompt_attention.prompt_attention, options=options)
        jaxpr = jax.make_jaxpr(lambda a, s: launcher(a, s, in_registers=in_registers))(arrays, starts)
        return unfenced_wgmmas(jaxpr.jaxpr, readers=("wgmma_ref", "barrier_arrive"))[0]

    assert trace() == 0
    with without_call(-1, shadows=False) as calls:
        trace()
    fences = [i for i, call in enumerate(calls) if call in (P_FENCE, V_FENCE, WIDEN_FENCE)]
    assert len(fences) == 1 + (not in_registers) + (c is RINGS)
    for fence in fences:
        with without_call(fence, shadows=False):
            assert trace() > 0, calls[fence]
