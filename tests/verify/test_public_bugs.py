"""Bugs of kinds that FlashInfer, vLLM and SGLang have had: the kit finds each, and tells it in a sentence."""

import re
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.research.verify import cases_of, verify_allocator, verify_kernel
from jaxpaged.research.verify.kernels import OPERATIONS
from tests.verify.mutants import Mutant, planted
from tests.verify.mutants.public import KERNELS, LAYOUTS, POLICIES, POOLS
from tests.verify.mutants.sound import layout, policies

QUICK = {
    "zero times what is stale", "nothing merged with nothing", "a double free is ignored",
    "a prompt's tokens not counted",
}  # fmt: skip
BUGS = KERNELS + POOLS + POLICIES + LAYOUTS
assert {bug.name for bug in BUGS} >= QUICK


def verify(theirs: Any, what: str, **options: Any) -> Any:
    if what == "layout":
        return pytest.importorskip("jaxpaged.research.verify.layouts").verify_layout(theirs())
    if what in OPERATIONS:
        return verify_kernel(theirs, what, **options)
    kind, _, policy = what.partition(" ")
    return verify_allocator(theirs, kind, policy=policy or None, **options)


@pytest.mark.parametrize(
    "bug", [pytest.param(b, id=str(b), marks=[] if b.name in QUICK else pytest.mark.slow) for b in BUGS]
)
def test_a_bug_of_a_public_kind_is_found(bug: Mutant, tmp_path: Path) -> None:
    options: dict[str, Any] = {"shrink_seconds": 20}
    if bug.name in QUICK:
        options = {"shrink_seconds": 1}
        if bug.what in OPERATIONS:
            options["cases"] = cases_of(bug.what)[:4]
    with planted(bug, tmp_path) as theirs:
        report = verify(theirs, bug.what, **options)
    assert not report.ok, report
    sentence = report.broken[0] if bug.what == "layout" else str(report.sentence)
    assert "\n" not in sentence
    assert len(sentence) < 250
    assert re.fullmatch(r"[\w-]+/[\w-]+#\d+", bug.source)


@pytest.mark.slow
def test_the_policy_and_the_layout_are_right_without_a_bug() -> None:
    assert verify(policies.SPLIT, "policy lru_split", histories=10, block_sizes=[4]).ok
    report = verify(layout.Scaled, "layout")
    assert report.ok, report
