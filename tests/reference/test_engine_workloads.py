"""The engine's oracle: random workloads must end, in time, with the right tokens."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.engine import Engine
from reference.engine_blocks import cdiv
from reference.engine_state import EngineConfig, Phase, Reach, Request, Row, Step
from reference.speculation import Lookup, SuffixLookup
from tests.reference.engines import check

# Random workloads: nothing is foreseen but that they end, in time, with the right tokens.


def scramble(tokens: list[int]) -> int:
    """Return an answer out of the same few tokens as the prompts, so that it can be mistaken for one."""
    return (sum((i + 1) * token for i, token in enumerate(tokens)) + len(tokens)) % 3


def alone(request: Request) -> list[int]:
    tokens = list(request.prompt)
    while len(tokens) < request.max_num_tokens:
        tokens.append(scramble(tokens))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens


def work(request: Request, tile_len: int) -> int:
    """Return how many steps a request takes at most while it is the first."""
    prompt_len = len(request.prompt)
    return cdiv(prompt_len, tile_len) + request.max_num_tokens - prompt_len - 1


FULL = Reach()
# Groups of layers, the one that sees most first.
REACHES = [
    (FULL,),
    (FULL,),
    *((Reach(window=window),) for window in (1, 2, 5, 8)),
    *((FULL, Reach(window=window)) for window in (1, 3, 6)),
    (FULL, Reach(chunk=4)),
    (FULL, Reach(window=5), Reach(chunk=3)),
    (Reach(window=8), Reach(window=2)),
]

COMMON = [0, 1, 2, 2, 0, 1, 0, 0, 2, 1, 1, 2]


@dataclasses.dataclass(frozen=True)
class Event:
    """A request, and how many steps follow before the next; perhaps the abort of another one then."""

    prompt: list[int]
    max_new_tokens: int
    stops: bool
    priority: int
    salt: int
    num_steps: int
    aborts: int | None


prompts = st.builds(
    lambda shared, own: (COMMON[:shared] + own) or [0],
    st.integers(0, len(COMMON)),
    st.lists(st.integers(0, 2), max_size=4),
)
events = st.builds(
    Event,
    prompt=prompts,
    max_new_tokens=st.sampled_from([1, 3, 8, 12]),
    stops=st.sampled_from([False, False, False, True]),
    priority=st.integers(0, 2),
    salt=st.sampled_from([0, 0, 0, 1]),
    num_steps=st.sampled_from([0, 0, 1, 4]),
    aborts=st.sampled_from([None, None, None, 0, 2, 5]),
)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[EngineConfig, list[Event]]:
    """Draw requests, and an engine whose pool is just large enough for the largest, or a little larger."""
    requests = draw(st.lists(events, min_size=3, max_size=9))
    longest = max(len(event.prompt) + event.max_new_tokens for event in requests) - 1
    max_num_seqs = draw(st.sampled_from([1, 2, 3, 4, 4]))
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        num_rows=2 * max_num_seqs,
        num_tiles=draw(st.integers(1, 3)),
        tile_len=draw(st.integers(1, 5)),
        block_size=draw(st.integers(1, 3)),
        num_blocks=2,
        max_blocks_per_seq=longest,
        num_host_blocks=draw(st.sampled_from([0, 4, 9, 30])),
        reaches=draw(st.sampled_from(REACHES)),
        watermark_blocks=draw(st.sampled_from([0, 0, 2])),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        reuse_answers=draw(st.booleans()),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
    )
    if config.tile_len % 2:
        by_suffix = SuffixLookup(most=3, depth=6, factor=1.0, min_prob=0.4)
        lookup = by_suffix if config.num_tiles == 2 else Lookup(most=3, longest=2, shortest=1)
        config = dataclasses.replace(config, lookup=lookup)
    num_blocks = (
        1 + Engine(config, scramble).blocks.most_held(longest) + draw(st.sampled_from([0, 0, 1, 2, 5]))
    )
    return dataclasses.replace(config, num_blocks=num_blocks), requests


class Workload:
    """An engine, and the host's view of it: what has been submitted, and until when it must be finished."""

    def __init__(self, config: EngineConfig, fcfs: bool) -> None:
        self.engine, self.fcfs = Engine(config, scramble), fcfs
        self.num_steps = 0
        self.deadlines: dict[int, int] = {}  # of requests by arrival

    def unfinished(self) -> list[Row]:
        """Return the unfinished rows in the order of requests."""
        rows = [row for row in self.engine.rows if row is not None and row.phase is not Phase.FINISHED]
        return sorted(rows, key=lambda row: row.request.order)

    def submit(self, request: Request) -> None:
        """Submit a request as soon as there is a row."""
        rows = self.engine.rows
        while all(row is not None and row.phase is not Phase.FINISHED for row in rows):
            self.step()
        free = [i for i, row in enumerate(rows) if row is None or row.phase is Phase.FINISHED]
        self.engine.submit(request, free[-1])
        works = [work(row.request, self.engine.config.tile_len) for row in self.unfinished()]
        total = sum(works) if self.fcfs else sum(works) * len(works)
        self.deadlines[request.arrival] = self.num_steps + total
        if not self.fcfs:  # who comes may hold back all others
            for row in self.unfinished():
                self.deadlines[row.request.arrival] = self.num_steps + total

    def step(self) -> Step:
        engine, config = self.engine, self.engine.config
        before = {row.index: (row.computed, row.num_tokens) for row in self.unfinished()}
        step = engine.step()
        self.num_steps += 1
        check(engine)
        assert not (step.preempted and step.admitted)
        assert len(step.num_new_tokens) <= config.max_num_seqs
        assert step.num_new_tokens or not before, "somebody gets on"
        num_tiles = num_decoded = 0
        for index, num_new in step.num_new_tokens.items():
            row = engine.rows[index]
            assert row is not None
            start = step.admitted.get(index, 0) * config.block_size or before[index][0]
            if start < row.prompt_len:
                assert start + num_new <= row.prompt_len, "an answer token in a tile"
                num_tiles += cdiv(start + num_new, config.tile_len) - start // config.tile_len
                assert (start + num_new) % config.tile_len == 0 or start + num_new == row.prompt_len
            else:
                assert num_new == 1 or config.lookup is not None
                num_decoded += num_new
            assert (index in step.new_tokens) == (start + num_new >= before[index][1])
        assert num_tiles <= config.num_tiles
        assert num_decoded <= config.max_num_seqs
        for index in step.finished:
            row = engine.rows[index]
            assert row is not None
            assert row.tokens == alone(row.request)
            assert self.num_steps <= self.deadlines[row.request.arrival], f"{row.request} came too late"
        unfinished = self.unfinished()
        running = [row for row in unfinished if row.phase is Phase.RUNNING]
        assert not self.fcfs or running == unfinished[: len(running)], "somebody has been overtaken"
        for row in unfinished:
            assert self.num_steps < self.deadlines[row.request.arrival], f"{row.request} waits too long"
        return step


@pytest.mark.parametrize("fcfs", [True, False])
def test_all_requests_finish_in_time_with_the_tokens_they_have_alone(fcfs: bool) -> None:
    happened: set[str] = set()

    @settings(max_examples=250, deadline=None, derandomize=True, database=None)
    @given(workloads())
    def play(drawn: tuple[EngineConfig, list[Event]]) -> None:
        config, events = drawn
        workload = Workload(config, fcfs)
        steps = []
        for arrival, event in enumerate(events):
            workload.submit(
                Request(
                    arrival,
                    event.prompt,
                    len(event.prompt) + event.max_new_tokens,
                    stop_token_ids=[1] if event.stops else [],
                    priority=0 if fcfs else event.priority,
                    salt=event.salt,
                )
            )
            steps += [workload.step() for _ in range(event.num_steps)]
            if event.aborts is not None:
                workload.engine.abort(event.aborts)
                check(workload.engine)
        while workload.unfinished():
            steps.append(workload.step())
        assert workload.engine.pool.get_num_free_blocks() == config.num_blocks - 1
        for step in steps:
            happened.update(step.preempted.values())
            happened.update("hit" for num_hits in step.admitted.values() if num_hits)
            happened.update(step.finished.values())
            happened.update("back" for _ in step.copies_in)

    play()
    assert happened == {"recompute", "swap", "hit", "stop", "length", "back"}
