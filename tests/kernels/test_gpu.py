"""The kernels on a Hopper GPU, against the oracle."""

import jax
import numpy as np
import pytest

from pallas_kernels import ops
from tests.kernels.checks import assert_close, is_served, run, weights_dtype
from tests.shapes import CASES, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ops.default_implementation() != "mosaic_gpu", reason="needs a Hopper GPU"),
]


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("c", [c for c in CASES if is_served(c)], ids=str)
def test_kernels_equal_the_oracle(c: Case, version: str) -> None:
    first = run(c, version, implementation="mosaic_gpu")
    assert_close(c, first, weights_dtype(c))
    for _ in range(3):  # a result that moves is a race
        np.testing.assert_array_equal(run(c, version, implementation="mosaic_gpu"), first)
    assert jax.devices()[0].platform == "gpu"
