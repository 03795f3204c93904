"""Drafts of coming tokens from a sequence's own: the oracle of `jaxpaged.step.speculation`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

LONGEST_WAIT = 31


@dataclass(frozen=True)
class Lookup:
    """Drafts by what followed the longest end of a sequence that occurs before.

    most: drafts at once. longest, shortest: tokens of an end that is looked for.
    """

    most: int
    longest: int
    shortest: int


def followers(tokens: Sequence[int], lookup: Lookup) -> list[int]:
    """Return what followed where the last tokens occurred before, at most `lookup.most` tokens.

    The longest end that occurs counts; of its occurrences one with the most tokens behind it; of those the
    last.
    """
    for length in range(min(lookup.longest, len(tokens) - 1), lookup.shortest - 1, -1):
        end = list(tokens[len(tokens) - length :])
        found = [p for p in range(length, len(tokens)) if list(tokens[p - length : p]) == end]
        if found:
            position = max(found, key=lambda p: (min(len(tokens) - p, lookup.most), p))
            return list(tokens[position : position + lookup.most])
    return []


@dataclass
class Drafting:
    """Record of how a sequence's drafts have done: it says how many it may make next."""

    lookup: Lookup
    most: int = field(init=False)  # drafts that it may make at once
    misses: int = 0  # times in turn that no draft was right
    wait: int = 0  # steps until it drafts again
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])  # steps with drafts, drafts, and right ones

    def __post_init__(self) -> None:
        self.most = self.lookup.most

    def draft(self, tokens: Sequence[int], room: int) -> list[int]:
        """Return the drafts behind these tokens, at most `room`."""
        if self.wait:
            return []
        return followers(tokens, self.lookup)[: max(min(self.most, room), 0)]

    def note(self, num_drafts: int, num_right: int) -> None:
        """Learn from a step's drafts: about twice as many as were right, or a pause."""
        if num_drafts == 0:
            self.wait = max(self.wait - 1, 0)
            return
        self.counts = [n + more for n, more in zip(self.counts, (1, num_drafts, num_right), strict=True)]
        self.most = min(2 * num_right + 1, self.lookup.most)
        self.misses = 0 if num_right else self.misses + 1
        self.wait = min(2**self.misses - 1, LONGEST_WAIT)
