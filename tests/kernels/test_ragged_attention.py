"""Attention of flat batches, against the NumPy oracle, and the oracle against decode steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ops
from reference import attention as reference_attention
from tests import quick
from tests.kernels.interpreter import fresh_interpreter, races_found, shadow_reads

# Queries and keys of unit variance: outputs below 4, of sums of up to 90 terms; float32 and bfloat16.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
STATIC = ("scale", "sliding_window", "soft_cap", "max_query_len", "implementation", "interpret")
attend = quick.jit(ops.ragged_paged_attention, static_argnames=STATIC)

QUERY_LENS = (
    1,
    40,
    0,
    3,
    1,
    33,
)  # decode step, prompt, nobody, chunk, decode step, second chunk
SEQ_LENS = (25, 40, 17, 50, 1, 90)
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 20},
    "all": {
        "sliding_window": 30,
        "alibi_slopes": np.array([0.5, 0.3, 0.2, 0.1], np.float32),
        "soft_cap": 3.0,
        "sinks": np.array([0.5, -1.0, 0.0, 2.0], np.float32),
    },
}


@functools.cache
def make_case(head_dim=16, block_size=8, dtype="float32", num_padding=5):
    """Sequences over shuffled blocks, with NaN in places that nobody owns, and five tokens of padding."""
    rng = np.random.default_rng(0)
    num_seqs, width = len(SEQ_LENS), -(-max(SEQ_LENS) // block_size) + 1
    num_blocks = 1 + num_seqs * width
    caches = rng.normal(size=(2, num_blocks, block_size, 2, head_dim))
    tables = 1 + rng.permutation(num_blocks - 1).reshape(num_seqs, width)
    live = np.zeros((num_blocks, block_size), bool)
    for seq, seq_len in enumerate(SEQ_LENS):
        for position in range(seq_len):
            live[tables[seq, position // block_size], position % block_size] = True
        tables[seq, -(-seq_len // block_size) :] = 10**6  # must not be read
    caches[:, ~live] = np.nan
    q = rng.normal(size=(sum(QUERY_LENS) + num_padding, 4, head_dim))
    k, v, q = (np.asarray(jnp.asarray(x, dtype)) for x in (*caches, q))
    cu_query_lens = np.cumsum([0, *QUERY_LENS], dtype=np.int32)
    return q, k, v, tables.astype(np.int32), np.array(SEQ_LENS, np.int32), cu_query_lens


@functools.cache
def answer(name, head_dim=16, block_size=8, dtype="float32"):
    arrays = make_case(head_dim, block_size, dtype)
    return reference_attention.ragged_paged_attention(*arrays, scale=0.3, **OPTIONS[name])


def test_the_oracle_gives_decode_steps_their_answers():
    """The same queries, one a row: row r of the table as often as it has queries."""
    q, k, v, tables, _, _ = make_case()
    rows = np.repeat(np.arange(len(QUERY_LENS)), QUERY_LENS)
    upto = np.concatenate([n - np.arange(m)[::-1] for n, m in zip(SEQ_LENS, QUERY_LENS, strict=True)])
    want = reference_attention.paged_attention(
        q[: len(rows)], k, v, tables[rows], upto, scale=0.3, sliding_window=20
    )
    np.testing.assert_array_equal(answer("window")[: len(rows)], want)
    assert not answer("window")[len(rows) :].any()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("max_query_len", [None, 40])
def test_xla_equals_the_oracle(name, max_query_len):
    out = attend(*make_case(), scale=0.3, **OPTIONS[name], max_query_len=max_query_len, implementation="xla")
    np.testing.assert_allclose(out, answer(name), atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])


def test_only_decode_steps_need_no_tiles():
    q, k, v, tables, seq_lens, _ = make_case()
    cu_query_lens = np.array([0, 1, 2, 2, 3, 4, 5], np.int32)
    arrays = (q[:7], k, v, tables, seq_lens, cu_query_lens)
    out = attend(*arrays, scale=0.3, max_query_len=1, implementation="xla")
    want = reference_attention.ragged_paged_attention(*arrays, scale=0.3)
    np.testing.assert_allclose(out, want, atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])


@pytest.mark.usefixtures(fresh_interpreter.__name__)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_both_kernels_together_equal_the_oracle(name, capsys):
    arrays = make_case(64, 16, "bfloat16")
    with shadow_reads():
        operation = functools.partial(ops.ragged_paged_attention, scale=0.3, **OPTIONS[name], interpret=True)
        out = jax.jit(operation)(*arrays)
    want = answer(name, 64, 16, "bfloat16")
    tolerance = TOLERANCE["bfloat16"]
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=tolerance, rtol=tolerance)
    assert not races_found(capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": jnp.zeros((3, 1, 4, 16))},
            r"q.shape=\(3, 1, 4, 16\) must be \[num_tokens, num_q_heads, head_dim\]",
        ),
        ({"cu_query_lens": jnp.zeros(2, jnp.int32)}, r"cu_query_lens.shape=\(2,\) must be \(3,\)"),
        ({"cu_query_lens": jnp.zeros(3)}, "cu_query_lens.dtype=float32 must be int32"),
        (
            {"seq_lens": jnp.zeros((), jnp.int32)},
            r"seq_lens.shape=\(\) must be \[num_seqs\], with at least one",
        ),
        ({"max_query_len": 0}, "max_query_len=0 must be at least 1"),
        (
            dict.fromkeys(("k_cache", "v_cache"), jnp.zeros((4, 8, 2, 16), jnp.int8)),
            "k_scale=None must be a scale for a cache of int8",
        ),
    ],
)
def test_bad_arguments_are_refused(change, message):
    good = {
        "q": jnp.zeros((5, 4, 16)),
        "k_cache": jnp.zeros((4, 8, 2, 16)),
        "v_cache": jnp.zeros((4, 8, 2, 16)),
        "block_tables": jnp.zeros((2, 2), jnp.int32),
        "seq_lens": jnp.zeros(2, jnp.int32),
        "cu_query_lens": jnp.zeros(3, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        ops.ragged_paged_attention(**good | change, scale=1.0)
