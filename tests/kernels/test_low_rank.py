"""Low-rank additions to products: by XLA and by the native kernel on each target, against NumPy in
float64.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.ops import low_rank
from tests.kernels import native_targets
from tests.kernels.native_targets import Kernels
from tests.kernels.test_native import bits, draw, each_dtype

WIDTHS, INPUTS, RANK, CHOICES, LAYERS = (70, 16, 33), 41, 32, 3, 2


@pytest.fixture(params=["plain", "xla", *native_targets.EACH])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Plain() if request.param == "plain" else native_targets.kernels(request.param)


class Plain:
    """`add_by_xla`, whose tiles are rows here."""

    def add_low_rank(self, y, x, a, b, choices, layer, widths):
        parts = low_rank.LowRank(jnp.asarray(a), jnp.asarray(b), widths)
        return np.asarray(
            low_rank.add_by_xla(jnp.asarray(y), jnp.asarray(x), parts, layer, jnp.asarray(choices))
        )


def matrices(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a and b of some layers and choices: panels whose last columns are zeros where a width is not
    whole.
    """
    a = draw(1, dtype, LAYERS, CHOICES, len(WIDTHS) * RANK // 16, INPUTS, 16)
    each = [
        [low_rank.pack(draw(7 * i + j, "float32", RANK, width)) for j, width in enumerate(WIDTHS)]
        for i in range(LAYERS * CHOICES)
    ]
    b = np.stack([np.concatenate(pieces) for pieces in each])
    return a, b.reshape(LAYERS, CHOICES, *b.shape[1:]).astype(a.dtype)


def expected(y, x, a, b, choices, layer) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums, and a bound of what was added up."""
    want, size = y.astype(np.float64), np.abs(y.astype(np.float64))
    for row, choice in enumerate(choices):
        if choice:
            its_a, its_b = (m[layer, choice - 1].astype(np.float64).swapaxes(0, 1) for m in (a, b))
            inner = (its_a.reshape(INPUTS, -1).T * x[row].astype(np.float64)).sum(1)
            inner_size = (np.abs(its_a).reshape(INPUTS, -1).T * np.abs(x[row].astype(np.float64))).sum(1)
            first, panel = 0, 0
            for piece, width in enumerate(WIDTHS):
                panels = -(-width // 16)
                matrix = its_b[:, panel : panel + panels].reshape(RANK, -1)[:, :width]
                mine = slice(piece * RANK, (piece + 1) * RANK)
                want[row, first : first + width] += inner[mine] @ matrix
                size[row, first : first + width] += inner_size[mine] @ np.abs(matrix)
                first, panel = first + width, panel + panels
    return want, size


@each_dtype
def test_what_is_added(kernels: Kernels, dtype: str) -> None:
    """Rows with each choice, in any order, more than are computed together; and rows without one."""
    a, b = matrices(dtype)
    for layer, choices in ((0, [2]), (1, [1, 0, 3, 1, 1, 0, 2, 1, 1, 1, 3]), (0, [0, 0])):
        x, y = draw(3, dtype, len(choices), INPUTS), draw(4, "float32", len(choices), sum(WIDTHS))
        got = kernels.add_low_rank(y, x, a, b, np.array(choices, np.int32), layer, WIDTHS)
        want, size = expected(y, x, a, b, choices, layer)
        # Sums of 41 and 32 numbers, rounded to 24 bits; XLA's inner ones in bfloat16 to 8 bits between them.
        rounding = 2**-8 if dtype == "bfloat16" and isinstance(kernels, Plain) else 1e-6
        assert (np.abs(got - want) <= rounding * size).all()
        none = np.array(choices) == 0
        np.testing.assert_array_equal(bits(got[none]), bits(y[none]))


@each_dtype
def test_bits_of_a_row_depend_on_nobody_and_on_no_choice_s_number(kernels: Kernels, dtype: str) -> None:
    a, b = matrices(dtype)
    choices = np.array([1, 2, 1, 3, 1, 1, 0, 1], np.int32)
    x, y = draw(3, dtype, len(choices), INPUTS), draw(4, "float32", len(choices), sum(WIDTHS))
    together = kernels.add_low_rank(y, x, a, b, choices, 1, WIDTHS)
    for row in (0, 3, 7):
        only = np.where(np.arange(len(choices)) == row, choices, 0).astype(np.int32)
        alone = kernels.add_low_rank(y, x, a, b, only, 1, WIDTHS)
        np.testing.assert_array_equal(bits(alone[row]), bits(together[row]))
    moved = np.where(choices > 0, choices % CHOICES + 1, 0).astype(np.int32)
    elsewhere = kernels.add_low_rank(y, x, np.roll(a, 1, axis=1), np.roll(b, 1, axis=1), moved, 1, WIDTHS)
    np.testing.assert_array_equal(bits(elsewhere), bits(together))


def test_types_must_be_the_same() -> None:
    a, b = (jnp.asarray(m) for m in matrices("float32"))
    y, x = jnp.zeros((1, sum(WIDTHS))), jnp.zeros((1, INPUTS), jnp.bfloat16)
    with pytest.raises(TypeError, match="x.dtype=.*bfloat16.* must be that of a and b, float32 and float32"):
        native.add_low_rank(y, x, a, b, jnp.ones(1, jnp.int32), 0, WIDTHS)
