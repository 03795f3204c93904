"""Verifying a function: all of an operation's cases, what came of them, and the smallest that fails.

report = verify_kernel(my_attention, "paged_attention_v1", Terms(arrays="torch"))
assert report.ok, report
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxpaged.research.verify import frameworks, hints, shrinking
from jaxpaged.research.verify.cases.frame import KernelCase
from jaxpaged.research.verify.kernels import NotServed, Terms, WrongResult, cases_of, check, worst_error


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one case: its worst error in units of the allowed error, or the reason why it failed."""

    case: KernelCase
    worst: float | None = None
    not_served: str | None = None
    wrong: str | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """Results of a function over the cases of an operation."""

    op: str
    terms: Terms
    outcomes: tuple[Outcome, ...]
    smallest: KernelCase | None = None  # the smallest case that still fails
    sentence: str | None = None  # what is wrong there
    snippet: str | None = None  # Python code that runs it
    saved: Path | None = None  # its arrays
    seconds_to_shrink: float = 0.0

    @property
    def passed(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.worst is not None]

    @property
    def wrong(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.wrong]

    @property
    def not_served(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.not_served]

    @property
    def ok(self) -> bool:
        """Whether at least one case was verified, and none was wrong."""
        return bool(self.passed) and not self.wrong

    @property
    def worst(self) -> float:
        """Largest error of the cases that passed, in units of the allowed error."""
        return max((o.worst for o in self.passed if o.worst is not None), default=0.0)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        yield (
            f"{self.op}: {len(self.passed)} cases passed, {len(self.wrong)} failed, "
            f"{len(self.not_served)} not served"
        )
        if self.terms != Terms():
            yield f"on these terms: {self.terms}"
        if self.passed:
            at = max(self.passed, key=lambda o: o.worst or 0)
            yield f"worst error among those that passed: {self.worst:.2f} of what is allowed ({at.case})"
        reasons: dict[str, list[str]] = {}
        for outcome in self.not_served:
            reasons.setdefault(str(outcome.not_served), []).append(str(outcome.case))
        for reason, names in reasons.items():
            yield f"not served ({reason}): {', '.join(names)}"
        if not self.outcomes or len(self.not_served) == len(self.outcomes):
            yield "nothing was verified"
        for outcome in self.wrong:
            yield f"FAILED {outcome.wrong}"
        if self.smallest is not None:
            yield f"\nthe smallest failing case ({self.seconds_to_shrink:.1f} s): {self.sentence}"
        if self.saved is not None:
            yield f"its arrays, with the right answer: {self.saved}"
        if self.snippet is not None:
            yield f"\n{self.snippet}"


def verify_kernel(
    function: Callable[..., Any],
    op: str,
    terms: Terms | None = None,
    *,
    cases: Iterable[KernelCase] | None = None,
    name: str | None = None,
    shrink_seconds: float = 60.0,
    save: Path | str | None = None,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """Run a function over an operation's cases, and make the first that fails as small as may be.

    Args:
        op: a name in `OPERATIONS`.
        terms: what the function asks for, `Terms()` by default.
        cases: some of `cases_of(op)`, or others; all of them by default.
        name: MODULE:NAME of the function, for the snippet.
        shrink_seconds: at most so long; 0: not at all, and neither without hypothesis, the extra `verify`.
        save: a folder for the failing case's arrays, FUNCTION-OP.npz; None: they are not saved.
        progress: called with each outcome as soon as it is known.
    """
    terms = terms or Terms()
    outcomes = []
    for case in cases_of(op) if cases is None else cases:
        outcomes.append(_outcome(function, op, case, terms))
        progress(outcomes[-1])
    report = Report(op, terms, tuple(outcomes))
    if not report.wrong:
        return report
    start = time.monotonic()
    first = report.wrong[0].case
    smallest = shrinking.smallest_case(
        first, lambda case: _outcome(function, op, case, terms, worst_error).wrong is not None, shrink_seconds
    )
    path, seconds = name or frameworks.path_of(function), time.monotonic() - start
    return dataclasses.replace(
        report,
        smallest=smallest,
        sentence=_outcome(function, op, smallest, terms).wrong,
        snippet=shrinking.snippet(path, op, smallest, terms),
        saved=None if save is None else shrinking.save(Path(save), path, function, op, smallest, terms),
        seconds_to_shrink=seconds,
    )


def _outcome(
    function: Callable[..., Any], op: str, case: KernelCase, terms: Terms, run: Callable[..., float] = check
) -> Outcome:
    try:
        return Outcome(case, worst=run(function, op, case, terms))
    except NotServed as error:
        return Outcome(case, not_served=str(error))
    except WrongResult as error:
        return Outcome(case, wrong=str(error))
    except Exception as error:  # an outsider's function may raise anything
        return Outcome(case, wrong=f"{case}: {hints.raised(error, 200)}")
