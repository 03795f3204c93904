"""Latent attention over entries of one vector a token: NumPy's numbers, and bits that no company changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native, ops
from pallas_kernels.layouts import Latent, create
from reference import latent as reference
from tests.kernels import native_targets

NO_NATIVE = native_targets.why_not("float32")
needs_native = pytest.mark.skipif(bool(NO_NATIVE), reason=f"no native kernels: {NO_NATIVE}")
BLOCK_SIZE, RANK, ROPE = 8, 40, 8
SEQ_LENS, QUERY_LENS = (37, 1, 16, 9), (37, 1, 1, 3)  # a prompt, its first token alone, a step, drafts
SCALE = 0.17


def inputs(num_heads, rope=ROPE):
    """Return queries, the pool, the tables, and lengths of sequences and queries."""
    rng = np.random.default_rng(0)
    dim, num_tokens = RANK + rope, sum(QUERY_LENS) + 2  # two of padding
    q = rng.standard_normal((num_tokens, num_heads, dim)).astype(np.float32)
    entries = rng.standard_normal((24, BLOCK_SIZE, 1, dim)).astype(np.float32)
    tables = np.zeros((4, 5), np.int32)
    ids = iter(rng.permutation(np.arange(1, 24)))
    for table, length in zip(tables, SEQ_LENS, strict=True):
        count = -(-length // BLOCK_SIZE)
        table[:count] = [next(ids) for _ in range(count)]
    pool = create(Latent(), *entries.shape, jnp.dtype("float32"))
    slots = jnp.arange(24 * BLOCK_SIZE)
    flat = jnp.asarray(entries.reshape(-1, 1, dim))
    pool = ops.write(pool, flat, jnp.full_like(flat, jnp.nan), slots)  # V is left out
    starts = np.cumsum([0, *QUERY_LENS])
    lengths = (jnp.asarray(each, jnp.int32) for each in (SEQ_LENS, starts))
    return jnp.asarray(q), pool, entries, jnp.asarray(tables), *lengths


CASES = [(4, ROPE, None), (48, 0, None), (4, ROPE, 11)]


@pytest.mark.parametrize(
    ("implementation", "num_heads", "rope", "window"),
    [
        *(pytest.param("native", *case, marks=needs_native) for case in CASES),
        *(pytest.param("xla", *case, marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_attention_over_latents_equals_the_oracle(implementation, num_heads, rope, window):
    q, pool, entries, tables, *lengths = inputs(num_heads, rope)
    same = {"v_dim": RANK, "scale": SCALE, "sliding_window": window}
    want = reference.latent_attention(np.asarray(q), entries, *map(np.asarray, (tables, *lengths)), **same)
    got = ops.latent_attention(q, pool, tables, *lengths, **same, implementation=implementation)
    # Scores of unit variance times about 1.2: outputs below 4, of sums of up to 37 terms in float32.
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("num_heads", [4, 48])
def test_a_token_has_the_same_bits_in_a_prompt_and_in_a_step(num_heads):
    q, pool, _, tables, seq_lens, starts = inputs(num_heads)
    attend = jax.jit(
        functools.partial(ops.latent_attention, v_dim=RANK, scale=SCALE, implementation="native"),
        static_argnames="max_query_len",
    )
    whole = attend(q, pool, tables, seq_lens, starts)
    for place in (0, 7, 8, 31, 36):
        step = attend(
            *(q[place : place + 1], pool, tables[:1], jnp.array([place + 1])),
            jnp.array([0, 1]),
            max_query_len=1,
        )
        np.testing.assert_array_equal(step[0], whole[place])


def test_a_block_has_one_vector_a_token():
    """DeepSeek V3: 576 numbers of 16 bits a token and layer, 70,272 bytes in all of its 61."""
    sizes = 16, 1, 576, jnp.dtype("bfloat16")
    assert 61 * Latent().block_bytes(*sizes) == 16 * 70_272


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_dim": 0}, r"v_dim=0 must be an int of \[1, 48\]"),
        ({"v_dim": 49}, r"v_dim=49 must be an int of \[1, 48\]"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    q, pool, _, tables, *lengths = inputs(4)
    with pytest.raises(ValueError, match=message):
        ops.latent_attention(q, pool, tables, *lengths, **{"v_dim": RANK, "scale": SCALE} | change)
    two = create(Latent(), 4, BLOCK_SIZE, 2, RANK, jnp.dtype("float32"))
    with pytest.raises(ValueError, match="must be 1 for latent attention"):
        ops.latent_attention(q, two, tables, *lengths, v_dim=RANK, scale=SCALE)


@needs_native
def test_a_product_of_each_head_is_each_heads_own_to_the_last_bit():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5, 20)).astype(np.float32)
    weights = rng.standard_normal((2, 3, 36, 20)).astype(np.float32)
    packed = jnp.stack([jnp.stack([native.pack(weight) for weight in layer]) for layer in weights])
    got = native.product(jnp.asarray(x), packed, 36, 1)
    for head in range(3):
        one = native.product(jnp.asarray(x[head]), packed[1], 36, head)
        np.testing.assert_array_equal(got[head], one)
        np.testing.assert_allclose(one, x[head] @ weights[1, head].T, atol=1e-4)
