"""Properties of an engine's answers, gauges and events, checked over one history at a time."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from jaxpaged.research.verify import hints
from jaxpaged.research.verify.engines.contract import Adapter, Answer, Ask, Token, serves
from jaxpaged.research.verify.engines.histories import ANSWER, History, Request, stream

RULES = {
    "reuse": "a greedy answer does not depend on what is cached, on company, or on what came before: tokens "
    "are equal, and log-probabilities within the tolerance",
    "determinism": "one request, asked again and again alone, has one answer",
    "partition": "content of another salt, adapter or version of the weights is not found",
    "hits": "what the round before left whole in the cache is found, whatever options do not change K and V",
    "accounting": "cached tokens told are no more than the prompt has in common with what was there before, "
    "and the prompt's length is told right",
    "lifetime": "each request ends, and each gauge returns to its start when nothing runs",
    "events": "a block is removed after it was stored, a hash has one content, and a follower's picture "
    "gives the cached tokens told (at most so many, where layers are in several groups)",
}
QUIET_S = 5.0  # in which gauges must come to rest


@dataclass(frozen=True)
class Broken:
    """Property that does not hold, at which round, and how."""

    name: str
    what: str
    round: int


@dataclass
class Terms:
    """Terms of a comparison."""

    tolerance: float = 0.05  # of log-probabilities
    slack_blocks: int = 1  # blocks at a prompt's end that need not be found, as drafting heads drop one
    world: str = "0"
    until: float = float("inf")  # when a history is left off
    picture: "Picture | None" = None  # of what earlier histories left, where the engine is not reset


@dataclass
class Seen:
    """Counts of what was checked, and the largest difference of a log-probability."""

    checks: dict[str, int] = field(default_factory=dict)
    worst: float = 0.0
    ties: int = 0  # answers compared up to a token that is ahead by less than the tolerance

    def count(self, name: str) -> None:
        """Count a check of a property."""
        self.checks[name] = self.checks.get(name, 0) + 1


class Truth:
    """Cold answers: from another engine, after a reset, under a salt of one use, or as first asked."""

    def __init__(self, adapter: Adapter, reference: Adapter | None = None) -> None:
        self.adapter, self.reference = reference or adapter, reference
        is_told = reference is not None
        self.way = "reference" if is_told else "first"
        if not is_told and serves(adapter, "reset"):
            self.way = "reset"
        elif not is_told and serves(adapter, "salt"):
            self.way = "salt"
        self._number, self._known = 0, {}  # type: ignore[var-annotated]

    def forget(self) -> None:
        """Forget answers, as when tokens change."""
        self._known.clear()

    def of(self, ask: Ask, version: int = 0) -> Answer:
        """Return the cold answer to a request, alone and plain. `version`: loads of weights before it."""
        plain = Ask(ask.prompt, ask.max_tokens, adapter=ask.adapter, prompt_logprobs=ask.prompt_logprobs)
        key = (plain.prompt, plain.max_tokens, plain.adapter, plain.prompt_logprobs, version)
        if key not in self._known:
            if self.way == "reset":
                self.adapter.reset()  # type: ignore[attr-defined]
                for _ in range(version):
                    self.adapter.update()  # type: ignore[attr-defined]
            elif self.way == "salt":
                self._number += 1
                salt = f"cold {id(self)} {time.time_ns()} {self._number}"
                plain = Ask(
                    plain.prompt, plain.max_tokens, salt, plain.adapter, prompt_logprobs=plain.prompt_logprobs
                )
            self._known[key] = self.adapter.ask([plain])[0]
        return self._known[key]


def check(
    adapter: Adapter, history: History, truth: Truth, terms: Terms, seen: Seen, names: Iterable[str] = RULES
) -> Broken | None:
    """Run a history and return the first property, of these names, that does not hold."""
    for broken in _run(adapter, history, truth, terms, seen):
        if broken.name in names:
            return broken
    return None


def _prompt(
    adapter: Adapter, truth: Truth, terms: Terms, request: Request, version: int
) -> tuple[Token, ...]:
    tokens: list[Token] = []
    for name, length in request.parts:
        if name == ANSWER:
            before = Ask(tuple(tokens), length, adapter=request.adapter)
            true_answer = truth.of(before, version)
            tokens += true_answer.tokens[0][:length] if true_answer.tokens else ()
        else:
            tokens += stream(adapter.token_ids, terms.world, name, length)
    return tuple(tokens)


def _asked(adapter: Adapter, history: History, truth: Truth, terms: Terms) -> list[list[tuple[Ask, Answer]]]:
    """Return each round's requests with their cold answers."""
    rounds, version = [], 0
    for each in history:
        version += not each
        asks = [
            Ask(
                _prompt(adapter, truth, terms, r, version), r.max_tokens, r.salt, r.adapter, r.n,
                r.abort_after, r.prompt_logprobs, dict(r.options),
            )
            for r in each
        ]  # fmt: skip
        rounds.append([(ask, truth.of(ask, version)) for ask in asks])
        if time.monotonic() > terms.until:
            break
    return rounds


def _run(adapter: Any, history: History, truth: Truth, terms: Terms, seen: Seen) -> Iterator[Broken]:
    try:
        rounds = _asked(adapter, history, truth, terms)
        if serves(adapter, "reset"):
            adapter.reset()
            terms.picture = None
        picture = terms.picture
        if serves(adapter, "events"):
            if picture is None:
                picture = terms.picture = Picture(getattr(adapter, "num_groups", 1), serves(adapter, "reset"))
            picture.take(adapter.events())
        start = dict(adapter.gauges()) if serves(adapter, "gauges") else None
    except Exception as error:  # whatever an adapter raises
        yield Broken("lifetime", f"the engine raises {hints.raised(error, 200)}", 0)
        return
    there: list[tuple[Any, tuple[Token, ...]]] = []  # contents by partition
    before: tuple[Ask, tuple[Token, ...]] | None = None  # the round before, and what it computed
    version = 0
    is_same = len(history) > 3 and all(each == history[0] for each in history)
    for number, pairs in enumerate(rounds):
        if time.monotonic() > terms.until:
            return
        try:
            if not pairs:
                adapter.update()
                version, before = version + 1, None
                if picture is not None:
                    picture.take(adapter.events())
                continue
            asks = [ask for ask, _ in pairs]
            held = None if picture is None else picture.copy()
            answers = list(adapter.ask(asks))
        except Exception as error:  # whatever an adapter raises
            yield Broken("lifetime", f"the engine raises {hints.raised(error, 200)}", number)
            return
        if len(answers) != len(asks):
            yield Broken("lifetime", f"{len(asks)} requests have {len(answers)} answers", number)
            return
        new = [
            ((a.salt, a.adapter, version), (*a.prompt, *cold.tokens[0])) for a, cold in pairs if cold.tokens
        ]
        for (ask, cold), answer in zip(pairs, answers, strict=True):
            seen.count("lifetime")
            if answer.error is not None and cold.error is None:
                yield Broken("lifetime", f"a request fails: {answer.error}", number)
                continue
            if cold.error is not None:
                continue
            name = "determinism" if is_same else "reuse"
            seen.count(name)
            if what := differs(ask, answer, cold, terms, seen):
                yield Broken(name, what, number)
            if answer.cached is None:
                continue
            partition = (ask.salt, ask.adapter, version)
            content = there if len(asks) == 1 else [*there, *new]
            yield from _counts(
                adapter, ask, answer, content, partition, before, terms, seen, number, len(asks)
            )
        there += new
        # What was found may have been kept without what a shorter prefix needs, such as a window's blocks.
        is_whole = len(asks) == 1 and asks[0].abort_after is None and answers[0].cached == 0
        before = (asks[0], (*asks[0].prompt, *answers[0].tokens[0][:-1])) if is_whole else None
        if picture is not None:
            yield from (Broken("events", what, number) for what in picture.take(adapter.events()))
            seen.count("events")
            if (
                len(asks) == 1
                and held is not None
                and answers[0].cached is not None
                and asks[0].abort_after is None
            ):
                what = held.differs(asks[0], answers[0].cached)
                if what:
                    yield Broken("events", what, number)
        if start is not None and (what := _moved(adapter, start)):
            yield Broken("lifetime", what, number)
        if start is not None:
            seen.count("lifetime")


def differs(ask: Ask, answer: Answer, cold: Answer, terms: Terms, seen: Seen) -> str | None:
    """Return where an answer differs from the cold one, or None."""
    for i, got in enumerate(answer.tokens):
        want = cold.tokens[0]
        if ask.abort_after is not None:
            want = want[: len(got)]
        elif ask.options and len(got) > len(want):
            got = got[: len(want)]
        which = "" if len(answer.tokens) == 1 else f" of answer {i}"
        gots = answer.logprobs[i] if answer.logprobs else ()
        wants = cold.logprobs[0] if cold.logprobs else ()
        margins = cold.margins[0] if cold.margins else ()
        for at in range(max(len(got), len(want))):
            if at >= min(len(got), len(want)):
                return f"{len(got)} tokens{which} come, and {len(want)} are right"
            if got[at] != want[at]:
                if at < len(margins) and margins[at] <= terms.tolerance:
                    seen.ties += 1
                    break
                return f"token {at}{which} is {got[at]!r} and must be {want[at]!r}"
            if at < min(len(gots), len(wants)):
                gap = abs(gots[at] - wants[at])
                if not gap <= terms.tolerance:
                    said = f"the log-probability of token {at}{which} is {gots[at]:.6g}"
                    return f"{said} and must be {wants[at]:.6g} within {terms.tolerance:g}"
                seen.worst = max(seen.worst, gap)
    if ask.abort_after is None and len(answer.tokens) != ask.n:
        return f"{len(answer.tokens)} answers come, and {ask.n} were asked for"
    if answer.prompt_logprobs is not None and cold.prompt_logprobs is not None:
        pairs = list(zip(answer.prompt_logprobs, cold.prompt_logprobs, strict=False))
        if len(answer.prompt_logprobs) != len(cold.prompt_logprobs):
            num, right = len(answer.prompt_logprobs), len(cold.prompt_logprobs)
            return f"{num} log-probabilities of the prompt come, and {right} are right"
        for at, (a, b) in enumerate(pairs):
            if not abs(a - b) <= terms.tolerance:
                return f"the log-probability of prompt token {at + 1} is {a:.6g} and must be {b:.6g}"
    return None


def common(a: Sequence[Token], b: Sequence[Token]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _counts(
    adapter: Adapter, ask: Ask, answer: Answer, there: Sequence[tuple[Any, tuple[Token, ...]]],
    partition: Any,
    before: tuple[Ask, tuple[Token, ...]] | None, terms: Terms, seen: Seen, number: int, num_together: int,
) -> Iterator[Broken]:  # fmt: skip
    cached = answer.cached or 0
    is_ids = isinstance(ask.prompt[0], int)
    same = max((common(ask.prompt, tokens) for of, tokens in there if of == partition), default=0)
    other = max((common(ask.prompt, tokens) for of, tokens in there if of != partition), default=0)
    seen.count("accounting")
    if answer.num_prompt is not None and is_ids and answer.num_prompt != len(ask.prompt):
        yield Broken(
            "accounting", f"{answer.num_prompt} prompt tokens are told, and {len(ask.prompt)} sent", number
        )
    room = len(ask.prompt) if is_ids else answer.num_prompt or 0
    max_cached = (
        min(same, room) if is_ids else (room if same else 2)
    )  # of words: a mark at the beginning is common to all
    if cached > max_cached and num_together == 1:
        if other >= cached or (other and not is_ids):
            what = f"{cached} tokens are found that another salt, adapter or version of the weights left"
            yield Broken("partition", f"{what}; {same} are of the same", number)
        else:
            yield Broken(
                "accounting",
                f"{cached} tokens are told as cached, and at most {max_cached} were there",
                number,
            )
    if other:
        seen.count("partition")
    block = getattr(adapter, "block_size", 0) or 0
    if block and before is not None and num_together == 1:
        last, left = before
        is_same = (last.salt, last.adapter) == (ask.salt, ask.adapter) and not ask.prompt_logprobs
        least = (min(common(ask.prompt, left), len(ask.prompt) - 1) // block - terms.slack_blocks) * block
        if is_same and least > 0 and is_ids:
            seen.count("hits")
            if cached < least:
                what = f"{cached} tokens are found, and the request before left {least} or more"
                yield Broken("hits", what, number)


def _moved(adapter: Any, start: dict[str, float]) -> str | None:
    """Return which gauge stays away from its start."""
    until = time.monotonic() + (QUIET_S if getattr(adapter, "is_remote", False) else 0.0)
    while True:
        now = dict(adapter.gauges())
        moved = [
            f"{name} is {now.get(name)} and was {start[name]}"
            for name in start
            if now.get(name) != start[name]
        ]
        if not moved or time.monotonic() > until:
            return moved[0] if moved else None
        time.sleep(0.05)


class Picture:
    """Picture that a follower of events has of the cache: blocks of the first group, on any medium."""

    def __init__(self, num_groups: int = 1, is_whole: bool = True) -> None:
        self.is_whole = is_whole  # whether it began with an empty cache
        self.num_groups = num_groups  # with several, what others lack makes hits shorter than the picture's
        self.blocks: dict[Any, Stored] = {}  # by hash
        self.media: dict[Any, set[str]] = {}  # where each is
        self.contents: dict[Any, Stored] = {}  # all that each hash was ever stored for

    def copy(self) -> "Picture":
        """Return a picture that later events do not change."""
        made = Picture(self.num_groups, self.is_whole)
        made.blocks = dict(self.blocks)
        return made

    def take(self, events: Sequence[Any]) -> list[str]:
        """Follow events, and return the rules that they break."""
        wrong = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self.media.clear()
                self.is_whole = True
            elif event.group_idx:
                self.num_groups = max(self.num_groups, event.group_idx + 1)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    media = self.media.get(name, set())
                    if event.medium not in media and (self.is_whole or name in self.contents):
                        wrong.append(f"block {name} is removed, and was not stored")
                    media.discard(event.medium or "")
                    if not media:
                        self.blocks.pop(name, None)
            else:
                wrong += self._store(event)
        return wrong

    def _store(self, event: BlockStored) -> list[str]:
        parent, size, wrong = event.parent_block_hash, event.block_size, []
        if len(event.token_ids) != size * len(event.block_hashes):
            wrong.append(f"{len(event.block_hashes)} blocks of {size} have {len(event.token_ids)} tokens")
        for i, name in enumerate(event.block_hashes):
            extra = list((event.extra_keys[i] if event.extra_keys else None) or ())
            if event.lora_name in extra:
                extra.remove(event.lora_name)
            tokens = tuple(event.token_ids[i * size : (i + 1) * size])
            block = Stored(parent, tokens, event.lora_name, tuple(extra))
            if self.contents.setdefault(name, block) != block:
                wrong.append(f"block {name} is stored for two contents")
            self.blocks[name], parent = block, name
            self.media.setdefault(name, set()).add(event.medium or "")
        return wrong

    def differs(self, ask: Ask, cached: int) -> str | None:
        """Return a sentence about reported cached tokens that differ from the expected number; None if they
        agree.
        """
        if ask.prompt_logprobs:
            return None
        by_parent: dict[Any, list[tuple[Any, Stored]]] = {}
        for name, block in self.blocks.items():
            by_parent.setdefault(block.parent, []).append((name, block))
        at, parents, size = 0, [None], 1  # type: int, list[Any], int
        while True:
            following = []
            for parent in parents:
                extra = (ask.salt,) if parent is None and ask.salt is not None else ()
                for name, block in by_parent.get(parent, ()):
                    is_same = (block.adapter, block.extra) == (ask.adapter, extra)
                    if is_same and block.tokens == ask.prompt[at : at + len(block.tokens)]:
                        following.append(name)
                        size = len(block.tokens)
            if not following:
                break
            at, parents = at + size, following
        at = min(at, (len(ask.prompt) - 1) // size * size)
        if (cached > at and self.is_whole) or (cached < at and self.num_groups == 1):
            return f"{cached} tokens are found, and a follower of the events expects {at}"
        return None


@dataclass(frozen=True)
class Stored:
    """Content of a hash: parent, tokens, adapter, and the further parts of its key."""

    parent: Any
    tokens: tuple[Any, ...]
    adapter: str | None
    extra: tuple[str, ...]
