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
    past_tokens: tokens of past answers that are looked into, too.
    """

    most: int
    depth: int
    factor: float
    min_prob: float
    past_tokens: int = 0


@dataclass
class Past:
    """Answers that have ended, each with the salt of its request: the last `num_tokens` tokens of all."""

    num_tokens: int
    answers: list[tuple[int, list[int]]] = field(default_factory=list)  # the oldest first

    def keep(self, salt: int, answer: Sequence[int]) -> None:
        """Keep an answer in place of the oldest tokens."""
        self.answers.append((salt, list(answer)))
        too_many = sum(len(tokens) for _, tokens in self.answers) - self.num_tokens
        while too_many > 0:
            (its_salt, oldest), *others = self.answers
            left = [(its_salt, oldest[too_many:])] if too_many < len(oldest) else []
            self.answers = [*left, *others]
            too_many -= len(oldest)

    def of(self, salt: int) -> list[list[int]]:
        """Return the answers to requests with this salt; no other is seen."""
        return [tokens for its_salt, tokens in self.answers if its_salt == salt]


def likely_followers(
    tokens: Sequence[int], lookup: SuffixLookup, past: Sequence[Sequence[int]] = ()
) -> list[int]:
    """Return the tokens that mostly followed where the last tokens occurred before, here or in past answers.

    The longest end that occurs counts; of its occurrences the last MOST_OCCURRENCES: those in past answers
    are older than all here. Token by token the draft is what most of them have next; of several tokens the
    one that came last. Those that have another token, or none, count no more. One that comes to the end of
    the sequence goes on with the drafts.
    """
    texts = [*map(list, past), list(tokens)]
    type Place = tuple[int, int]  # a text, and a token of it
    for length in range(min(lookup.depth - lookup.most, len(tokens)), 0, -1):
        end = list(tokens[len(tokens) - length :])
        found: list[Place] = [
            (number, p)
            for number, text in enumerate(texts)
            for p in range(length, len(text))
            if text[p - length : p] == end
        ]
        if found:
            break
    else:
        return []
    found = found[-MOST_OCCURRENCES:]
    drafts: list[int] = []
    total, most = len(found), min(lookup.most, int(length * lookup.factor))
    while len(drafts) < most:
        lines = [*texts[:-1], texts[-1] + drafts]
        found = [(number, p) for number, p in found if p + len(drafts) < len(lines[number])]
        follow = {(number, p): lines[number][p + len(drafts)] for number, p in found}
        counts = Counter(follow.values())
        last = max(found, key=lambda place: (counts[follow[place]], place), default=None)
        found = [place for place in found if last is not None and follow[place] == follow[last]]
        if last is None or len(found) / total < lookup.min_prob:
            break
        drafts.append(follow[last])
    return drafts


@dataclass(frozen=True)
class ByModel:
    """Drafts by a second model.

    most: drafts at once.
    next_token: returns what the model would choose behind these tokens.
    most_prompt: tokens of a prompt, for each token that may still come, that it computes to draft.
    """

    most: int
    next_token: Callable[[list[int]], int]
    most_prompt: int | None = None


@dataclass(frozen=True)
class ByGrammar:
    """Drafts of the text that a grammar forces, and of no other.

    most: drafts at once.
    """

    most: int


type AnyLookup = Lookup | SuffixLookup | ByModel | ByGrammar


def chosen_by(next_token: Callable[[list[int]], int], tokens: Sequence[int], num: int) -> list[int]:
    """Return the next tokens by a model that is shown its own."""
    line = list(tokens)
    while len(line) < len(tokens) + num:
        line.append(next_token(list(line)))
    return line[len(tokens) :]


@dataclass
class Drafting:
    """Record of how a sequence's drafts have done: it says how many it may make next."""

    lookup: AnyLookup
    past: Past = field(default_factory=lambda: Past(0))  # of all requests
    salt: int = 0
    most: int = field(init=False)  # drafts that it may make at once
    misses: int = 0  # times in turn that no draft was right
    wait: int = 0  # steps until it drafts again
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])  # steps with drafts, drafts, and right ones
    has_begun: bool = False  # whether a model that drafts has computed the sequence

    def __post_init__(self) -> None:
        self.most = self.lookup.most

    def draft(
        self, tokens: Sequence[int], room: int, prompt_len: int, forced: Sequence[int] = ()
    ) -> list[int]:
        """Return the drafts behind these tokens, at most `room`: one token less than may still come.

        forced: the tokens that must come next, by a grammar: they are drafted however drafts have done. A
            model that drafts finds them itself.
        """
        if forced and room > 0 and not isinstance(self.lookup, ByModel):
            return list(forced[: min(self.lookup.most, room)])
        if self.wait or isinstance(self.lookup, ByGrammar):
            return []
        if not (self.has_begun or self.is_worth_it(room + 1, prompt_len)):
            return []
        if isinstance(self.lookup, ByModel):
            found = chosen_by(self.lookup.next_token, tokens, self.lookup.most)
        elif isinstance(self.lookup, Lookup):
            found = followers(tokens, self.lookup)
        else:
            found = likely_followers(tokens, self.lookup, self.past.of(self.salt))
        return found[: max(min(self.most, room), 0)]

    def is_worth_it(self, may_come: int, prompt_len: int) -> bool:
        """Return whether a model that drafts begins with a prompt, where so many tokens may still come."""
        most = self.lookup.most_prompt if isinstance(self.lookup, ByModel) else None
        return most is None or prompt_len <= most * may_come

    def note(self, num_drafts: int, num_right: int) -> None:
        """Learn from a step's drafts: about twice as many as were right, or a pause."""
        if num_drafts == 0:
            self.wait = max(self.wait - 1, 0)
            return
        self.has_begun = True
        self.counts = [n + more for n, more in zip(self.counts, (1, num_drafts, num_right), strict=True)]
        self.most = min(2 * num_right + 1, self.lookup.most)
        self.misses = 0 if num_right else self.misses + 1
        self.wait = min(2**self.misses - 1, LONGEST_WAIT)
