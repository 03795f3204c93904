"""Sums of rows' numbers: right, differentiable, and to the bit those of a row computed alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxpaged import row_sums
from jaxpaged.sampling_filters import filter_rows
from tests.test_sampling import options

pytestmark = pytest.mark.usefixtures("optimized")
PLAIN = {
    row_sums.mean: lambda x: x.mean(axis=-1, keepdims=True),
    row_sums.total: lambda x: x.sum(axis=-1, keepdims=True),
    row_sums.logsumexp: lambda x: np.log(np.exp(x).sum(axis=-1, keepdims=True)),
    row_sums.softmax: lambda x: np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True),
}


@pytest.mark.parametrize("function", PLAIN, ids=lambda its: its.__name__)
def test_a_row_has_the_same_bits_in_any_number_of_rows(function):
    """Some have 4,096 numbers together, some fewer. All fill vectors, for XLA's exponentials outside of them
    differ in rare last bits.
    """
    for width in (8, 48, 64, 576, 2048):
        x = np.random.default_rng(width).normal(size=(144, width)).astype(np.float32) * 4
        many = np.asarray(jax.jit(function)(x))
        np.testing.assert_allclose(many, PLAIN[function](x.astype(np.float64)), rtol=2e-5, atol=1e-5)
        for num in (2, 4, 16, 64):
            assert np.array_equal(jax.jit(function)(x[:num]), many[:num]), (width, num)


@pytest.mark.parametrize(
    "vocab", [512, *(pytest.param(n, marks=pytest.mark.slow) for n in (97, 2003, 49_152))]
)
def test_filters_keep_the_same_tokens_in_any_number_of_rows(vocab):
    """A row's `top_p` is one at which a last bit of a sum decides: one keeps a token more than the other."""
    keep = jax.jit(filter_rows)
    logits = np.random.default_rng(vocab).normal(size=(2, vocab)).astype(np.float32) * 3
    scaled = logits - logits.max(axis=1, keepdims=True)

    def num_kept(rows, bounds):
        its = options([{"temperature": 1.0, "top_p": p} for p in bounds], [0] * len(bounds))
        return np.isfinite(keep(rows, its)).sum(axis=1).tolist()

    pairs = []
    for row in scaled:
        low, high = (np.array(p, np.float32).view(np.int32) for p in (0.5, 0.9))
        [few] = num_kept(row[None], [0.5])
        while high - low > 1:
            middle = (low + high) // 2
            if num_kept(row[None], [middle.view(np.float32)]) == [few]:
                low = middle
            else:
                high = middle
        [more] = num_kept(row[None], [high.view(np.float32)])
        pairs.append(([few, more], [low.view(np.float32), high.view(np.float32)]))
    for num_rows in (4, 16):
        for row, (want, bounds) in zip(scaled, pairs, strict=True):
            rows = np.tile(row, (num_rows, 1))
            assert num_kept(rows, bounds * (num_rows // 2)) == want * (num_rows // 2)


@pytest.mark.parametrize("num", [4, 16, 128, 384])
def test_running_sums_have_the_same_bits_in_any_number_of_rows(num):
    """Draws add groups of tokens, and tokens of a group, so."""
    x = np.random.default_rng(num).random((64, num)).astype(np.float32)
    add = jax.jit(lambda x: jnp.cumsum(x, axis=1))
    many = np.asarray(add(x))
    for num_rows in (1, 2, 4, 16, 33):
        assert np.array_equal(add(x[:num_rows]), many[:num_rows])


@pytest.mark.parametrize("function", PLAIN, ids=lambda its: its.__name__)
def test_gradients_are_those_of_the_plain_form(function):
    x = np.random.default_rng(0).normal(size=(2, 34)).astype(np.float32)
    check_grads(function, (x,), order=1, modes=["rev"], rtol=2e-3, atol=2e-3)


def test_what_is_not_finite_stays_so():
    for row, want in (([1, np.inf], np.inf), ([1, np.nan], np.nan), ([-np.inf, np.inf], np.nan)):
        assert np.array_equal(row_sums.total(jnp.array([row], jnp.float32)), [[want]], equal_nan=True)
    masked = jnp.array([[-np.inf, -np.inf], [0.0, -np.inf]])
    assert np.asarray(row_sums.logsumexp(masked)).tolist() == [[-np.inf], [0]]
