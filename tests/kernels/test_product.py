"""The Mosaic GPU kernel of products with a layer's weights in Pallas' GPU interpreter, with race detection.

As `test_mosaic_products.py` has it for quantised weights.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.models import layers
from jaxpaged.models.layer_form import LayerForm, form_of
from pallas_kernels import ops
from pallas_kernels.gpu import dense_product as mosaic
from pallas_kernels.ops import choice
from tests.kernels.interpreter import (
    OPTIONAL,
    fresh_interpreter,
    is_race_to_release_early,
    races_found,
    shadow_reads,
    slot_of_scratch,
    unnoticed_calls,
    unwaited_wgmmas,
    without_call,
)
from tests.kernels.primitives import assert_used, interpretable
from tests.kernels.test_native import bits, draw

pytestmark = pytest.mark.usefixtures(fresh_interpreter.__name__)
NUM_LAYERS = 2
LAYER = 1


def weights_of(dtype: str, num_inputs: int, num_outputs: int) -> np.ndarray:
    """Return weights of some layers; those of other layers than the requested one are NaN."""
    weights = draw(0, dtype, NUM_LAYERS * num_inputs, num_outputs).reshape(NUM_LAYERS, num_inputs, -1)
    weights[1 - LAYER] = np.nan
    return weights


def multiply(x: np.ndarray, weights: np.ndarray, implementation: ops.Implementation = "mosaic_gpu") -> Any:
    """Run the product, traced anew so that it calls a test's replacements of Pallas' functions. The layer is
    traced, too.
    """
    interpret = implementation == "mosaic_gpu"
    run = functools.partial(ops.product, implementation=implementation, interpret=interpret)
    return np.asarray(jax.jit(lambda *arrays: run(*arrays))(x, weights, np.int32(LAYER)))


def assert_close(y: np.ndarray, x: np.ndarray, weights: np.ndarray) -> None:
    wide, its = x.astype(np.float64), weights[LAYER].astype(np.float64)
    # Each of up to 1,024 sums is rounded to 24 bits of what has been added up; up and down alike.
    assert (np.abs(y - wide @ its) <= 1e-6 * (np.abs(wide) @ np.abs(its))).all()


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs", "dtype"),
    [
        (9, 512, 128, "bfloat16"),  # two programs share the inputs
        (3, 64, 64, "bfloat16"),  # one step, and nothing for the second consumer
        (20, 200, 200, "float16"),  # neither inputs nor outputs are whole tiles
        (300, 128, 128, "bfloat16"),  # two blocks of rows
    ],
)
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_a_layers_product_equals_the_oracle_without_a_race(
    implementation: ops.Implementation,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    dtype: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights, x = weights_of(dtype, num_inputs, num_outputs), draw(1, dtype, num_rows, num_inputs)
    with shadow_reads():
        y = multiply(x, weights, implementation)
    assert (y.dtype, y.shape) == (np.float32, (num_rows, num_outputs))
    assert_close(y, x, weights)
    assert not races_found(capsys)


@pytest.mark.parametrize(
    ("capability", "num_rows", "num_inputs", "num_outputs"),
    [
        ("8.0", 9, 320, 192),  # more steps than slots, and nothing for the last consumer
        pytest.param("12.0", 130, 200, 200, marks=pytest.mark.slow),  # two blocks of rows, parts of tiles
    ],
)
def test_products_by_mma_equal_the_oracle_without_a_race(
    capability: str, num_rows: int, num_inputs: int, num_outputs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, x = weights_of("bfloat16", num_inputs, num_outputs), draw(1, "bfloat16", num_rows, num_inputs)
    with interpretable(capability) as used, pytest.MonkeyPatch.context() as patch:
        patch.setattr(mosaic, "MAX_STAGES", 2)
        y = multiply(x, weights)
    assert_used(used, capability)
    assert_close(y, x, weights)
    assert not races_found(capsys)


def test_bits_of_a_row_do_not_depend_on_the_others() -> None:
    """The number of rows does not matter, either. Numbers are whole, so a slot's sums are exact: the
    interpreter does not know how a wgmma adds up. Each slot's are of another size, so sums of slots and
    splits round.
    """
    rng, num_inputs = np.random.default_rng(1), 512
    x = rng.integers(-99, 100, (300, num_inputs)) * 2.0 ** rng.integers(-9, 9, num_inputs // 64).repeat(64)
    x, weights = x.astype("bfloat16"), rng.integers(-99, 100, (2, num_inputs, 64)).astype("bfloat16")
    together = multiply(x, weights)
    for rows in (slice(299, 300), slice(7, 12), slice(200, 265)):
        np.testing.assert_array_equal(bits(multiply(x[rows], weights)), bits(together[rows]))


def test_inputs_are_shared_out_by_the_weights_shape_alone() -> None:
    def problem(num_rows: int, num_outputs: int) -> mosaic.Problem:
        return mosaic.problem(num_rows, 4096, num_outputs, jnp.dtype("bfloat16"))

    splits = {outs: {problem(rows, outs).num_splits for rows in (1, 64, 65, 512)} for outs in (4096, 28672)}
    assert splits == {4096: {4}, 28672: {1}}
    assert [(p.num_blocks, p.num_columns) for p in (problem(1, 64), problem(256, 64), problem(528, 64))] == [
        (1, 8), (1, 256), (3, 176),
    ]  # fmt: skip


def test_what_the_kernel_does_not_serve() -> None:
    x, weights = jnp.ones((2, 64)), jnp.ones((2, 64, 64))
    for wrong, its, why in (
        (x, weights, "rows and weights must be bfloat16 or float16"),
        (x.astype("bfloat16"), weights[..., :56], "56 outputs must be a multiple of 8, 64 or more"),
        (jnp.ones((2, 70)), jnp.ones((2, 70, 64)), "70 inputs must be a multiple of 8, 64 or more"),
    ):
        wrong = wrong if "rows and" in why else wrong.astype("bfloat16")
        with pytest.raises(NotImplementedError, match=f"{why}. Use implementation='xla'"):
            ops.product(wrong, its.astype(wrong.dtype), 0, implementation="mosaic_gpu")
    np.testing.assert_array_equal(ops.product(x, weights, 1), np.full((2, 64), 64, np.float32))


@pytest.mark.parametrize(
    ("x", "weights", "layer", "why"),
    [
        ((2, 65), (2, 64, 64), 0, r"x.shape=\(2, 65\) must be \[num_rows, num_inputs=64\], one row or more"),
        ((0, 64), (64, 64), None, r"x.shape=\(0, 64\) must be"),
        (
            (2, 64),
            (64, 64),
            0,
            r"weights.shape=\(64, 64\) must be \[num_layers, num_inputs, num_outputs\] wi",
        ),
        ((2, 64), (2, 64, 64), None, r"weights.shape=.* must be \[num_inputs, num_outputs\] with layer=None"),
        ((2, 64), (2, 64, 64), 2, "layer=2 must be one of 2 layers, counted from 0"),
    ],
)
def test_what_means_nothing(
    x: tuple[int, ...], weights: tuple[int, ...], layer: int | None, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        ops.product(jnp.ones(x), jnp.ones(weights), layer)


def test_a_models_product_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is a layer of a stack, with padded sizes and biases; without a stack XLA multiplies."""
    monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    monkeypatch.setattr(choice, "default_implementation", lambda: "mosaic_gpu")
    monkeypatch.setattr(mosaic, "product", functools.partial(mosaic.product, interpret=True))
    weights, biases = draw(0, "bfloat16", 3 * 9, 70).reshape(3, 9, 70), draw(2, "bfloat16", 3, 9)
    form = form_of(jnp.dtype("bfloat16"), loop_over_layers=True)
    assert form == LayerForm("xla", "mosaic_gpu", loops=True)
    linear = layers.Linear(list(weights), list(biases), form=form)
    assert linear.kernel.all.shape == (3, 72, 64)
    x = draw(1, "bfloat16", 5, 70)
    y = jax.jit(lambda x: linear(x, jnp.int32(2)))(x)
    exact = x.astype(np.float64) @ weights[2].T.astype(np.float64) + biases[2].astype(np.float64)
    np.testing.assert_allclose(y, exact, atol=1e-5 * np.abs(exact).max())
    assert layers.Linear(list(weights)).implementation == "xla"
    assert form_of(jnp.dtype("float32"), loop_over_layers=True).stacked == "xla"


def test_types_and_options_that_do_not_fit() -> None:
    x, weights = jnp.ones((2, 64)), jnp.ones((64, 64))
    with pytest.raises(ValueError, match=r"x.dtype=.*float32.* must be weights.dtype=.*bfloat16"):
        ops.product(x, weights.astype("bfloat16"))
    with pytest.raises(ValueError, match="interpret=True needs implementation='mosaic_gpu'"):
        ops.product(x, weights, implementation="xla", interpret=True)


def launch() -> None:
    """Run the kernel with a small ring, so that slots are used again: five steps of one program."""
    weights, x = weights_of("bfloat16", 320, 128), draw(1, "bfloat16", 3, 320)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mosaic, "MAX_STAGES", 2)
        assert_close(multiply(x, weights), x, weights)


# No run shows it: the interpreter's wgmma is done at once.
WAIT = ("wgmma_wait", "add")


@pytest.mark.slow
def test_every_barrier_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """Leave out each wait in turn; without the arrival the producer would wait for ever."""
    calls, unnoticed = unnoticed_calls(launch, lambda call: call[0] == "barrier_arrive", capsys)
    assert len(calls) == 5, calls
    assert unnoticed - OPTIONAL == {WAIT}


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax 0.11's interpreter does not see this race")
def test_an_early_release_is_a_race(capsys: pytest.CaptureFixture[str]) -> None:
    """Hand a slot back as soon as it is there."""
    assert is_race_to_release_early(launch, slot_of_scratch("add"), capsys)


def test_every_wgmma_is_waited_for_before_its_slot_is_given_back() -> None:
    x, weights = jnp.ones((3, 320), "bfloat16"), jnp.ones((2, 320, 128), "bfloat16")

    def trace() -> int:
        return unwaited_wgmmas(jax.make_jaxpr(lambda *arrays: mosaic.product(*arrays, 0))(x, weights).jaxpr)

    assert trace() == 0
    with without_call(-1, shadows=False) as calls:
        trace()
    with without_call(calls.index(WAIT), shadows=False):
        assert trace() > 0
