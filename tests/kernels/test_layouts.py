"""Every layout of the registry: written, read and copied as its oracle does, and read by every attention."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.research.verify.layouts import judged
from pallas_kernels import layouts, native, ops, support
from pallas_kernels.gpu import common
from pallas_kernels.gpu.partitioning import Partitioning
from pallas_kernels.gpu.prompt import partitions
from pallas_kernels.layouts import LAYOUTS, BlockSlice, Fp8, Int8PerToken, Layout, Pool, Sizes
from reference import attention as reference_attention
from reference import cache_ops
from reference import layouts as reference
from reference.layouts import Oracle
from tests import layouts as cases
from tests.kernels.interpreter import (
    fresh_interpreter,
    is_run_with_more_threads,
    races_found,
    shadow_reads,
    unnoticed_calls,
)
from tests.kernels.primitives import interpretable
from tests.marks import slow_and_nightly

NUM_TOKENS = 6  # of a call
write = jax.jit(ops.write)
read = jax.jit(Pool.read, static_argnums=2)
copy = jax.jit(
    lambda pool, pairs: dict(zip(pool.arrays, ops.copy_blocks([*pool.arrays.values()], pairs), strict=True))
)
attend_tiles = jax.jit(
    ops.tiled_paged_attention, static_argnames=("scale", "sliding_window", "soft_cap", "implementation")
)
F32 = jnp.dtype("float32")


def written(pool: Pool, calls: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Pool:
    for k, v, slots in calls:
        padding = NUM_TOKENS - len(slots)
        k, v = (np.pad(x, ((0, padding), (0, 0), (0, 0))) for x in (k, v))
        pool = write(pool, k, v, np.pad(slots, (0, padding), constant_values=-1).astype(np.int32))
    return pool


def history(sizes: Sizes, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the writes of two sequences over shuffled blocks: chunks of a prompt, then a token of each in
    turn.
    """
    rng = np.random.default_rng(seed)
    blocks = 1 + rng.permutation(sizes.num_blocks - 1)
    half = len(blocks) // 2
    slots = [
        (its[:, None] * sizes.block_size + np.arange(sizes.block_size)).reshape(-1)
        for its in (blocks[:half], blocks[half:])
    ]
    whole = len(slots[0]) * 2 // 3 // NUM_TOKENS * NUM_TOKENS
    calls = [slots[0][i : i + NUM_TOKENS] for i in range(0, whole, NUM_TOKENS)]
    calls += [slots[1][:5]]
    for i in range(min(len(slots[0]) - whole, len(slots[1]) - 5, 20)):
        calls.append(np.array([slots[1][5 + i], slots[0][whole + i]]))

    def drawn(n: int) -> np.ndarray:
        channel = 1 + np.arange(sizes.head_dim) % 5
        return (rng.standard_normal((n, *sizes[2:])) * channel + 1).astype(np.float32)

    return [(drawn(len(call)), drawn(len(call)), call.astype(np.int32)) for call in calls]


def by_oracle(oracle: Oracle, arrays: dict[str, np.ndarray], calls: Any) -> dict[str, np.ndarray]:
    for call in calls:
        arrays = oracle.write(arrays, *call)
    return arrays


def assert_alike(pool: Pool, want: dict[str, np.ndarray], shared: set[str] = frozenset()) -> None:
    """Assert that all stored numbers are alike, except the null block's and those of a group that is not
    whole.
    """
    assert pool.arrays.keys() == want.keys()
    for name in want.keys() - {"k_new"}:
        array = pool.arrays[name]
        begin = 0 if name in shared else 1
        got = np.asarray(array)[begin:]
        np.testing.assert_array_equal(got, want[name][begin:].astype(got.dtype), err_msg=name)


def blocks_of(pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    k, v = read(pool, jnp.arange(pool.num_blocks), F32)
    return np.asarray(k), np.asarray(v)


@pytest.mark.parametrize("name", cases.EACH)
def test_a_layout_writes_reads_and_copies_as_its_oracle(name: str) -> None:
    layout = LAYOUTS[name]
    sizes = cases.sizes_of(layout)
    calls = history(sizes)
    pool = written(layouts.create(layout, *sizes, F32), calls)
    k, v = blocks_of(pool)
    assert k.shape == v.shape == (sizes.num_blocks, *sizes[1:])
    # What was written is what is read, to within what the layout states, which is not too much.
    error = largest = 0.0
    for x, got in ((0, k), (1, v)):
        for call in calls:
            read_back = got.reshape(-1, *sizes[2:])[call[2]].astype(np.float64)
            error = max(error, np.abs(read_back - call[x]).max())
            largest = max(largest, np.abs(call[x]).max())
    assert judged(layout, error / largest) is None
    if (oracle := cases.oracle(name, sizes)) is None:
        return
    want = by_oracle(oracle, cases.empty(layout, sizes), calls)
    assert_alike(pool, want)
    live = np.zeros(sizes.num_blocks * sizes.block_size, bool)
    live[np.concatenate([call[2] for call in calls])] = True
    for block, its in enumerate(live.reshape(sizes.num_blocks, -1)):
        for got, wanted in zip((k, v), oracle.read(want, block), strict=True):
            np.testing.assert_allclose(got[block][its], wanted[its], rtol=1e-6, atol=1e-6)

    # A copy goes on alone: the block with the newest token is another's beginning.
    last = int(calls[-1][2][0]) // sizes.block_size
    target = 1 + last % (sizes.num_blocks - 1)
    pairs = np.array([[last, target], [0, 0], [-1, 3]], np.int32)
    pool = dataclasses.replace(pool, arrays=copy(pool, pairs))
    want = dict(zip(want, cache_ops.copy_blocks([*want.values()], pairs), strict=True))
    offset = (int(calls[-1][2][0]) + 1) % sizes.block_size
    more = [(calls[0][0][:1], calls[0][1][:1], np.array([target * sizes.block_size + offset]))]
    if offset:
        pool, want = written(pool, more), by_oracle(oracle, want, more)
    assert_alike(pool, want)


@pytest.mark.parametrize("name", cases.EACH)
def test_a_pool_takes_the_bytes_of_its_blocks_and_is_written_in_place(name: str) -> None:
    layout = LAYOUTS[name].on("cpu")
    sizes = cases.sizes_of(layout, num_blocks=4096)
    pool = jax.eval_shape(lambda: layouts.create(layout, *sizes, F32))
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
    assert num_bytes == sizes.num_blocks * layout.block_bytes(*sizes[1:], F32)
    new = jax.ShapeDtypeStruct((4, *sizes[2:]), F32)
    slots = jax.ShapeDtypeStruct((4,), jnp.int32)
    memory = jax.jit(ops.write, donate_argnums=0).lower(pool, new, new, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes == num_bytes
    assert memory.temp_size_in_bytes < 2**17


def slice_of_three(layout: Layout, sizes: Sizes, dtype: jnp.dtype) -> Pool:
    """Return the last of three layers whose blocks lie side by side, in arrays of NaN."""
    pool = layouts.create(layout, *sizes._replace(num_blocks=3 * sizes.num_blocks), dtype)
    arrays = {
        name: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in pool.arrays.items()
    }
    blocks = BlockSlice(jnp.int32(2), stride=3, num_blocks=sizes.num_blocks)
    return dataclasses.replace(pool, arrays=arrays, blocks=blocks)


@functools.cache
def filled(name: str) -> tuple[Pool, np.ndarray, np.ndarray]:
    """Return a pool with three sequences' tokens in all slots, and what is read of them."""
    layout = LAYOUTS[name]
    block_size = cases.block_size_of(layout)
    num_blocks = 1 + 3 * -(-128 // block_size)
    sizes = Sizes(num_blocks, block_size, cases.NUM_HEADS, cases.HEAD_DIM)
    rng = np.random.default_rng(3)
    slots = np.arange(block_size, num_blocks * block_size, dtype=np.int32)
    k, v = rng.standard_normal((2, len(slots), *sizes[2:])).astype(np.float32)
    pool = write(slice_of_three(layout, sizes, F32), k, v, slots)
    return pool, *blocks_of(pool)


def sequences(pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    """Return block tables, with no block's id after each sequence's own, and lengths."""
    seq_lens = np.array([70, 0, 128], np.int32)
    width = -(-128 // pool.sizes.block_size)
    tables = 1 + np.random.default_rng(4).permutation(3 * width).reshape(3, width)
    for row, length in enumerate(seq_lens):
        tables[row, -(-length // pool.sizes.block_size) :] = -7
    return tables.astype(np.int32), seq_lens


# Read alike by all that reads them, with numbers as they are and with what is kept of a group.
IN_ALL_WAYS = ("token_major", "int4_grouped")


@pytest.mark.parametrize(
    ("name", "operation"),
    [(n, "decode") for n in cases.EACH] + [(n, "v2") for n in IN_ALL_WAYS] + [("token_major", "v1")],
)
def test_decode_attention_reads_every_layout(name: str, operation: str) -> None:
    pool, k, v = filled(name)
    tables, seq_lens = sequences(pool)
    q = np.random.default_rng(5).standard_normal((3, 6, cases.HEAD_DIM)).astype(np.float32)
    options = {"sliding_window": 50, "soft_cap": 3.0}
    call = {"decode": ops.paged_attention, "v1": ops.paged_attention_v1, "v2": ops.paged_attention_v2}[
        operation
    ]
    more = {"partition_size": 64} if operation == "v2" else {}
    out = jax.jit(functools.partial(call, **options, **more, implementation="xla"))(
        q, pool, None, tables, seq_lens
    )
    want = reference_attention.paged_attention(q, k, v, tables, seq_lens, **options)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", cases.EACH)
@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_tiles_read_every_layout(name: str, implementation: Any) -> None:
    pool, k, v = filled(name)
    if implementation == "native" and (why := native.why_not(F32) or native.why_not_layout(pool.layout, F32)):
        if native.why_not(F32) is None:
            with pytest.raises(NotImplementedError, match="does not serve this call: kv_layout"):
                tiles_of(pool, k, v, implementation)
        pytest.skip(why)
    tiles_of(pool, k, v, implementation)


@pytest.mark.parametrize("name", IN_ALL_WAYS)
@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_flat_batches_read_layouts(name: str, implementation: Any) -> None:
    """Flat batches are made of tiles and decode steps."""
    pool, k, v = filled(name)
    if implementation == "native" and (why := native.why_not(F32)):
        pytest.skip(why)
    tables, seq_lens = sequences(pool)
    cu_query_lens = np.array([0, 3, 3, 4], np.int32)
    flat = np.random.default_rng(7).standard_normal((5, 6, cases.HEAD_DIM)).astype(np.float32)
    out = jax.jit(functools.partial(ops.ragged_paged_attention, scale=0.3, implementation=implementation))(
        flat, pool, None, tables, seq_lens, cu_query_lens
    )
    want = reference_attention.ragged_paged_attention(flat, k, v, tables, seq_lens, cu_query_lens, scale=0.3)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def among_others(tables: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tables in another order, among rows that name no block."""
    rows = np.arange(len(tables))[::-1] * 2
    more = np.full((2 * len(tables), tables.shape[1]), -7, np.int32)
    more[rows] = tables
    return {"block_tables": more, "table_rows": rows.astype(np.int32)}


def tiles_of(pool: Pool, k: np.ndarray, v: np.ndarray, implementation: str) -> None:
    tables, seq_lens = sequences(pool)
    starts = np.maximum(seq_lens - 5, 0).astype(np.int32)
    many = pool.layout == LAYOUTS["token_major"] or implementation == "native"
    for num_q_heads, window in ((6, 20), *([(24, None)] if many else [])):
        q = np.random.default_rng(6).standard_normal((3, 5, num_q_heads, cases.HEAD_DIM)).astype(np.float32)
        options = {"scale": 0.3, "sliding_window": window}
        given = {"query_starts": starts, "seq_lens": seq_lens, **among_others(tables)}
        out = attend_tiles(q, pool, None, **given, **options, implementation=implementation)
        for i in range(5):
            upto = np.where(seq_lens > 0, starts + i + 1, 0)
            want = reference_attention.paged_attention(q[:, i], k, v, tables, upto, **options)
            np.testing.assert_allclose(out[:, i][upto > 0], want[upto > 0], rtol=1e-5, atol=1e-5)


# Each kind of layout by one of the two kernels, that with most of its own by both.
MOSAIC_QUICK = {("fused", 19), ("int8_per_token", 1), ("int4_grouped", 1), ("int4_grouped", 19)}
READ_BY_MOSAIC = [name for name in support.SUPPORT["mosaic_gpu"].kv_layouts if name != "token_major"]


@pytest.mark.usefixtures(fresh_interpreter.__name__)
@pytest.mark.parametrize(
    ("name", "tile_len"),
    [
        pytest.param(n, tile_len, marks=() if (n, tile_len) in MOSAIC_QUICK else pytest.mark.slow)
        for tile_len in (1, 19)
        for n in READ_BY_MOSAIC
    ],
)
def test_the_gpu_kernels_read_the_layouts_that_they_say(
    name: str, tile_len: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both kernels run in the interpreter, without a race."""
    with shadow_reads():
        run_interpreted(name, tile_len)
    assert not races_found(capsys)


@pytest.mark.usefixtures(fresh_interpreter.__name__)
@pytest.mark.parametrize("capability", slow_and_nightly(("9.0", "10.0"), ["9.0"]))
def test_prompts_in_partitions_read_codes_of_four_bits(
    capability: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One program after the other, in which the detector of races would see one."""
    by_tcgen05 = capability == "10.0"
    if by_tcgen05 and is_run_with_more_threads(request):
        return
    monkeypatch.setattr(partitions, "partitioning_of", lambda *_, **__: Partitioning(64, 3))
    monkeypatch.setattr(common, "interpret_params", lambda _: plgpu.InterpretGPUParams(detect_races=False))
    with interpretable(capability) if by_tcgen05 else contextlib.nullcontext():
        run_interpreted("int4_grouped", 19)


@pytest.mark.slow
@pytest.mark.usefixtures(fresh_interpreter.__name__)
@pytest.mark.parametrize("tile_len", [1, 19])
def test_every_barrier_around_codes_of_four_bits_is_needed(
    tile_len: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are of `test_mosaic_interpreter` and `test_mosaic_tiles`. A missing fence only these see."""
    places = {1: ("_await_tile",), 19: ("widen", "widen_tile")}[tile_len]
    calls, unnoticed = unnoticed_calls(
        lambda: run_interpreted("int4_grouped", tile_len),
        lambda call: call[0] == "barrier_arrive" or call[1] not in places,
        capsys,
    )
    waits = [call for call in calls if call[0] == "barrier_wait" and call[1] in places]
    assert len(waits) == len(places)
    assert unnoticed <= {("commit_smem", place) for place in places}


def run_interpreted(name: str, tile_len: int) -> None:
    """Run a batch of two through the kernel in the interpreter, and compare it with the oracle."""
    layout, bfloat16 = LAYOUTS[name], jnp.dtype("bfloat16")
    if isinstance(layout, Fp8):
        layout = dataclasses.replace(layout, k_scale=(0.25, 0.5), v_scale=0.5)
    block_size = max(16, min(support.SUPPORT["mosaic_gpu"].block_sizes_of(layout) or ()))
    sizes = Sizes(13, block_size, 2, 64)
    rng = np.random.default_rng(0)
    tables = 1 + rng.permutation(12).reshape(2, 6).astype(np.int32)
    seq_lens = np.array([90, 33], np.int32)
    positions = [np.arange(n) for n in seq_lens]
    slots = [tables[i, at // block_size] * block_size + at % block_size for i, at in enumerate(positions)]
    k, v = rng.standard_normal((2, seq_lens.sum(), 2, 64)).astype(np.float32)
    pool = write(slice_of_three(layout, sizes, bfloat16), k, v, np.concatenate(slots).astype(np.int32))
    starts = seq_lens - tile_len
    q = jnp.asarray(rng.standard_normal((2, tile_len, 4, 64)), bfloat16)
    given = {"query_starts": jnp.asarray(starts), "seq_lens": jnp.asarray(seq_lens)}
    given |= {name: jnp.asarray(x) for name, x in among_others(tables).items()}
    out = ops.tiled_paged_attention(q, pool, None, **given, scale=0.125, interpret=True)
    k, v = (np.asarray(x) for x in read(pool, jnp.arange(13), F32))
    for i in range(tile_len):
        want = reference_attention.paged_attention(
            np.asarray(q[:, i], np.float32), k, v, tables, starts + i + 1, scale=0.125
        )
        # Weights and outputs are rounded to 8 bits.
        np.testing.assert_allclose(np.asarray(out[:, i], np.float32), want, rtol=2**-7, atol=2**-7)


# What has options of its own


def test_float8_with_given_scales_by_head_and_on_another_order_of_axes() -> None:
    layout = Fp8("fp8_e4m3", LAYOUTS["head_major"], k_scale=(0.5, 2.0), v_scale=0.25)
    sizes = Sizes(9, 4, 2, 16)
    base = reference.plain(reference.head_major, *sizes[1:])
    dtype = np.dtype(jnp.float8_e4m3fn)
    oracle = reference.float8(base, dtype, 448.0, np.float32([0.5, 2]), np.float32([0.25, 0.25]))
    calls = history(sizes)
    calls[0][0][0] = 1e6  # beyond the type
    pool = written(layouts.create(layout, *sizes, F32), calls)
    assert_alike(pool, by_oracle(oracle, cases.empty(layout, sizes), calls))


@pytest.mark.parametrize("is_per_head", [False, True])
def test_float8_scales_are_measured_once(is_per_head: bool) -> None:
    """The first tokens that are not padding decide; later ones, larger or smaller, change nothing."""
    layout = Fp8("fp8_e4m3", is_measured=True, is_per_head=is_per_head)
    sizes = Sizes(9, 4, 2, 16)
    calls = history(sizes)
    k, v, slots = calls[0]
    pool = layouts.create(layout, *sizes, F32)
    nothing = (np.full_like(k[:2], 1e4), np.full_like(v[:2], 1e4), np.array([-1, 0]))
    pool = written(pool, [nothing])
    assert not np.any(pool.arrays["k_scale"])
    pool = written(pool, [(k, v, slots), (k[:1] * 9, v[:1] * 9, np.array([slots[-1] + 1]))])
    for name, x in (("k_scale", k), ("v_scale", v)):
        parts = [x[:, head] for head in (0, 1)] if is_per_head else [x, x]
        want = [reference.measured_scale(part, 448.0) for part in parts]
        np.testing.assert_allclose(pool.arrays[name], want, rtol=1e-6)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_float8_as_bytes_is_float8(name: str) -> None:
    """What a CPU keeps, to the bit, and what it reads of it."""
    layout, sizes = dataclasses.replace(LAYOUTS[name], k_scale=(0.5, 0.25)), Sizes(9, 4, 2, 16)
    on_cpu, on_gpu = layout.on("cpu"), layout.on("gpu")
    assert on_gpu == layout
    calls = history(sizes)
    of_bytes, of_floats = (written(layouts.create(each, *sizes, F32), calls) for each in (on_cpu, on_gpu))
    for array, want in zip(of_bytes.arrays.values(), of_floats.arrays.values(), strict=True):
        assert array.dtype == jnp.uint8
        np.testing.assert_array_equal(array, np.asarray(want).view(np.uint8))
    np.testing.assert_array_equal(blocks_of(of_bytes), blocks_of(of_floats))


@pytest.mark.parametrize("base", ["head_major", "fused"])
def test_int8_on_another_order_of_axes(base: str) -> None:
    layout = Int8PerToken(LAYOUTS[base])
    sizes = Sizes(9, 4, 2, 16)
    oracle = reference.int8_per_token(getattr(reference, base), *sizes[1:])
    calls = history(sizes)
    pool = written(layouts.create(layout, *sizes, F32), calls)
    want = by_oracle(oracle, cases.empty(layout, sizes), calls)
    assert_alike(pool, want)
    k, v = blocks_of(pool)
    for got, wanted in zip((k[3], v[3]), oracle.read(want, 3), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_every_layout_of_ours_has_an_oracle() -> None:
    for name, layout in LAYOUTS.items():
        if layouts.is_ours(layout):
            assert cases.oracle(name, cases.sizes_of(layout)) is not None, name
