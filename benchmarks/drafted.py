"""Answers with and without drafts, measured alike: what a result line has of them."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.record import in_turns, spread, times_of
from jaxpaged import LLM


def measured(drafting: LLM, ways: Mapping[str, Callable[[], list[list[int]]]], rounds: int) -> dict[str, Any]:
    """Return the seconds of each way to answer the same prompts, in turns, and one run's counts of drafts.

    ways: "with" asks `drafting`; "without" must have the same answers; more may be there.
    """
    before = drafting.engine.stats
    assert ways["without"]() == ways["with"](), "drafts change no answer"
    after = drafting.engine.stats
    seconds = in_turns(ways, rounds)
    ratios = times_of(seconds, "with")
    return {
        "steps": after.num_steps - before.num_steps,
        "drafted": after.num_draft_tokens - before.num_draft_tokens,
        "accepted": after.num_accepted_tokens - before.num_accepted_tokens,
        **{f"s {name}": spread(its) for name, its in seconds.items()},
        "times as fast": ratios["without"],
        **{f"times as fast as {name}": ratios[name] for name in ways if name not in ("with", "without")},
    }
