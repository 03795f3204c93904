"""Sums of the loop, all of them: each adds in an order that does not depend on how many rows there are.

A sum of floats has other bits in another order, and XLA chooses the order by the shape of all rows together.
`jaxpaged.row_sums` has the sums whose order is fixed. What else adds, or takes a maximum that a library may
compute together with what is around it, is in a list here, with the reason why that is right.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src import source_info_util

from jaxpaged.config import EngineConfig
from jaxpaged.engine import start
from jaxpaged.engine.drafted import shapes_beside
from jaxpaged.engine.setup import Setup
from jaxpaged.models import loading
from jaxpaged.step import loop
from tests import tiny, tiny_head
from tests.marks import slow_and_nightly

ROOT = Path(__file__).parents[2]
FAMILIES = ROOT / "tests" / "goldens" / "families"
NUM_BLOCKS = 18
# Primitives whose result depends on an order of their operands, or that a library takes with what is around.
ORDERED = {
    *(
        "reduce",
        "reduce_sum",
        "reduce_prod",
        "reduce_max",
        "reduce_min",
        "reduce_window_sum",
        "reduce_window",
    ),
    *("cumsum", "cumprod", "cumlogsumexp", "dot_general", "ragged_dot_general", "conv_general_dilated"),
    *(
        "scatter-add",
        "scatter_add",
        "scatter-mul",
        "sort",
        "top_k",
        "approx_top_k",
        "argmax",
        "argmin",
        "psum",
    ),
}
SUMS = "jaxpaged/row_sums.py"
EXACT = "a maximum is exact, and what follows it is a comparison, a difference or a quotient, exact as well"
ONE_SHAPE = (
    "XLA's attention computes tiles and decode steps in one shape each: see docs/concepts/same_answer.md"
)
ALLOWED = {
    (
        "dot_general",
        "pallas_kernels/xla/products.py",
        "product",
    ): "products have one shape where XLA computes",
    ("dot_general", "pallas_kernels/xla/tiled_attention.py", "_join"): ONE_SHAPE,
    ("reduce_max", "pallas_kernels/xla/tiled_attention.py", "_join"): ONE_SHAPE,
    ("reduce_sum", "pallas_kernels/xla/tiled_attention.py", "_join"): ONE_SHAPE,
    ("reduce_max", "jaxpaged/sampling.py", "likeliest"): EXACT,
    ("reduce_max", "jaxpaged/sampling.py", "draw"): EXACT,
    ("reduce_max", "jaxpaged/sampling.py", "support"): EXACT,
    ("reduce_max", "jaxpaged/sampling.py", "reported_values"): EXACT,
    ("reduce_max", "jaxpaged/sampling_filters.py", "first_equals"): "a maximum of equal weights and zeros",
    ("reduce_max", "jaxpaged/step/automata.py", "not_empty"): EXACT,
    ("cumsum", "jaxpaged/sampling.py", "_inverted"): "on a CPU JAX adds pairs in a tree of the row's length",
    ("top_k", "jaxpaged/sampling.py", "<lambda>"): "of equal ones the lower index is first",
    ("sort", "jaxpaged/step/beams.py", "_best"): "stable, by scores and then by places",
    ("scatter-add", "jaxpaged/sampling.py", "add_some"): "edits of a row are added one after the other",
    ("scatter-add", "jaxpaged/models/decoder.py", "__call__"): "one number is added at each place",
    ("top_k", "jaxpaged/models/experts.py", "choose"): "of equal ones the lower index is first",
    ("top_k", "jaxpaged/models/experts.py", "_in_chosen_groups"): "of equal ones the lower index is first",
    ("reduce_sum", "jaxpaged/models/experts.py", "_in_chosen_groups"): "a sum of two numbers has one order",
}


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations of a program, of its loops and branches too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
            for each in inner:
                each = getattr(each, "jaxpr", each)
                if hasattr(each, "eqns"):
                    yield from equations(each)


def origin(equation: Any) -> tuple[str, str]:
    """Return the file of ours, and the function in it, that an equation comes from."""
    for frame in source_info_util.user_frames(equation.source_info.traceback):
        file = Path(frame.file_name)
        if file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tests"):
            return str(file.relative_to(ROOT)), frame.function_name.rpartition(".")[2]
    return "", ""


def ordered_operations(jaxpr: Any) -> set[tuple[str, str, str]]:
    """Return what adds floats in a program, and where it comes from. What is in no file of ours is named so.

    JAX keeps a traced `cumsum` for all places that call it, and forgets where it was called.
    """
    found = set()
    for equation in equations(jaxpr):
        dtypes = [getattr(x.aval, "dtype", None) for x in equation.invars]
        if equation.primitive.name in ORDERED and any(
            dtype is not None and jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes
        ):
            found.add((equation.primitive.name, *origin(equation)))
    return found


def traced(setup: Setup, model: Any) -> Any:
    graphdef, params = nnx.split(model)
    state = start.state_shapes(setup, model, NUM_BLOCKS)
    arrays = params, state, loop.limits(0), np.bool_(False)
    return loop.run.trace(graphdef, *arrays, config=setup.step_config(NUM_BLOCKS)).jaxpr


def options(**more: Any) -> EngineConfig:
    return EngineConfig(**tiny.DEFAULTS | {"num_blocks": NUM_BLOCKS} | more)


def assert_all_have_one_order(setup: Setup, shapes: Any = None) -> set[tuple[str, str, str]]:
    found = ordered_operations(traced(setup, start.abstract_model(setup, shapes)))
    assert any(file == SUMS for _, file, _ in found)
    left = {each for each in found if each[1] != SUMS and each not in ALLOWED and each != ("cumsum", "", "")}
    assert not left, "use jaxpaged.row_sums, or say in ALLOWED why the order is fixed"
    return found


EVERYTHING = {
    "structured_outputs_mib": 1,
    "return_sampling_mask": True,
    "max_prompt_logprob_token_ids": 5,
    "logprobs_mode": "processed_logprobs",
    "preemption_mode": "swap",
    "num_host_blocks": 12,
    "speculative_config": {"prompt_lookup_min": 1},
}


@pytest.mark.parametrize("use_native", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_every_sum_of_the_loop_has_one_order(use_native, monkeypatch):
    monkeypatch.setenv("JAXPAGED_NATIVE", use_native)
    config = dataclasses.replace(tiny.CONFIG, vocab_size=512)
    found = assert_all_have_one_order(Setup(options(**EVERYTHING), config))
    assert ("dot_general", "pallas_kernels/xla/products.py", "product") in found or use_native == "1"


@pytest.mark.slow
def test_every_sum_of_a_head_that_drafts_has_one_order():
    draft = tiny_head.draft()
    setup = Setup(options(**tiny_head.BY_HEAD), tiny.CONFIG, draft.config, draft.cost)
    assert_all_have_one_order(setup, shapes_beside(draft, setup, None))


NAMES = sorted(path.parent.name for path in FAMILIES.glob("*/config.json"))


@pytest.mark.parametrize("name", slow_and_nightly(NAMES, ["dots1", "gemma3n_text", "gpt_oss"]))
def test_every_sum_of_a_family_has_one_order(name, monkeypatch):
    monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    checkpoint = loading.open_checkpoint(FAMILIES / name)
    assert_all_have_one_order(Setup(options(), checkpoint.config), checkpoint.abstract)
