"""Attention of flat batches, against the NumPy oracle, and the oracle against decode steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.research.verify.cases import ragged
from jaxpaged.research.verify.cases.frame import oracle
from pallas_kernels import ops
from reference import attention as reference_attention
from tests.kernels.interpreter import fresh_interpreter, races_found, shadow_reads

# Queries and keys of unit variance: outputs below 4, of sums of up to 90 terms; float32 and bfloat16.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
STATIC = (
    "scale",
    "sliding_window",
    "attention_chunk",
    "soft_cap",
    "max_query_len",
    "implementation",
    "interpret",
)
attend = jax.jit(ops.ragged_paged_attention, static_argnames=STATIC)

CASES = {c.name: c for c in ragged.CASES}


def test_the_oracle_gives_decode_steps_their_answers():
    """Queries are also computed one a row, where row r of the table repeats for each of its queries."""
    c = CASES["window"]
    q, k, v, tables, _, _ = ragged.inputs(c)
    rows = np.repeat(np.arange(len(c.query_lens)), c.query_lens)
    upto = np.concatenate([n - np.arange(m)[::-1] for n, m in zip(c.seq_lens, c.query_lens, strict=True)])
    want = reference_attention.paged_attention(q[: len(rows)], k, v, tables[rows], upto, **c.options)
    got = oracle(c)[0]
    np.testing.assert_array_equal(got[: len(rows)], want)
    assert not got[len(rows) :].any()


@pytest.mark.parametrize("name", ["plain", "window", "all"])
@pytest.mark.parametrize("max_query_len", [None, 40])
def test_xla_equals_the_oracle(name, max_query_len):
    c = CASES[name]
    out = attend(*ragged.inputs(c), **c.options, max_query_len=max_query_len, implementation="xla")
    np.testing.assert_allclose(out, oracle(c)[0], atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])


def test_only_decode_steps_need_no_tiles():
    c = CASES["only decode steps"]
    out = attend(*ragged.inputs(c), **c.options, max_query_len=1, implementation="xla")
    np.testing.assert_allclose(out, oracle(c)[0], atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])


@pytest.mark.usefixtures(fresh_interpreter.__name__)
@pytest.mark.parametrize("name", ["bfloat16", pytest.param("bfloat16, all", marks=pytest.mark.slow)])
def test_both_kernels_together_equal_the_oracle(name, capsys):
    c = CASES[name]
    with shadow_reads():
        operation = functools.partial(ops.ragged_paged_attention, **c.options, interpret=True)
        out = jax.jit(operation)(*ragged.inputs(c))
    tolerance = TOLERANCE["bfloat16"]
    np.testing.assert_allclose(np.asarray(out, np.float64), oracle(c)[0], atol=tolerance, rtol=tolerance)
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
