"""Bugs of kinds that FlashInfer, vLLM and SGLang have had: the kit finds each, and tells it in a sentence."""

import re
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.verify import verify_allocator, verify_kernel
from jaxpaged.verify.kernels import OPERATIONS
from tests.verify.mutants import Mutant, planted
from tests.verify.mutants.public import KERNELS, POOLS

QUICK = {
    "zero times what is stale", "nothing merged with nothing", "a double free is ignored",
    "a prompt's tokens not counted",
}  # fmt: skip
BUGS = KERNELS + POOLS
assert {bug.name for bug in BUGS} >= QUICK


def verify(theirs: Any, what: str, **options: Any) -> Any:
    if what in OPERATIONS:
        return verify_kernel(theirs, what, **options)
    return verify_allocator(theirs, what, **options)


@pytest.mark.parametrize(
    "bug", [pytest.param(b, id=str(b), marks=[] if b.name in QUICK else pytest.mark.slow) for b in BUGS]
)
def test_a_bug_of_a_public_kind_is_found(bug: Mutant, tmp_path: Path) -> None:
    with planted(bug, tmp_path) as theirs:
        report = verify(theirs, bug.what, shrink_seconds=1 if bug.name in QUICK else 20)
    assert not report.ok, report
    sentence = str(report.sentence)
    assert "\n" not in sentence
    assert len(sentence) < 250
    assert re.fullmatch(r"[\w-]+/[\w-]+#\d+", bug.source)
