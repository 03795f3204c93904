"""Sums of rows' numbers: right, differentiable, and to the bit those of a row computed alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxpaged import row_sums

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
    for width in (8, 48, 64, 576):
        x = np.random.default_rng(width).normal(size=(144, width)).astype(np.float32) * 4
        many = np.asarray(jax.jit(function)(x))
        np.testing.assert_allclose(many, PLAIN[function](x.astype(np.float64)), rtol=2e-5, atol=1e-5)
        for num in (2, 4, 16, 64):
            assert np.array_equal(jax.jit(function)(x[:num]), many[:num]), (width, num)


@pytest.mark.parametrize("function", PLAIN, ids=lambda its: its.__name__)
def test_gradients_are_those_of_the_plain_form(function):
    x = np.random.default_rng(0).normal(size=(2, 34)).astype(np.float32)
    check_grads(function, (x,), order=1, modes=["rev"], rtol=2e-3, atol=2e-3)


def test_what_is_not_finite_stays_so():
    for row, want in (([1, np.inf], np.inf), ([1, np.nan], np.nan), ([-np.inf, np.inf], np.nan)):
        assert np.array_equal(row_sums.total(jnp.array([row], jnp.float32)), [[want]], equal_nan=True)
    masked = jnp.array([[-np.inf, -np.inf], [0.0, -np.inf]])
    assert np.asarray(row_sums.logsumexp(masked)).tolist() == [[-np.inf], [0]]
