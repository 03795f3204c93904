"""The Mosaic GPU kernel of products with quantised weights in Pallas' GPU interpreter, with race detection.

As `test_mosaic_interpreter.py` does it for attention. There is no product of registers in the interpreter:
what a GPU has as a wgmma's operand goes through shared memory here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.models import layers
from jaxpaged.models.files.gguf import blocks as gguf_blocks
from jaxpaged.models.quantised.codes import (
    CodedRows,
    CodeFormat,
    QuantisedWeight,
    SegmentSpec,
    implementations,
    packed,
    zeros,
)
from jaxpaged.models.quantised.on_load import float8, float8_kind
from pallas_kernels import ops
from pallas_kernels.gpu import quantised_product as mosaic
from pallas_kernels.ops import choice
from pallas_kernels.quantised import OFFSET, Halfwords, Quantised
from reference import quantisation, quantised_checkpoints
from tests.kernels import test_quantised_product
from tests.kernels.interpreter import (
    OPTIONAL,
    fresh_interpreter,
    is_race_to_release_early,
    races_found,
    shadow_reads,
    slot_of_scratch,
    unfenced_wgmmas,
    unnoticed_calls,
    without_call,
)
from tests.kernels.primitives import assert_used, interpretable
from tests.kernels.test_native import bits, draw
from tests.kernels.test_quantised_product import FLOATS
from tests.reference.test_quantisation import blocks

pytestmark = pytest.mark.usefixtures(fresh_interpreter.__name__)
BFLOAT16 = jnp.dtype("bfloat16")
ZERO_POINTS = {f"int4, groups of {size} with zero points": size for size in (16, 128)}
SHORT, LONG = ZERO_POINTS


@functools.cache
def drawn(name: str, out_features: int, in_features: int) -> tuple[Halfwords, np.ndarray, np.ndarray]:
    """Return a weight for the kernel, its numbers by the oracle, and a bound of what is added up where x is
    1.
    """
    if size := ZERO_POINTS.get(name):
        rng, groups = np.random.default_rng(0), (out_features, in_features // size)
        codes = rng.integers(0, 16, (out_features, in_features)).astype(np.uint8)
        scales, minima = (rng.standard_normal(groups).astype(np.float32) for _ in range(2))
        kind, rows = CodeFormat(4, size, "float32", has_minima=True), CodedRows(codes, scales, minima)
        want = quantised_checkpoints.scaled(codes.astype(np.float32), scales) + np.repeat(
            minima, size, axis=1
        )
    else:
        kind, rows, want = test_quantised_product.drawn(name, out_features, in_features)
    [weight] = packed([(kind, rows)], in_features, BFLOAT16, "mosaic_gpu").segments
    assert isinstance(weight, Halfwords)
    if kind.is_float:
        return weight, want, np.abs(want.astype(np.float64))
    sizes = (np.abs(rows.codes.astype(np.float64)) + OFFSET).reshape(*rows.scales.shape, -1)
    sizes *= np.abs(rows.scales.astype(np.float64))[..., None]
    if rows.minima is not None:
        sizes += np.abs(rows.minima.astype(np.float64))[..., None]
    return weight, want, sizes.reshape(want.shape)


def multiply(x: np.ndarray, weight: Halfwords, layer: int | None = None) -> np.ndarray:
    """Run the product, traced anew so that it calls a test's replacements of Pallas' functions."""
    run = functools.partial(ops.quantised_product, layer=layer, interpret=True)
    return np.asarray(jax.jit(lambda x, weight: run(x, weight))(jnp.asarray(x), weight))


def assert_close(y: np.ndarray, x: np.ndarray, want: np.ndarray, sizes: np.ndarray) -> None:
    wide = x.astype(np.float64)
    error = np.abs(y - wide @ want.astype(np.float64).T)
    # Each of up to 1,024 sums is rounded to 24 bits of what has been added up; up and down alike.
    assert (error <= 1e-6 * (np.abs(wide) @ sizes.T)).all()


@pytest.mark.parametrize(
    ("name", "num_rows", "out_features", "in_features"),
    [
        ("Q4_0", 9, 40, 1024),  # two programs share the inputs
        ("Q8_0", 3, 64, 160),  # inputs that are not whole slots
        ("Q5_1", 33, 64, 128),  # codes of 8 bits with minima, one run at a time
        ("Q4_K", 70, 64, 256),  # two blocks of rows
        ("Q6_K", 9, 40, 256),  # codes of two planes
        (FLOATS, 33, 64, 256),
        (LONG, 8, 64, 256),
        (SHORT, 3, 64, 128),
    ],
)
def test_the_kernel_equals_the_oracle_without_a_race(
    name: str, num_rows: int, out_features: int, in_features: int, capsys: pytest.CaptureFixture[str]
) -> None:
    weight, want, sizes = drawn(name, out_features, in_features)
    x = draw(1, "bfloat16", num_rows, in_features)
    with shadow_reads():
        y = multiply(x, weight)
    assert (y.dtype, y.shape) == (np.float32, (num_rows, out_features))
    assert_close(y, x, want, sizes)
    assert not races_found(capsys)


@pytest.mark.parametrize(
    ("capability", "name", "num_rows", "in_features"),
    [
        ("8.0", "Q4_1", 9, 640),  # more steps than slots
        pytest.param("8.0", "Q6_K", 9, 256, marks=pytest.mark.nightly),
        pytest.param("12.0", FLOATS, 33, 256, marks=pytest.mark.slow),
    ],
)
def test_products_by_mma_equal_the_oracle_without_a_race(
    capability: str, name: str, num_rows: int, in_features: int, capsys: pytest.CaptureFixture[str]
) -> None:
    weight, want, sizes = drawn(name, 64, in_features)
    x = draw(1, "bfloat16", num_rows, in_features)
    with interpretable(capability) as used, pytest.MonkeyPatch.context() as patch:
        patch.setattr(mosaic, "MAX_STAGES", 2)
        y = multiply(x, weight)
    assert_used(used, capability)
    assert_close(y, x, want, sizes)
    assert not races_found(capsys)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", FLOATS, LONG, SHORT])
def test_a_widened_weight_is_the_files_own(name: str) -> None:
    """Each bit of all of it, and of some rows: nothing is lost in packing."""
    weight, want, _ = drawn(name, 70, 256)
    np.testing.assert_array_equal(weight.widened()[:, :256], want)
    some = np.array([3, 69, 3, 0], np.int32)
    np.testing.assert_array_equal(weight.rows(jnp.asarray(some))[:, :256], want[some])


def test_bits_of_a_row_do_not_depend_on_the_others() -> None:
    """The number of rows does not matter, either. Numbers are whole, so that sums over 32 inputs are exact:
    the interpreter does not know how a wgmma adds up. What follows is rounded.
    """
    weight, _, _ = drawn("Q4_1", 64, 256)
    x = np.random.default_rng(1).integers(-9, 10, (20, 256)).astype(BFLOAT16)
    together = multiply(x, weight)
    for rows in (slice(19, 20), slice(3, 14)):
        np.testing.assert_array_equal(bits(multiply(x[rows], weight)), bits(together[rows]))


def test_a_models_product_has_a_kernel_for_each_of_its_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is a layer of a stack; one segment orders its inputs. One scale an output is left to XLA."""
    monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    kernel = mosaic.product
    monkeypatch.setattr(mosaic, "product", lambda *args, interpret: kernel(*args, interpret=True))
    monkeypatch.setattr(choice, "default_implementation", lambda: "mosaic_gpu")
    rng, pieces, want = np.random.default_rng(2), [], []
    for name in ("Q4_0", "Q4_1", "Q6_K"):
        kind, its = gguf_blocks.FORMATS[name], blocks(name, 40, 256)
        rows, order = gguf_blocks.rows(its, name, "weight"), None
        if name == "Q4_1":
            kind, order = kind._replace(has_order=True), rng.permutation(256).astype(np.int32)
        pieces.append((kind, rows._replace(order=order)))
        wide = quantisation.dequantise(its, name)
        want.append(wide if order is None else wide[:, np.argsort(order)])
    pieces.append((float8_kind(256), float8(want[0])))
    weight = packed(pieces, 256, BFLOAT16)
    assert implementations([weight]) == {"mosaic_gpu": 3, "xla": 1}
    shapes = jax.tree.map(jnp.shape, zeros([SegmentSpec(kind, 40) for kind, _ in pieces], 256, BFLOAT16))
    assert shapes == jax.tree.map(jnp.shape, weight)
    stack = jax.tree.map(lambda x: np.stack([np.zeros_like(x), x]), packed(pieces[:2], 256, BFLOAT16))
    x = jnp.asarray(draw(1, "bfloat16", 2, 256))
    y = jax.jit(lambda x, stack: layers.quantised_product(x, stack, jnp.int32(1)))(x, stack)
    exact = np.asarray(x, np.float64) @ np.concatenate(want[:2]).astype(np.float64).T
    np.testing.assert_allclose(y, exact, atol=1e-5 * np.abs(exact).max())


def test_what_the_kernel_does_not_serve() -> None:
    weight, want, sizes = drawn("Q4_0", 70, 256)
    x = jnp.ones((2, 256), jnp.float32)
    assert_close(np.asarray(ops.quantised_product(x, weight)), np.asarray(x), want, sizes)
    for wrong, other, why in (
        (x, weight, "rows must be bfloat16"),
        (jnp.ones((257, 256), BFLOAT16), weight, "257 rows must be at most 256"),
        (x, _no_halfwords(), "the weight must be packed as halfwords"),
    ):
        with pytest.raises(NotImplementedError, match=why):
            ops.quantised_product(wrong, other, implementation="mosaic_gpu")
    with pytest.raises(
        ValueError, match=r"x.shape=\(2, 257\) must be \[num_rows, in_features\], at most 256"
    ):
        ops.quantised_product(jnp.ones((2, 257)), weight)


def _no_halfwords() -> Quantised | Halfwords:
    weight: QuantisedWeight = zeros([SegmentSpec(gguf_blocks.FORMATS["Q4_0"], 8)], 256, BFLOAT16, "xla")
    return weight.segments[0]


RING = ("Q4_1", 64, 640)  # five steps of one program
RING_OF_PLANES = ("Q6_K", 64, 768)


def launch(ring: tuple[str, int, int] = RING) -> None:
    """Run the kernel with a small ring, so that slots are used again."""
    weight, want, sizes = drawn(*ring)
    x = draw(1, "bfloat16", 3, ring[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mosaic, "MAX_STAGES", 2)
        assert_close(multiply(x, weight), x, want, sizes)


# The fence between codes' way through shared memory and the wgmma that reads them: no run shows it.
FENCE = ("commit_smem", "_add")


@pytest.mark.slow
@pytest.mark.parametrize("ring", [RING, RING_OF_PLANES])
def test_every_barrier_is_needed(ring: tuple[str, int, int], capsys: pytest.CaptureFixture[str]) -> None:
    """Leave out each wait and fence in turn; without the arrival the producer would wait for ever."""
    run = functools.partial(launch, ring)
    calls, unnoticed = unnoticed_calls(run, lambda call: call[0] == "barrier_arrive", capsys)
    assert len(calls) == 5, calls
    assert unnoticed - OPTIONAL == {FENCE}


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax 0.11's interpreter does not see this race")
def test_an_early_release_is_a_race(capsys: pytest.CaptureFixture[str]) -> None:
    """Hand a slot back as soon as it is there."""
    assert is_race_to_release_early(launch, slot_of_scratch("_consume"), capsys)


@pytest.mark.parametrize("by_memory", [True, False])
def test_every_store_is_fenced_before_a_wgmma(by_memory: bool) -> None:
    """The interpreter stores operands; on a GPU nothing is stored."""
    weight, _, _ = drawn(*RING)

    def trace() -> int:
        run = functools.partial(mosaic.product, interpret=by_memory)
        jaxpr = jax.make_jaxpr(lambda x, weight: run(x, weight))(jnp.ones((3, 640), BFLOAT16), weight)
        return unfenced_wgmmas(jaxpr.jaxpr)[0]

    assert trace() == 0
    with without_call(-1, shadows=False) as calls:
        trace()
    assert (FENCE in calls) == by_memory
    if by_memory:
        with without_call(calls.index(FENCE), shadows=False):
            assert trace() > 0
