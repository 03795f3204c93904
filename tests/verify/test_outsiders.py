"""Others' kernels under our cases. docs/research.md has what came of the whole list, and of allocators."""

import pytest

from jaxpaged.verify import Terms, verify_kernel
from jaxpaged.verify.cases import case
from tests.verify.outsiders import pallas_attention, torch_attention

# It multiplies by zero what it must not see, and looks up whole tables.
PALLAS = Terms(arrays="jax", stale="zero", padding="null")
QUICK = ("around_a_block", "shared_prefix", "mqa", "float32", "soft_cap", "int8_per_head")


def test_jax_s_own_pallas_kernel_is_right() -> None:
    report = verify_kernel(pallas_attention, "paged_attention_v1", PALLAS, cases=map(case, QUICK))
    assert report.ok, report
    assert len(report.passed) == len(QUICK), report


@pytest.mark.slow
def test_jax_s_own_pallas_kernel_over_the_whole_list() -> None:
    report = verify_kernel(pallas_attention, "paged_attention_v1", PALLAS, shrink_seconds=0)
    print(report)
    assert report.ok, report


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
