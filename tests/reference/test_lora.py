"""Adapters: added to a product, and merged into a weight."""

import numpy as np

from reference.lora import Update, added, merged


def test_an_update_by_hand():
    y, x = np.zeros((1, 4)), np.array([[1.0, 2.0]])
    update = Update(first=1, a=np.array([[3.0, 5.0]]), b=np.array([[1.0], [10.0]]), scale=2.0)
    np.testing.assert_array_equal(added(y, x, update), [[0, 2 * 13, 2 * 130, 0]])
    assert not y.any()


def test_a_product_of_merged_weights_is_the_product_with_what_is_added():
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((12, 7)), rng.standard_normal((3, 7))
    updates = [
        Update(first, rng.standard_normal((2, 7)), rng.standard_normal((5, 2)), 0.7) for first in (0, 6)
    ]
    weights = {"o.weight": weight, "other": x}
    got = merged(weights, {"o.weight": updates})
    want = added(added(x @ weight.T, x, updates[0]), x, updates[1])
    np.testing.assert_allclose(x @ got["o.weight"].T, want, rtol=1e-12)
    assert got["other"] is x
    np.testing.assert_array_equal(weight, weights["o.weight"])
