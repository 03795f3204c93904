"""The arithmetic of docs/research/scale.md."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import scale
from benchmarks.scale import LLAMA_70B, Group
from jaxpaged.research.lab import decoders
from jaxpaged.research.lab.serving import roofline

PAGE = Path(__file__).parents[1] / "docs/research/scale.md"


@pytest.mark.parametrize("name", scale.TABLES)
def test_the_page_has_the_tables_of_the_model(name):
    assert f"<!-- {name} -->\n{scale.TABLES[name]()}\n\n" in PAGE.read_text(), "python -m benchmarks.scale"


def test_the_simulators_group_takes_as_long():
    """`jaxpaged lab --serve N --gpu 8xh200 --decoder "Llama 3.1 70B"` moves its clock so."""
    group, peak, decoder = Group(LLAMA_70B, 8), roofline.GPUS["8xh200"], decoders.LLAMA_70B
    for num_rows, context in ((1, 2000), (256, 2176), (1024, 100)):
        rows = jnp.full(num_rows, context)
        found = roofline.seconds_of_step(jnp.ones_like(rows), rows, peak, decoder)
        assert float(found) == pytest.approx(group.step_seconds(num_rows, context), rel=2e-3)
    assert roofline.cache_tokens(peak, decoder) == pytest.approx(group.cache_tokens, rel=1e-4)


def test_the_numbers_are_those_worked_out_by_hand():
    assert LLAMA_70B.num_params == 70_553_706_496  # as its checkpoint has them
    assert LLAMA_70B.kv_bytes == 327_680
    eight = Group(LLAMA_70B, 8)
    assert eight.cache_tokens == int((0.9 * 8 * 141e9 - 141_107_412_992) / 327_680)
    assert Group(LLAMA_70B, 1).cache_tokens == Group(LLAMA_70B, 1).rows(1) == 0
    # One row without context reads the weights; its sums are small, and take what a sum takes at least.
    assert eight.step_seconds(1, 0) == pytest.approx(141_107_412_992 / 8 / 4.8e12 + 160 * 10e-6)
    # Many prompt tokens without context: two operations a parameter; and 7/4 of 16 kB a token and sum.
    assert eight.prompt_seconds(8192, 0) == pytest.approx(
        8192 * (2 * 70_553_706_496 / 8 / 989e12 + 160 * 7 / 4 * 16384 / 450e9)
    )
    # A step of many rows with little to read is bound by arithmetic.
    assert eight.step_seconds(4096, 1) > 4096 * 2 * 70_553_706_496 / 8 / 989e12
    sixteen = Group(LLAMA_70B, 16)
    assert sixteen.sum_seconds(1) == pytest.approx(160 * 30e-6)
    assert sixteen.sum_seconds(10**6) == pytest.approx(160 * 1e6 * 15 / 8 * 16384 / 400e9)
    assert Group(LLAMA_70B, 1).sum_seconds(100) == 0
