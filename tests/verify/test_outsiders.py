"""Others' kernels under our cases. docs/research/verify.md reports the whole list."""

import pytest

from jaxpaged.research.verify import Terms, verify_kernel
from jaxpaged.research.verify.cases.decode import case
from tests.verify.outsiders import pallas_attention, torch_attention

# It multiplies by zero what it must not see, and looks up whole tables.
PALLAS = Terms(arrays="jax", stale="zero", padding="null")
QUICK = ("float32", "int8_per_head")
# Where rounding to q's type before dividing is a little too much, and where nothing over nothing is NaN.
NOT_RIGHT = {"thousands", "block_size_8", "float16", "float8_with_float16"}


def test_jax_s_own_pallas_kernel_is_right() -> None:
    report = verify_kernel(pallas_attention, "paged_attention_v1", PALLAS, cases=map(case, QUICK))
    assert report.ok, report
    assert len(report.passed) == len(QUICK), report


@pytest.mark.slow
def test_jax_s_own_pallas_kernel_over_the_whole_list() -> None:
    report = verify_kernel(pallas_attention, "paged_attention_v1", PALLAS, shrink_seconds=0)
    assert {str(outcome.case) for outcome in report.wrong} == NOT_RIGHT, report
    assert len(report.passed) > 30, report


def test_plain_pytorch_is_right() -> None:
    pytest.importorskip("torch")
    report = verify_kernel(torch_attention, "paged_attention_v1", Terms(arrays="torch"))
    assert report.ok, report
    assert {str(o.case) for o in report.passed} >= {
        "one_token",
        "only_padding",
        "mqa",
        "float16",
        "thousands",
    }
