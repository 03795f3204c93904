"""Products with weights of few bits: of each kind of GGUF's blocks, and of fp8, on each target, against the
oracle.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.models.files.gguf import blocks as gguf_blocks
from jaxpaged.models.files.gguf.blocks import FORMATS
from jaxpaged.models.quantised.codes import CodedRows, CodeFormat, packed
from pallas_kernels import native, quantised
from reference import quantisation, quantised_checkpoints
from tests.kernels import native_targets
from tests.kernels.native_targets import Kernels
from tests.kernels.test_native import DTYPES, bits, draw, each_dtype
from tests.reference.test_quantisation import blocks

FLOATS = "fp8, a scale for 128 inputs"
each_kind = pytest.mark.parametrize("kind", [*FORMATS, FLOATS])


@pytest.fixture(params=["xla", *native_targets.EACH])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_targets.kernels(request.param)


def drawn(kind: str, out_features: int, in_features: int) -> tuple[CodeFormat, CodedRows, np.ndarray]:
    """Return a kind's codes and scales, and the weight they stand for by the oracle."""
    if kind in FORMATS:
        its = blocks(kind, out_features, in_features)
        return FORMATS[kind], gguf_blocks.rows(its, kind, "weight"), quantisation.dequantise(its, kind)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (out_features, in_features)).astype(np.uint8)
    codes[codes & 127 == 127] = 0
    codes[0, :256] = np.where(np.arange(256) & 127 == 127, 0, np.arange(256))  # every number
    scales = (0.02 * rng.standard_normal((out_features, in_features // 128))).astype(np.float32)
    want = quantised_checkpoints.scaled(quantised_checkpoints.e4m3(codes), scales)
    return (
        CodeFormat(8, 128, "float32", has_minima=False, is_float=True),
        CodedRows(codes, scales, None),
        want,
    )


def weight_of(kind: str, out_features: int, in_features: int) -> tuple[quantised.Quantised, np.ndarray]:
    """Return a packed weight, and a bound of what is added up where x is 1: of codes, and of minima."""
    its, rows, want = drawn(kind, out_features, in_features)
    [weight] = packed([(its, rows)], in_features, jnp.dtype("float32")).segments
    if its.is_float:
        return weight, np.abs(want.astype(np.float64))
    codes, scales = np.abs(rows.codes.astype(np.float64)), np.abs(rows.scales.astype(np.float64))
    sizes = (codes.reshape(*scales.shape, -1) + quantised.OFFSET) * scales[..., None]
    if rows.minima is not None:
        sizes += np.abs(rows.minima.astype(np.float64))[..., None]
    return weight, sizes.reshape(out_features, -1)


@each_kind
def test_a_widened_weight_is_the_file_s_own(kind: str) -> None:
    """Each bit of all of it, and of some rows: nothing is lost in packing."""
    weight, _ = weight_of(kind, 45, 512)
    _, _, want = drawn(kind, 45, 512)
    np.testing.assert_array_equal(weight.widened(), want)
    some = np.array([3, 44, 3, 0, 32], np.int32)
    np.testing.assert_array_equal(weight.rows(jnp.asarray(some)), want[some])


@each_dtype
@each_kind
def test_product(kernels: Kernels, dtype: str, kind: str) -> None:
    """One row and many; panels that are whole and that are not."""
    for num_rows, out_features in ((1, 100), (2, 17), (23, 70)):
        weight, sizes = weight_of(kind, out_features, 512)
        x = draw(1, dtype, num_rows, 512)
        y = kernels.quantised_product(x, weight)
        assert (y.dtype, y.shape) == (np.float32, (num_rows, out_features))
        wide = drawn(kind, out_features, 512)[2].astype(np.float64)
        error = np.abs(y - x.astype(np.float64) @ wide.T)
        # Each of 512 sums is rounded to 24 bits of what has been added up; up and down alike.
        assert (error <= 1e-6 * (np.abs(x.astype(np.float64)) @ sizes.T)).all()


@each_dtype
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", FLOATS])
def test_bits_of_a_row_do_not_depend_on_the_others(kernels: Kernels, dtype: str, kind: str) -> None:
    """The bits depend neither on the number of rows, nor on which rows are zero: those give zeros."""
    weight, _ = weight_of(kind, 70, 512)
    x = draw(1, dtype, 21, 512)
    together = kernels.quantised_product(x, weight)
    for num_rows in (1, 2, 3, 7):
        np.testing.assert_array_equal(
            bits(kernels.quantised_product(x[-num_rows:], weight)), bits(together[-num_rows:])
        )
    for live in (range(20, 21), [0, 19], range(3, 14)):
        is_live = np.isin(np.arange(21), live)[:, None]
        y = kernels.quantised_product(np.where(is_live, x, -0.0).astype(x.dtype), weight)
        np.testing.assert_array_equal(bits(y), bits(np.where(is_live, together, np.float32(0))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_of_a_stack_and_rows_with_fewer_inputs(dtype: str) -> None:
    """What rows lack to whole groups stands for zeros."""
    weight, _ = weight_of("Q4_1", 96, 512)  # three panels: the first two are a layer, the last two another
    sides = (weight.codes, weight.scales, weight.minima)
    stack = quantised.Quantised(*(np.stack([side[:2], side[1:]]) for side in sides), 4, 40)
    x = jnp.asarray(draw(1, dtype, 3, 500))
    for layer in (0, 1):
        want = native.quantised_product(jnp.pad(x, ((0, 0), (0, 12))), stack.of_layer(layer))
        np.testing.assert_array_equal(native.quantised_product(x, stack, jnp.int32(layer)), want)
    with pytest.raises(ValueError, match="a weight of 512 inputs does not take rows of 513"):
        native.quantised_product(jnp.zeros((1, 513), dtype), stack)


def test_what_cannot_be_packed() -> None:
    codes, scales = np.zeros((2, 36), np.uint8), np.zeros((2, 3), np.float16)
    with pytest.raises(ValueError, match="bits=5 must be 8 or 4"):
        quantised.pack(codes, scales, bits=5)
    with pytest.raises(
        ValueError, match="in_features=36 must be 3 groups of whole words, which have 8 codes"
    ):
        quantised.pack(codes, scales, bits=4)
