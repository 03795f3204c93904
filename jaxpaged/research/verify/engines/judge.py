"""Judge of an engine: random histories until time is up, the first failure of each property made small.

report = verify_engine(adapter, seconds=60)
assert report.ok, report
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.checks import InputError, checked_int, checked_number
from jaxpaged.research.verify.engines import histories
from jaxpaged.research.verify.engines.contract import Adapter, serves
from jaxpaged.research.verify.engines.histories import FAMILIES, History
from jaxpaged.research.verify.engines.properties import RULES, Broken, Seen, Terms, Truth, check

REPEATS = 2  # times that a small history is run again before it is reported
BLOCK_SHARE = 0.5  # of the time: at most so much for shrinking


@dataclass(frozen=True)
class Finding:
    """Property that does not hold, and the smallest history that shows it."""

    name: str
    what: str
    rule: str
    history: tuple[str, ...]  # a round a line
    family: str
    seed: int
    reproduced: int  # of REPEATS
    seconds: float  # until it was found, shrinking apart


@dataclass
class EngineReport:
    """Report on an engine: the properties that were checked, those not served, and the findings."""

    name: str
    way: str  # where cold answers come from
    terms: Terms
    seed: int
    num_histories: int = 0
    seconds: float = 0.0
    seen: Seen = field(default_factory=Seen)
    findings: list[Finding] = field(default_factory=list)
    not_served: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether at least one property was verified, and no finding was made."""
        return not self.findings and self.seen.checks.get("reuse", 0) > 0


def verify_engine(
    adapter: Adapter,
    *,
    name: str = "",
    seconds: float = 60.0,
    seed: int = 0,
    tolerance: float = 0.05,
    slack_blocks: int = 1,
    longest: int = 96,
    families: tuple[str, ...] = (),
    reference: Adapter | None = None,
    stop_at_first: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> EngineReport:
    """Run histories of all families in turn until time is up, and shrink the first failure of each property.

    Args:
        seconds: bound of the whole; a history that has begun is ended.
        tolerance: largest difference of log-probabilities that is right.
        slack_blocks: blocks at a prompt's end that need not be found.
        longest: tokens of the longest prompt.
        families: names of families of histories; all by default.
        reference: engine whose answers are right, such as one without a cache.
        stop_at_first: whether the first finding ends it.
        progress: called with a line for each finding.

    Raises: InputError for an adapter that lacks what is needed, or a value out of its bounds.
    """
    checked_number("seconds", seconds, "above 0", 0.001)
    checked_number("tolerance", tolerance, "at least 0", 0)
    checked_int("slack_blocks", slack_blocks, "at least 0", 0)
    checked_int("longest", longest, "an int from 16 to 100000", 16, 100_000)
    for needed in ("ask", "token_ids"):
        if not hasattr(adapter, needed):
            raise InputError(f"the adapter has no {needed}; a {type(adapter).__name__} must have it")
    known = [family.name for family in FAMILIES]
    for each in families:
        if each not in known:
            raise InputError(f"family={each!r} must be one of {', '.join(known)}")
    terms = Terms(tolerance, slack_blocks)
    report = EngineReport(name or type(adapter).__name__, Truth(adapter, reference).way, terms, seed)
    sizes, began, spent = histories.sizes_of(adapter, longest), time.monotonic(), 0.0
    served = []
    for family in FAMILIES:
        missing = [what for what in family.needs if not serves(adapter, what)]
        if missing:
            report.not_served[family.name] = f"the engine does not serve {', '.join(missing)}"
        elif not families or family.name in families:
            served.append(family)
    for what in ("gauges", "events"):
        if not serves(adapter, what):
            report.not_served[what] = f"the adapter has no {what}()"
    number, failed = 0, set[str]()
    while time.monotonic() - began < seconds and served and not (stop_at_first and report.findings):
        family = served[number % len(served)]
        if family.name == "many salts" and number >= len(served):
            served.remove(family)  # once is enough: it is long
            continue
        of = random.Random(f"{seed} {number}")
        history = family.make(of, sizes)
        broken = _judged(
            adapter, history, terms, report.seen, f"{seed} {number}", reference, failed, began + seconds
        )
        world, number = f"{seed} {number}", number + 1
        report.num_histories = number
        if broken is None:
            continue
        found_s = time.monotonic() - began - spent
        start = time.monotonic()
        until = min(start + max(2.0, (seconds - spent) * BLOCK_SHARE / 2), began + seconds + 2.0)
        finding = _finding(adapter, history, broken, report, reference, until, world)
        report.findings.append(
            Finding(**finding, family=family.name, seed=number - 1, seconds=round(found_s, 3))
        )
        failed.add(broken.name)
        spent += time.monotonic() - start
        progress(f"{broken.name}: {finding['what']}")
    report.seconds = time.monotonic() - began
    return report


def _judged(
    adapter: Adapter, history: History, terms: Terms, seen: Seen, world: str, reference: Adapter | None,
    leaving: set[str], until: float, only: str | None = None,
) -> Broken | None:  # fmt: skip
    """Run a history with new tokens. `leaving`: properties that have failed before."""
    terms.world, terms.until = world, until
    truth = Truth(adapter, reference)
    names = [only] if only else [name for name in RULES if name not in leaving]
    return check(adapter, history, truth, terms, seen, names)


def _finding(
    adapter: Adapter, history: History, broken: Broken, report: EngineReport, reference: Adapter | None,
    until: float, world: str,
) -> dict[str, Any]:  # fmt: skip
    unseen, tries = Seen(), 0
    smallest, last = history[: broken.round + 1], broken

    def fails(candidate: History) -> Broken | None:
        nonlocal tries
        tries += 1
        # Without a reset, tokens must be new, so that nothing of an earlier try is found.
        other = (
            world if report.way in ("reset", "reference") and serves(adapter, "reset") else f"{world} {tries}"
        )
        return _judged(
            adapter, candidate, report.terms, unseen, other, reference, set(), until + 5.0, broken.name
        )

    begun = fails(smallest)
    if begun is None:
        smallest = history
    else:
        last = begun
    progress = True
    while progress and time.monotonic() < until:
        progress = False
        for candidate in histories.smaller(smallest):
            if time.monotonic() > until:
                break
            if candidate and (failure := fails(candidate)) is not None:
                smallest, last, progress = candidate, failure, True
                break
    again = [fails(smallest) for _ in range(REPEATS)]
    return {
        "name": broken.name,
        "what": last.what,
        "rule": RULES[broken.name],
        "history": tuple(histories.lines(smallest)),
        "reproduced": sum(each is not None for each in again),
    }
