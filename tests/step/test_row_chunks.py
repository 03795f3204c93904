"""Rows in pieces: each line is what all rows together have there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.step.row_chunks import in_row_chunks


@pytest.mark.parametrize("at_once", [None, 1, 3, 4, 7, 9])
def test_chunks_of_rows_make_what_all_rows_together_make(at_once):
    rows = {"x": jnp.arange(14.0).reshape(7, 2), "row": jnp.arange(7)}
    seen = []

    def compute(its):
        seen.append(its["row"].shape[0])
        return its["x"] * 2, {"none": None, "which": its["row"] + jnp.sum(its["x"], axis=1).astype(int)}

    run = jax.jit(lambda rows, num: in_row_chunks(compute, rows, num, at_once))
    doubled, its = run(rows, 7)
    np.testing.assert_array_equal(doubled, 2 * np.arange(14.0).reshape(7, 2))
    np.testing.assert_array_equal(its["which"], [1, 6, 11, 16, 21, 26, 31])
    assert its["none"] is None
    assert {*seen} == {min(at_once or 7, 7)}
    for num in range(7):  # rows behind those in use are not looked at by more pieces than need be
        doubled, its = run(rows, num)
        np.testing.assert_array_equal(doubled[:num], 2 * np.arange(14.0).reshape(7, 2)[:num])
        if at_once is not None and at_once < 7:
            assert not np.any(its["which"][-(-num // at_once) * at_once :])
