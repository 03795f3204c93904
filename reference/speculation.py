"""Drafts of coming tokens, from a sequence's own or by a second model: the oracle of
`jaxpaged.step.speculation`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LONGEST_WAIT = 31
MOST_OCCURRENCES = 32


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


@dataclass(frozen=True)
class SuffixLookup:
    """Drafts by what mostly followed the longest end of a sequence that occurs before.

    most: drafts at once.
    depth: tokens of an end and of most drafts behind it.
    factor: drafts for each token of the end.
    min_prob: the least share of the end's occurrences in which all drafts up to one followed.
    """

    most: int
    depth: int
    factor: float
    min_prob: float


def likely_followers(tokens: Sequence[int], lookup: SuffixLookup) -> list[int]:
    """Return the tokens that mostly followed where the last tokens occurred before.

    The longest end that occurs counts; of its occurrences the last MOST_OCCURRENCES. Token by token the draft
    is what most of them have next; of several tokens the one that came last. Those that have another token
    count no more. One that comes to the end of the sequence goes on with the drafts.
    """
    for length in range(min(lookup.depth - lookup.most, len(tokens) - 1), 0, -1):
        end = list(tokens[len(tokens) - length :])
        found = [p for p in range(length, len(tokens)) if list(tokens[p - length : p]) == end]
        if found:
            break
    else:
        return []
    found = found[-MOST_OCCURRENCES:]
    drafts: list[int] = []
    total, most = len(found), min(lookup.most, int(length * lookup.factor))
    while len(drafts) < most:
        line = [*tokens, *drafts]
        follow = {p: line[p + len(drafts)] for p in found}
        counts = Counter(follow.values())
        last = max(found, key=lambda p: (counts[follow[p]], p))
        found = [p for p in found if follow[p] == follow[last]]
        if len(found) / total < lookup.min_prob:
            break
        drafts.append(follow[last])
    return drafts


@dataclass(frozen=True)
class ByModel:
    """Drafts by a second model.

    most: drafts at once.
    next_token: returns what the model would choose behind these tokens.
    """

    most: int
    next_token: Callable[[list[int]], int]


@dataclass(frozen=True)
class ByGrammar:
    """Drafts of the text that a grammar forces, and of no other.

    most: drafts at once.
    """

    most: int


def chosen_by(next_token: Callable[[list[int]], int], tokens: Sequence[int], num: int) -> list[int]:
    """Return the next tokens by a model that is shown its own."""
    line = list(tokens)
    while len(line) < len(tokens) + num:
        line.append(next_token(list(line)))
    return line[len(tokens) :]


@dataclass
class Drafting:
    """Record of how a sequence's drafts have done: it says how many it may make next."""

    lookup: Lookup | SuffixLookup | ByModel | ByGrammar
    most: int = field(init=False)  # drafts that it may make at once
    misses: int = 0  # times in turn that no draft was right
    wait: int = 0  # steps until it drafts again
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])  # steps with drafts, drafts, and right ones

    def __post_init__(self) -> None:
        self.most = self.lookup.most

    def draft(self, tokens: Sequence[int], room: int, forced: Sequence[int] = ()) -> list[int]:
        """Return the drafts behind these tokens, at most `room`.

        forced: the tokens that must come next, by a grammar: they are drafted however drafts have done. A
            model that drafts finds them itself.
        """
        if forced and room > 0 and not isinstance(self.lookup, ByModel):
            return list(forced[: min(self.lookup.most, room)])
        if self.wait or isinstance(self.lookup, ByGrammar):
            return []
        if isinstance(self.lookup, ByModel):
            found = chosen_by(self.lookup.next_token, tokens, self.lookup.most)
        elif isinstance(self.lookup, Lookup):
            found = followers(tokens, self.lookup)
        else:
            found = likely_followers(tokens, self.lookup)
        return found[: max(min(self.most, room), 0)]

    def note(self, num_drafts: int, num_right: int) -> None:
        """Learn from a step's drafts: about twice as many as were right, or a pause."""
        if num_drafts == 0:
            self.wait = max(self.wait - 1, 0)
            return
        self.counts = [n + more for n, more in zip(self.counts, (1, num_drafts, num_right), strict=True)]
        self.most = min(2 * num_right + 1, self.lookup.most)
        self.misses = 0 if num_right else self.misses + 1
        self.wait = min(2**self.misses - 1, LONGEST_WAIT)
