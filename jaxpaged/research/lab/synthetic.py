"""Made traces: conversations and agents, in the form that Mooncake's traces have.

A seed gives the same trace on every machine. Lengths and pauses are drawn from distributions that are named
here. They are not fitted to any service.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from jaxpaged.research.lab.traces import Trace, of_requests

BLOCK = 64  # tokens of an id

type Request = dict[str, Any]


class _Prompt:
    """A prompt that grows: the ids of its full blocks, and the tokens after them."""

    def __init__(self, fresh: Callable[[], int], ids: list[int], tail: int = 0) -> None:
        self.fresh, self.full, self.tail, self.tail_id = fresh, [*ids], tail, fresh()

    def __len__(self) -> int:
        return BLOCK * len(self.full) + self.tail

    @property
    def ids(self) -> list[int]:
        return self.full + [self.tail_id] * (self.tail > 0)

    def add(self, num_tokens: int) -> None:
        """Add tokens that no other prompt has."""
        filled, self.tail = divmod(self.tail + num_tokens, BLOCK)
        self.full += [self.fresh() for _ in range(filled)]
        self.tail_id = self.fresh()

    def forked(self) -> "_Prompt":
        """Return a prompt that begins with this one."""
        fork = _Prompt(self.fresh, self.full, self.tail)
        fork.tail_id = self.tail_id
        return fork


def _length(rng: random.Random, median: float, spread: float, max_length: int) -> int:
    """Draw a length: log-normal, at least 1."""
    return max(1, min(max_length, round(median * rng.lognormvariate(0, spread))))


def _zipf(rng: random.Random, num: int) -> int:
    """Draw a number below `num`; the first is the most likely, the second half as likely, and so on."""
    return rng.choices(range(num), [1 / (1 + i) for i in range(num)])[0]


def _merged(num_requests: int, sessions: Iterator[tuple[float, Iterator[tuple[float, Request]]]]) -> Trace:
    """Return the first requests, by time, of sessions that begin one after the other.

    A session yields a request and the seconds after which its next one comes.
    """
    lines: list[Request] = []
    order = itertools.count()  # sessions cannot be compared
    start, session = next(sessions)
    coming = [(start, next(order), session)]
    newest = start
    while len(lines) < num_requests:
        while newest <= coming[0][0]:
            newest, session = next(sessions)
            heapq.heappush(coming, (newest, next(order), session))
        now, number, session = heapq.heappop(coming)
        for pause, request in session:
            lines.append({"timestamp": round(1000 * now), **request, "block_size": BLOCK})
            heapq.heappush(coming, (now + pause, number, session))
            break
    return of_requests(lines)


def _request(prompt: _Prompt, output_length: int) -> Request:
    return {"input_length": len(prompt), "output_length": output_length, "hash_ids": prompt.ids}


def chat(num_requests: int = 1000, seed: int = 0, *, sessions_a_second: float = 0.5) -> Trace:
    """Make a trace of people who talk to assistants.

    Eight assistants have a system prompt each, of 200 to 1,700 tokens; the first is the most popular. A
    conversation has 6 turns in the mean, of about 80 tokens, with a pause of about a minute after each. Each
    prompt repeats all turns and answers before. Answers have about 250 tokens. Every twentieth turn is asked
    a second time, after a few seconds.
    """
    rng, fresh = random.Random(seed), itertools.count().__next__
    systems = []
    for _ in range(8):
        system = _Prompt(fresh, [])
        system.add(rng.randint(200, 1700))
        systems.append(system)

    def conversation() -> Iterator[tuple[float, Request]]:
        prompt = systems[_zipf(rng, len(systems))].forked()
        while True:
            prompt.add(_length(rng, 80, 1.0, 4000))
            answer = _length(rng, 250, 0.7, 2000)
            if rng.random() < 0.05:
                yield 5 * rng.random(), _request(prompt, answer)
            yield 60 * rng.lognormvariate(0, 1), _request(prompt, answer)
            prompt.add(answer)
            if rng.random() < 1 / 6:
                return

    def sessions() -> Iterator[tuple[float, Iterator[tuple[float, Request]]]]:
        now = 0.0
        while True:
            yield now, conversation()
            now += rng.expovariate(sessions_a_second)

    return _merged(num_requests, sessions())


def agents(num_requests: int = 1000, seed: int = 0, *, sessions_a_second: float = 0.05) -> Trace:
    """Make a trace of agents that call tools.

    Four kinds of agents have instructions and tools of 3,000 to 8,000 tokens; each works on one of twelve
    projects, whose notes of 1,000 to 4,000 tokens come next. A task has 15 calls in the mean. Each call adds
    an answer of about 150 tokens and a result of about 600, two to sixty seconds later. Every tenth call
    sends out three helpers, which begin with the prompt so far and make three calls each. A prompt that
    reaches 32,000 tokens is cut to its instructions, notes and a summary of 800 tokens.
    """
    rng, fresh = random.Random(seed), itertools.count().__next__
    starts: dict[tuple[int, int], _Prompt] = {}
    kinds = []
    for _ in range(4):
        kind = _Prompt(fresh, [])
        kind.add(rng.randint(3000, 8000))
        kinds.append(kind)
    notes = [rng.randint(1000, 4000) for _ in range(12)]

    def calls(prompt: _Prompt, start: _Prompt, max_calls: int | None) -> Iterator[tuple[float, Request]]:
        for number in itertools.count(1):
            answer = _length(rng, 150, 0.7, 2000)
            yield min(60.0, 2 + rng.expovariate(1 / 8)), _request(prompt, answer)
            if number == max_calls or (max_calls is None and rng.random() < 1 / 15):
                return
            prompt.add(answer + _length(rng, 600, 1.0, 8000))
            if len(prompt) > 32000:
                prompt = start.forked()
                prompt.add(800)
            if max_calls is None and rng.random() < 0.1:
                yield from helped(prompt, start)

    def helped(prompt: _Prompt, start: _Prompt) -> Iterator[tuple[float, Request]]:
        """Merge the calls of helpers in turns, as if they ran at the same time."""
        at_work = []
        for _ in range(3):
            helper = prompt.forked()
            helper.add(_length(rng, 120, 0.5, 1000))
            at_work.append(calls(helper, start, 3))
        for turn in zip(*at_work, strict=True):
            for pause, request in turn:
                yield pause / 3, request

    def task() -> Iterator[tuple[float, Request]]:
        kind, project = _zipf(rng, len(kinds)), _zipf(rng, len(notes))
        if (kind, project) not in starts:
            starts[kind, project] = kinds[kind].forked()
            starts[kind, project].add(notes[project])
        start = starts[kind, project]
        prompt = start.forked()
        prompt.add(_length(rng, 200, 0.8, 3000))
        yield from calls(prompt, start, None)

    def sessions() -> Iterator[tuple[float, Iterator[tuple[float, Request]]]]:
        now = 0.0
        while True:
            yield now, task()
            now += rng.expovariate(sessions_a_second)

    return _merged(num_requests, sessions())
