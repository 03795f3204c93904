"""Powers of two by polynomial, against float64: their error is small beside the rounding of weights."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gpu import exponents, tuning
from pallas_kernels.gpu.prompt import products
from pallas_kernels.gpu.targets import TARGETS

BFLOAT16_ROUNDING, FLOAT16_ROUNDING = 2.0**-9, 2.0**-11


def test_a_polynomial_is_as_close_as_it_says() -> None:
    x = np.linspace(-126, products.SLACK, 200_001, dtype=np.float32)
    got = np.asarray(jax.jit(exponents.by_polynomial)(x), np.float64)
    error = np.abs(got / np.exp2(x.astype(np.float64)) - 1)
    normal = x > -125.5
    assert error[normal].max() < 1.05e-4 < min(BFLOAT16_ROUNDING / 18, FLOAT16_ROUNDING / 4)
    np.testing.assert_array_less(got[~normal], 2.0**-125)


def test_nothing_is_left_of_what_is_not_seen() -> None:
    """A row that sees no token has a sum of zero; integers are exact."""
    x = jnp.array([-np.inf, -1e30, -127.5, -127.0, -3.0, 0.0, 8.0], jnp.float32)
    np.testing.assert_array_equal(exponents.by_polynomial(x), [0, 0, 0, 0, 0.125, 1, 256])


def test_one_group_of_columns_in_four_is_by_polynomial() -> None:
    x = jnp.asarray(np.random.default_rng(0).uniform(-9, 0, (4, 128)), jnp.float32)
    got = exponents.exp2(x, 4)
    differs = np.asarray(got != jnp.exp2(x)).any(axis=0)
    np.testing.assert_array_equal(np.flatnonzero(differs) // 8 % 4, 3)
    assert len(set(np.flatnonzero(differs) // 8)) == 4
    np.testing.assert_array_equal(exponents.exp2(x, 0), jnp.exp2(x))


def test_a_share_is_by_polynomial_where_exponents_are_slow() -> None:
    """A B200 computes 16 exponents a cycle, a B300 twice as many."""
    shares = {name: tuning.one_by_polynomial_in(target) for name, target in TARGETS.items()}
    assert {name: share for name, share in shares.items() if share} == {"10.0": 4}
