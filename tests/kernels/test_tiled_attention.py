"""Attention of query tiles and the cache write, against the NumPy oracles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.research.verify.cases import tiles
from pallas_kernels import native, ops
from reference import attention as reference_attention
from reference import cache_ops as reference_cache_ops
from tests.kernels.checks import TILES as attend
from tests.kernels.checks import assert_close

# Queries and keys of unit variance in float32: sums of up to 300 terms, outputs below 4.
TOLERANCE = 1e-5


def make_case(
    num_q_heads, num_kv_heads, head_dim, block_size, seq_lens, tile_len, seed=0, window=None, chunk=None
):
    """Return tiles that end where their sequence ends, over shuffled blocks; slots that nobody owns hold NaN.

    With a window or chunks, the null block replaces blocks that no query sees, as in the allocator's tables.
    """
    rng = np.random.default_rng(seed)
    num_tiles = len(seq_lens)
    width = -(-max(seq_lens) // block_size) + 2
    num_blocks = 1 + num_tiles * width
    caches = rng.normal(size=(2, num_blocks, block_size, num_kv_heads, head_dim)).astype(np.float32)
    tables = 1 + rng.permutation(num_blocks - 1)[: num_tiles * width].reshape(num_tiles, width)
    live = np.zeros((num_blocks, block_size), bool)
    for tile, seq_len in enumerate(seq_lens):
        start = max(seq_len - tile_len, 0)
        begin = 0 if window is None else max(start + 1 - window, 0)
        begin = begin if chunk is None else start // chunk * chunk
        for position in range(begin, seq_len):
            live[tables[tile, position // block_size], position % block_size] = True
        tables[tile, : begin // block_size] = 0
        tables[tile, -(-seq_len // block_size) :] = 10**6  # must not be read
    caches[:, ~live] = np.nan
    q = rng.normal(size=(num_tiles, tile_len, num_q_heads, head_dim)).astype(np.float32)
    return q, caches[0], caches[1], tables.astype(np.int32), np.array(seq_lens, np.int32)


SHAPES = {
    # num_q_heads, num_kv_heads, head_dim, block_size
    "few heads": (9, 3, 16, 16),
    "many heads": (32, 4, 8, 8),
    "one kv head, blocks of one token": (5, 1, 8, 1),
    "a head each, blocks longer than a chunk": (4, 4, 8, 256),
}
FEW, MANY, ONE, EACH = SHAPES
LENGTHS = [1, 15, 16, 17, 128, 129, 300, 0]
NO_NATIVE = native.why_not(jnp.dtype("float32"))
IMPLEMENTATIONS = [
    "xla",
    pytest.param(
        "native", marks=pytest.mark.skipif(bool(NO_NATIVE), reason=f"no native kernels: {NO_NATIVE}")
    ),
]


def covering(*pairs):
    """Check that pairs of a shape and a window cover both well, and add all pairs for native kernels.

    XLA compiles a program a pair: each shape has two pairs, and each window two shapes. The native kernels
    are compiled anyway.
    """
    windows = sorted({window for _, window in pairs}, key=str)
    all_pairs = [(name, window) for name in SHAPES for window in windows]
    assert all(sum(name == pair[0] for pair in pairs) == 2 for name in SHAPES)
    assert all(sum(window == pair[1] for pair in pairs) >= 2 for window in windows)
    native_params = IMPLEMENTATIONS[1]
    params = [pytest.param(SHAPES[name], window, "xla", id=f"{name}-{window}-xla") for name, window in pairs]
    params += [
        pytest.param(
            SHAPES[name],
            window,
            *native_params.values,
            marks=native_params.marks,
            id=f"{name}-{window}-native",
        )
        for name, window in all_pairs
    ]
    return pytest.mark.parametrize(("shape", "window", "implementation"), params)


@functools.cache
def decode_case(shape, window):
    """Return a decode step and its answer."""
    q, k, v, tables, seq_lens = make_case(*shape, LENGTHS, 1, window=window)
    want = reference_attention.paged_attention(
        q[:, 0], k, v, tables, seq_lens, scale=0.3, sliding_window=window
    )
    return (q, k, v, tables, seq_lens - 1, seq_lens), want


@functools.cache
def tile_case(shape, window):
    """Return tiles of six tokens, the answer for each token, and which tokens are queries."""
    tile_len = 6
    lengths = [6, 7, 17, 130, 4]  # the last tile has two places of padding
    q, k, v, tables, seq_lens = make_case(*shape, lengths, tile_len, window=window)
    starts = np.maximum(seq_lens - tile_len, 0).astype(np.int32)
    answers = []
    for i in range(tile_len):
        upto = np.where(starts + i < seq_lens, starts + i + 1, 0).astype(np.int32)
        want = reference_attention.paged_attention(
            q[:, i], k, v, tables, upto, scale=0.3, sliding_window=window
        )
        answers.append((want, upto > 0))
    return (q, k, v, tables, starts, seq_lens), answers


@covering(
    (FEW, None), (FEW, 45), (MANY, 1), (MANY, 128), (ONE, None), (ONE, 45), (EACH, 1), (EACH, 128)
)  # fmt: skip
def test_decode_equals_the_oracle(shape, window, implementation):
    arrays, want = decode_case(shape, window)
    out = attend(*arrays, scale=0.3, sliding_window=window, implementation=implementation)[:, 0]
    np.testing.assert_allclose(out, want, atol=TOLERANCE, rtol=TOLERANCE)
    assert not np.any(out[LENGTHS.index(0)])


@covering((FEW, None), (FEW, 4), (MANY, None), (MANY, 20), (ONE, 4), (ONE, 20), (EACH, None), (EACH, 20))
def test_each_query_of_a_tile_equals_a_decode_at_its_place(shape, window, implementation):
    arrays, answers = tile_case(shape, window)
    out = np.asarray(attend(*arrays, scale=0.3, sliding_window=window, implementation=implementation))
    for i, (want, used) in enumerate(answers):
        np.testing.assert_allclose(out[used, i], want[used], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(6, 2), (24, 3)])
def test_slopes_soft_cap_and_sinks_in_tiles_equal_the_oracle(num_q_heads, num_kv_heads, implementation):
    """XLA computes few heads as one, many one by one."""
    q, k, v, tables, seq_lens = make_case(num_q_heads, num_kv_heads, 16, 8, [2, 45, 139], 2)
    starts = seq_lens - 2
    rng = np.random.default_rng(1)
    biases = {name: rng.normal(size=num_q_heads).astype(np.float32) for name in ("alibi_slopes", "sinks")}
    options = {"scale": 0.3, "soft_cap": 2.0, **biases}
    out = attend(q, k, v, tables, starts, seq_lens, **options, implementation=implementation)
    for i in range(2):
        want = reference_attention.paged_attention(q[:, i], k, v, tables, starts + i + 1, **options)
        np.testing.assert_allclose(out[:, i], want, atol=TOLERANCE, rtol=TOLERANCE)


CHUNKED = [c for c in tiles.CASES if c.attention_chunk]


@pytest.mark.parametrize("c", [c for c in tiles.CASES if c.cache_dtype] + CHUNKED, ids=str)
def test_tiles_of_quantised_caches_and_of_chunks_equal_the_oracle(c):
    """XLA has weights in q's type."""
    (q, k, v, tables, seq_lens), starts, _ = tiles.inputs(c)
    out = attend(q, k, v, tables, starts, seq_lens, **c.options, implementation="xla")
    assert_close(c, np.asarray(out, np.float64), c.dtype)


@pytest.mark.skipif(bool(NO_NATIVE), reason=f"no native kernels: {NO_NATIVE}")
@pytest.mark.parametrize("c", [*CHUNKED, tiles.CASES[2]], ids=str)
def test_native_kernels_look_up_no_block_before_a_bound(c):
    """Entries before a tile's window or chunk name no block of the cache."""
    (q, k, v, tables, seq_lens), starts, _ = tiles.inputs(c)
    assert not set(tables[:, 0]) <= {*range(len(k))}
    out = attend(q, k, v, tables, starts, seq_lens, **c.options, implementation="native")
    assert_close(c, np.asarray(out, np.float64), "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (1, None), (50, None), (130, None), (None, 99)])
def test_a_tile_does_not_depend_on_its_neighbours(window, chunk, implementation):
    """A bound begins at the first, second and fifth chunk that XLA computes, and in the middle of a tile."""
    q, k, v, tables, seq_lens = make_case(6, 2, 16, 8, [40, 200, 3, 600], 4, window=window, chunk=chunk)
    starts = np.maximum(seq_lens - 4, 0).astype(np.int32)
    bounds = {"sliding_window": window, "attention_chunk": chunk}
    options = {"scale": 0.3, **bounds, "implementation": implementation}
    together = attend(q, k, v, tables, starts, seq_lens, **options)
    for tile in range(4):
        others = np.arange(4) != tile
        alone = attend(q, k, v, tables, starts, np.where(others, 0, seq_lens), **options)
        np.testing.assert_array_equal(alone[tile, : seq_lens[tile]], together[tile, : seq_lens[tile]])


@pytest.mark.parametrize(
    ("seq_lens", "bound", "turns"),
    [
        ([600, 900, 0], {}, 8),
        ([600, 900, 0], {"sliding_window": 130}, 3),  # from 467, in the fourth chunk of 128 tokens, and 767
        ([600, 3, 0], {"sliding_window": 130}, 2),
        ([3, 20000, 0], {"sliding_window": 130}, 2),
        ([600, 20000, 0], {"attention_chunk": 256}, 1),  # from 512 and 19,968
        ([0, 0, 0], {"sliding_window": 130}, 0),
    ],
)
def test_xla_takes_the_turns_that_a_bound_needs(monkeypatch, seq_lens, bound, turns):
    """The tiles' places do not matter: each begins with the first chunk that it sees. A decode step reads 256
    tokens a turn.
    """
    seen = []

    def spy(lower, upper, body, init):
        seen.extend(range(lower, upper))
        return init

    monkeypatch.setattr(jax.lax, "fori_loop", spy)
    q, k, v, tables, seq_lens = make_case(6, 2, 16, 8, [*seq_lens, 1], 4)
    q, tables, seq_lens = q[:-1], tables[:-1], seq_lens[:-1]
    starts = np.maximum(seq_lens - 4, 0).astype(np.int32)
    arrays = map(jnp.asarray, (q, k, v, tables, starts, seq_lens))
    ops.tiled_paged_attention(*arrays, scale=0.3, **bound, implementation="xla")
    assert seen == list(range(turns))
    seen.clear()
    ops.paged_attention(*map(jnp.asarray, (q[:, 0], k, v, tables, seq_lens)), **bound, implementation="xla")
    assert seen == list(range(4 if turns == 8 else min(turns, 2)))


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_reshape_and_cache_equals_the_oracle(num_tokens):
    rng = np.random.default_rng(0)
    caches = rng.normal(size=(2, 7, 4, 2, 8)).astype(np.float32)
    new = rng.normal(size=(2, num_tokens, 2, 8)).astype(np.float32)
    slots = rng.permutation(np.arange(4, 28))[:num_tokens].astype(np.int32)
    k, v = ops.reshape_and_cache(*map(jnp.asarray, (new[0], new[1], caches[0], caches[1], slots)))
    want = reference_cache_ops.reshape_and_cache(new[0], new[1], caches[0].copy(), caches[1].copy(), slots)
    np.testing.assert_array_equal(k, want[0])
    np.testing.assert_array_equal(v, want[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_cache": jnp.zeros((4, 8, 16))}, "k_cache.shape=.* must be"),
        ({"v_cache": jnp.zeros((4, 8, 2, 8))}, "v_cache.shape=.* must be"),
        ({"v_cache": jnp.zeros((4, 8, 2, 16), jnp.bfloat16)}, "v_cache.dtype=.* must be"),
        ({"q": jnp.zeros((3, 6, 16))}, r"q.shape=.* must be \[num_tiles, tile_len"),
        ({"q": jnp.zeros((3, 1, 6, 8))}, "must end with q's head_dim=8"),
        ({"q": jnp.zeros((3, 1, 5, 16))}, "num_q_heads=5 must be a multiple of num_kv_heads=2"),
        ({"q": jnp.zeros((3, 1, 6, 16), jnp.bfloat16)}, "must be q's bfloat16"),
        (
            dict.fromkeys(("k_cache", "v_cache"), jnp.zeros((4, 8, 2, 16), jnp.int8)),
            "k_scale=None must be a scale for a cache of int8",
        ),
        ({"block_tables": jnp.zeros((2, 2), jnp.int32)}, r"block_tables.shape=\(2, 2\) must be \(3, 2\)"),
        ({"seq_lens": jnp.zeros(3, jnp.uint8)}, "seq_lens.dtype=uint8 must be int32"),
        ({"table_rows": jnp.zeros(3)}, "table_rows.dtype=float32 must be int32"),
        ({"table_rows": jnp.zeros(2, jnp.int32)}, r"table_rows.shape=\(2,\) must be \(3,\)"),
        (
            {"table_rows": jnp.zeros(3, jnp.int32), "block_tables": jnp.int32(0)},
            r"block_tables.shape=\(\) must be \[num_seqs",
        ),
        ({"query_starts": jnp.zeros((3, 1), jnp.int32)}, "query_starts.shape=.* must be"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
    ],
)
def test_bad_arrays_are_refused(change, message):
    good = {
        "q": jnp.zeros((3, 1, 6, 16)),
        "k_cache": jnp.zeros((4, 8, 2, 16)),
        "v_cache": jnp.zeros((4, 8, 2, 16)),
        "block_tables": jnp.zeros((3, 2), jnp.int32),
        "query_starts": jnp.zeros(3, jnp.int32),
        "seq_lens": jnp.zeros(3, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        ops.tiled_paged_attention(**good | change, scale=1.0)


def test_a_kernel_is_refused_for_longer_tiles():
    q, k, v, tables, seq_lens = make_case(4, 2, 64, 8, [90, 3], 65)
    arrays = (jnp.asarray(x, jnp.bfloat16 if x.dtype == np.float32 else x.dtype) for x in (q, k, v, tables))
    with pytest.raises(NotImplementedError, match="mosaic_gpu serves tiles of at most 64 tokens, not 65"):
        ops.tiled_paged_attention(*arrays, seq_lens - 1, seq_lens, scale=1.0, implementation="mosaic_gpu")


def test_native_attention_is_refused_what_it_does_not_know():
    q, k, v, tables, seq_lens = make_case(4, 2, 16, 8, [9, 3], 1)
    q, k, v, *at = map(jnp.asarray, (q, k, v, tables, seq_lens - 1, seq_lens))
    scales, k, v = {"k_scale": 1.0, "v_scale": 1.0}, k.astype(jnp.int8), v.astype(jnp.int8)
    with pytest.raises(NotImplementedError, match="serve this call: it has no k_scale, v_scale. Use 'xla'"):
        ops.tiled_paged_attention(q, k, v, *at, scale=1.0, **scales, implementation="native")
