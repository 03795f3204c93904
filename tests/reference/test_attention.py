"""The oracle against dense attention written the other way round: whole matrices and masks, no cache."""

from typing import Any

import numpy as np
import pytest

from jaxpaged.research.verify.cases.decode import CASES, DecodeCase, case, make_inputs
from reference import attention, cache_ops


def dense_attention(c: DecodeCase, arrays: dict[str, np.ndarray], options: dict[str, Any]) -> np.ndarray:
    """Compute every row by a softmax over a full [num_q_heads, max_len] matrix."""
    q, tables, lens = arrays["q"].astype(np.float64), arrays["block_tables"], arrays["seq_lens"]
    longest = max(1, int(lens.max()))
    heads = np.arange(c.num_q_heads)
    out = np.zeros(q.shape)
    for row, n in enumerate(lens):
        blocks = tables[row, : -(-int(n) // c.block_size)]
        dense = []
        for name in ("k", "v"):
            cache = arrays[f"{name}_cache"].astype(np.float64)[blocks]
            if c.kv_layout == "head_major":
                cache = cache.transpose(0, 2, 1, 3)
            tokens = cache.reshape(-1, c.num_kv_heads, c.head_dim)[:n]
            tokens = tokens * np.reshape(options.get(f"{name}_scale", 1.0), (-1, 1))
            padded = np.zeros((longest, *tokens.shape[1:]))
            padded[:n] = tokens
            dense.append(np.repeat(padded, c.group_size, axis=1))
        t = np.arange(longest)[None]
        s = np.einsum("hd,thd->ht", q[row], dense[0]) * options.get("scale", c.head_dim**-0.5)
        if c.soft_cap:
            s = c.soft_cap * np.tanh(s / c.soft_cap)
        if c.alibi:
            s = s + options["alibi_slopes"][:, None] * (t - n + 1)
        mask = np.broadcast_to(t < n, s.shape)
        if c.sliding_window:
            mask = mask & (n - 1 - t < c.sliding_window)
        if c.attention_chunk:
            mask = mask & (t >= n - 1 - (n - 1) % c.attention_chunk)
        if c.block_sparse:
            size, local, stride, step, rank = c.block_sparse
            slide = (
                heads + rank * c.num_q_heads if step >= 0 else heads // c.group_size + rank * c.num_kv_heads
            )
            vertical = (t // size + abs(step) * slide[:, None] + 1) % stride == 0
            mask = mask & (vertical | (t // size > (n - 1) // size - local))
        weights = np.where(mask, np.exp(s), 0)
        sink = np.exp(options["sinks"].astype(np.float64))[:, None] if c.sinks else 0
        if n:
            out[row] = np.einsum("ht,thd->hd", weights / (weights.sum(1, keepdims=True) + sink), dense[1])
    return out


@pytest.mark.parametrize("c", CASES, ids=str)
def test_both_oracles_equal_dense_attention(c: DecodeCase) -> None:
    arrays, options = make_inputs(c), c.options
    want = dense_attention(c, arrays, options)
    # float64 sums of at most a few thousand terms near one: 1e-12 leaves three digits to spare.
    np.testing.assert_allclose(attention.paged_attention(**arrays, **options), want, rtol=1e-12, atol=1e-12)
    v2 = attention.paged_attention_v2(**arrays, **options, partition_size=c.partition_size)
    np.testing.assert_allclose(v2, want, rtol=1e-12, atol=1e-12)


def test_partials_hold_the_tokens_of_their_partition_only() -> None:
    c = case("around_a_tile")
    arrays = make_inputs(c)
    partials = attention.partition_partials(**arrays, **c.options, partition_size=64)
    assert partials.out.shape == (5, 4, 3, 64)
    live = partials.sum[:, 0] > 0
    assert live.sum(1).tolist() == [1, 1, 2, 2, 3]  # rows of 63, 64, 65, 127 and 129 tokens
    assert np.isneginf(partials.max[:, 0][~live]).all()
    only_token = partials.out[2, :, 1]  # token 64 of row 2, alone in its partition: weight exp(0)
    value = cache_ops.gather(arrays["v_cache"], arrays["block_tables"][2], 65)[64].astype(np.float64)
    np.testing.assert_array_equal(only_token, np.repeat(value, 2, axis=0))


def test_a_sink_takes_its_share() -> None:
    c = case("one_token")
    arrays, options = make_inputs(c), c.options
    alone = attention.paged_attention(**arrays, **options)
    half = attention.paged_attention(
        **arrays | {"q": np.zeros_like(arrays["q"])}, **options, sinks=np.zeros(4)
    )  # one token of logit 0 beside a sink of logit 0
    np.testing.assert_allclose(half, alone / 2, rtol=1e-12)


def test_writing_then_gathering_gives_the_tokens_back() -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    for layout, shape in (("token_major", (4, 2, 3, 8)), ("head_major", (4, 3, 2, 8))):
        empty = np.full(shape, np.nan, np.float32)
        slots = np.array([6, 7, -1, 2, 3])  # block 3, a padding token, block 1
        k_cache, v_cache = cache_ops.reshape_and_cache(k, v, empty, empty, slots, kv_layout=layout)
        np.testing.assert_array_equal(cache_ops.gather(k_cache, np.array([3, 1]), 4, layout), k[[0, 1, 3, 4]])
        np.testing.assert_array_equal(cache_ops.gather(v_cache, np.array([3, 1]), 4, layout), v[[0, 1, 3, 4]])
        assert np.isnan(empty).all()
        assert np.isnan(k_cache[2]).all()


def test_copies_happen_one_after_the_other() -> None:
    (cache,) = cache_ops.copy_blocks([np.arange(5)[:, None]], np.array([[1, 2], [2, 3], [4, 2], [9, 1]]))
    assert cache[:, 0].tolist() == [0, 1, 4, 1, 4]
    swapped = cache_ops.swap_blocks(
        np.arange(5)[:, None], np.zeros((3, 1), int), np.array([[4, 1], [3, 2], [1, 7]])
    )
    assert swapped[:, 0].tolist() == [0, 4, 3]


def test_quantise_saturates_and_rounds() -> None:
    x = np.array([[[1e6, -1e6, 0.26, -0.24]]])
    e4m3 = cache_ops.quantise(x, 0.5, np.dtype("float8_e4m3fn"))
    assert e4m3.astype(np.float32).ravel()[:2].tolist() == [448.0, -448.0]
    int8 = cache_ops.quantise(x, np.array([0.5]), np.dtype(np.int8))
    assert int8.ravel().tolist() == [127, -128, 1, 0]
