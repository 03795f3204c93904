"""Drafts of coming tokens, from a sequence's own or by a second model: the oracle of
`jaxpaged.step.speculation`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LONGEST_WAIT = 31
PARTS = 64  # of a step, in which costs of drafts are counted
AT_FIRST, MOST_SAVED, MOST_DEBT = PARTS // 2, 4 * PARTS, 64 * PARTS
DEAR = PARTS // 4
MOST_BEHIND = 2  # steps without drafts, after which a model that drafts catches up in tiles
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
    """Return the tokens that followed an earlier occurrence of the last tokens, at most `lookup.most`.

    The longest end that occurs counts; of its occurrences one with the most tokens behind it; of those the
    last.
    """
    for length in range(min(lookup.longest, len(tokens) - 1), lookup.shortest - 1, -1):
        end = list(tokens[len(tokens) - length :])
        positions = [p for p in range(length, len(tokens)) if list(tokens[p - length : p]) == end]
        if positions:
            position = max(positions, key=lambda p: (min(len(tokens) - p, lookup.most), p))
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
        places: list[Place] = [
            (number, p)
            for number, text in enumerate(texts)
            for p in range(length, len(text))
            if text[p - length : p] == end
        ]
        if places:
            break
    else:
        return []
    places = places[-MOST_OCCURRENCES:]
    drafts: list[int] = []
    total, max_drafts = len(places), min(lookup.most, int(length * lookup.factor))
    while len(drafts) < max_drafts:
        lines = [*texts[:-1], texts[-1] + drafts]
        places = [(number, p) for number, p in places if p + len(drafts) < len(lines[number])]
        follow = {(number, p): lines[number][p + len(drafts)] for number, p in places}
        counts = Counter(follow.values())
        last = max(places, key=lambda place: (counts[follow[place]], place), default=None)
        places = [place for place in places if last is not None and follow[place] == follow[last]]
        if last is None or len(places) / total < lookup.min_prob:
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


@dataclass(frozen=True)
class DraftCost:
    """Cost of drafts, in parts of a step of one row.

    row: the slot that verifies a draft.
    passes: what a model that drafts computes for one.
    tile: and for a tile of a prompt, when it begins with it.
    """

    row: int
    passes: int = 0
    tile: int = 0

    def of(self, num_rows: int) -> int:
        """Return the cost of one draft while `num_rows` rows run, in parts of a row's share of the step."""
        return self.passes + PARTS * self.row * num_rows // (PARTS + self.row * (num_rows - 1))


@dataclass
class Credit:
    """Record of the savings of all sequences' drafts, less their cost.

    cost: what drafts cost; None: nothing is limited.
    """

    cost: DraftCost | None = None
    parts: int = 0
    change: int = 0  # in this step

    def settle(self) -> None:
        """Add the step's change."""
        self.parts = max(min(self.parts + self.change, MOST_SAVED), -MOST_DEBT)
        self.change = 0


@dataclass
class Drafting:
    """Record of the results of a sequence's drafts, which decides the number of the next drafts."""

    lookup: AnyLookup
    past: Past = field(default_factory=lambda: Past(0))  # of all requests
    salt: int = 0
    credit: Credit = field(default_factory=Credit)  # of all requests
    prompt_len: int = 0
    tile_len: int = 32
    most: int = field(init=False)  # drafts that it may make at once
    misses: int = 0  # times in turn that no draft was right
    wait: int = 0  # steps until it drafts again
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])  # steps with drafts, drafts, and right ones
    has_begun: bool = False  # whether a model that drafts has computed the sequence
    idle: int = 0  # steps since it drafted
    each: int = 0  # what a draft of this step costs

    def __post_init__(self) -> None:
        self.most = self.lookup.most

    def draft(
        self,
        tokens: Sequence[int],
        room: int,
        prompt_len: int,
        forced: Sequence[int] = (),
        num_rows: int = 1,
    ) -> list[int]:
        """Return the drafts behind these tokens, at most `room`: one token less than may still come.

        num_rows: how many rows run.
        forced: the tokens that must come next, by a grammar: they are drafted however drafts have done. A
            model that drafts finds them itself.
        """
        self.each = 0 if self.credit.cost is None else self.credit.cost.of(num_rows)
        if forced and room > 0 and not isinstance(self.lookup, ByModel):
            return list(forced[: min(self.lookup.most, room)])
        if self.wait or isinstance(self.lookup, ByGrammar):
            return []
        if self.catches_up and not self.is_worth_it(room + 1, prompt_len):
            return []
        max_drafts = min(self.most, room, self.affordable(len(tokens) - prompt_len))
        if isinstance(self.lookup, ByModel):
            drafts = chosen_by(self.lookup.next_token, tokens, self.lookup.most)
        elif isinstance(self.lookup, Lookup):
            drafts = followers(tokens, self.lookup)
        else:
            drafts = likely_followers(tokens, self.lookup, self.past.of(self.salt))
        return drafts[: max(max_drafts, 0)]

    def affordable(self, num_answered: int) -> int:
        """Return how many drafts more it may make: they may have cost more than they have saved by a part
        for each token of the answer, and by half a step and all together's savings where there are some.
        """
        if self.credit.cost is None:
            return self.lookup.most
        at_first = AT_FIRST + self.credit.parts if self.credit.parts >= 0 else 0
        _, num_drafted, num_right = self.counts
        return (PARTS * num_right + num_answered + at_first) // self.each - num_drafted

    @property
    def catches_up(self) -> bool:
        """Whether a drafting model has tiles to compute first: of the prompt, or of tokens since."""
        return isinstance(self.lookup, ByModel) and (not self.has_begun or self.idle >= MOST_BEHIND)

    def is_worth_it(self, may_come: int, prompt_len: int) -> bool:
        """Return whether a model that drafts computes tiles, where so many tokens may still come."""
        assert isinstance(self.lookup, ByModel)
        if self.credit.cost is not None and self.credit.parts < 0:
            return False
        max_prompt_per_token = self.lookup.most_prompt
        return self.has_begun or max_prompt_per_token is None or prompt_len <= max_prompt_per_token * may_come

    def note(self, num_drafts: int, num_right: int, num_new: int = 0) -> None:
        """Learn from a step's drafts, behind which there are so many new tokens: about twice as many drafts
        as were right, or one more where they are dear, or a pause.
        """
        self.credit.change += PARTS * num_right + num_new - self.each * num_drafts
        if num_drafts == 0:
            self.wait = max(self.wait - 1, 0)
            self.idle += 1
            return
        cost = self.credit.cost
        if cost is not None and self.catches_up:
            num_behind = self.idle if self.has_begun else self.prompt_len
            self.credit.change -= cost.tile * -(-num_behind // self.tile_len)
        self.has_begun, self.idle = True, 0
        self.counts = [n + more for n, more in zip(self.counts, (1, num_drafts, num_right), strict=True)]
        self.most = min((2 if self.each < DEAR else 1) * num_right + 1, self.lookup.most)
        self.misses = 0 if num_right else self.misses + 1
        self.wait = min(2**self.misses - 1, LONGEST_WAIT)
