"""The walk: every state that a world can reach, what must hold in each, and the shortest way to what does
not.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpaged.config import PREFILL_TILE
from jaxpaged.memory.invariants import InvariantError, check_invariants
from jaxpaged.research.verify.explore.canonical import LIVE, blocks_of, key, live_rows, seen
from jaxpaged.research.verify.explore.worlds import Programs, World, slots_name
from jaxpaged.status import Status
from jaxpaged.step.state import EngineState, Phase

STEP, ARRIVE, ABORT = "step", "arrives", "is aborted"
BATCH = 128
TOLD = "admitted", "preempted", "swapped", "hits"  # what steps tell
type Event = tuple[str, int]  # what happens, and the request; -1 for a step


@dataclass
class Finding:
    """Property that does not hold, and the shortest history to it."""

    what: str
    path: list[Event]
    story: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"wrong: {self.what}", *(f"  {i}. {line}" for i, line in enumerate(self.story, 1))])


@dataclass
class Walk:
    """Result of a walk: the graph of states, by number, and what was wrong first."""

    world: World
    keys: dict[Any, int] = field(default_factory=dict)
    came_from: list[tuple[int, Event]] = field(default_factory=list)  # of each state: the first way to it
    edges: list[dict[Event, int]] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)  # what the oracle has, too
    work: list[int] = field(default_factory=list)  # steps within which all requests that are there must end
    depth: int = 0
    seconds: float = 0.0
    complete: bool = True  # whether no state was left out
    met: dict[str, int] = field(default_factory=dict)  # how often steps did what
    finding: Finding | None = None

    @property
    def num_edges(self) -> int:
        """Events from all states."""
        return sum(map(len, self.edges))

    def path(self, state: int) -> list[Event]:
        """Return the shortest history to a state."""
        path: list[Event] = []
        while state:
            state, event = self.came_from[state]
            path.append(event)
        return path[::-1]

    def __str__(self) -> str:
        met = ", ".join(f"{number} {kind}" for kind, number in self.met.items())
        left = "" if self.complete else ", stopped before all were met"
        return (
            f"{len(self.keys)} states, {self.num_edges} edges, depth {self.depth}, {self.seconds:.1f} s{left}"
            f"\n{met}" + ("" if self.finding is None else f"\n{self.finding}")
        )


def explore(world: World, *, max_states: int = 1_000_000) -> Walk:
    """Walk a world breadth first until an invariant is broken, or all states or `max_states` are seen."""
    began = time.monotonic()
    programs, walk = (
        Programs(world),
        Walk(world, met=dict.fromkeys((*TOLD, "accepted", "rejected"), 0)),
    )
    start = programs.state(programs.start)
    answers = [world.answer(ask) for ask in world.asks]
    _note(walk, start, 0, (STEP, -1))
    level = [(0, programs.start)]
    while level and walk.finding is None:
        following: list[tuple[int, list[np.ndarray]]] = []
        leaves_of = dict(level)
        for event, before, leaves, reported in _events(programs, level):
            after = programs.state(leaves)
            wrong = None
            if event[0] == STEP:
                wrong = _unfair(programs.state(leaves_of[before]), reported)
                for kind, array in zip(
                    TOLD, (reported[0], reported[1], reported[2], reported[4]), strict=True
                ):
                    walk.met[kind] += int(np.sum(array))
                _count_drafts(walk, programs.state(leaves_of[before]), after, reported[3])
            name = key(after)
            number = walk.keys.get(name)
            if number is None:
                wrong = wrong or wrong_in(after, answers)
                number = _note(walk, after, before, event)
                following.append((number, leaves))
            walk.edges[before][event] = number
            if event[0] == STEP and number == before:
                wrong = "a step changes nothing, though a request waits or runs"
            if wrong:
                walk.finding = Finding(wrong, [*walk.path(before), event])
                break
        level = following
        walk.depth += bool(level)
        if len(walk.keys) > max_states:
            walk.complete = False
            break
    if walk.finding is None:
        walk.finding = stuck(walk)
    walk.seconds = time.monotonic() - began
    if walk.finding is not None:
        walk.finding.story = tell(programs, walk.finding.path)
    return walk


def _count_drafts(walk: Walk, before: EngineState, after: EngineState, planned: np.ndarray) -> None:
    """Count drafts of rows that decode: a row's new tokens but the first were drafts, and right."""
    new = after.rows.num_tokens - before.rows.num_tokens
    decodes = (before.rows.phase == Phase.RUNNING) & (planned > 0)
    decodes &= before.tables.seq_lens == before.rows.num_tokens - 1
    walk.met["accepted"] += int(np.sum((new - 1)[decodes & (new > 0)]))
    walk.met["rejected"] += int(np.sum((planned - new)[decodes & (new > 0)]))


def _note(walk: Walk, state: EngineState, before: int, event: Event) -> int:
    number = walk.keys.setdefault(key(state), len(walk.keys))
    walk.came_from.append((before, event))
    walk.edges.append({})
    walk.seen.append(seen(state))
    walk.work.append(sum(work_of(walk.world, row) for row in live_rows(state)))
    return number


def work_of(world: World, row: int) -> int:
    """Return a request's steps: one for each tile of its prompt and token of its answer but the first."""
    ask = world.asks[row]
    return -(-len(ask.prompt) // PREFILL_TILE) + ask.max_num_tokens - len(ask.prompt) - 1


type Happened = tuple[Event, int, list[np.ndarray], list[np.ndarray]]


def _events(programs: Programs, level: list[tuple[int, list[np.ndarray]]]) -> Iterator[Happened]:
    """Let everything happen that can, from each state of a level: requests in turn, then a step."""
    num_rows = len(programs.world.asks)
    phase = [programs.state(leaves).rows.phase for _, leaves in level]
    for row in range(num_rows):
        new = [each for each, row_phases in zip(level, phase, strict=True) if row_phases[row] == Phase.EMPTY]
        yield from _batched(programs.arrive, new, (ARRIVE, row))
        if programs.world.aborts:
            live = [each for each, row_phases in zip(level, phase, strict=True) if row_phases[row] in LIVE]
            yield from _batched(programs.abort, live, (ABORT, row))
    works = [each for each, row_phases in zip(level, phase, strict=True) if np.isin(row_phases, LIVE).any()]
    yield from _batched(programs.advance, works, (STEP, -1))


def _batched(
    program: Callable[..., Any], states: list[tuple[int, list[np.ndarray]]], event: Event
) -> Iterator[Happened]:
    """Run a program over the states, BATCH at a time; the last batch is filled with its first state."""
    for first in range(0, len(states), BATCH):
        batch = states[first : first + BATCH]
        padded = [*batch, *[batch[0]] * (BATCH - len(batch))]
        stacked = [np.stack(leaves) for leaves in zip(*(leaves for _, leaves in padded), strict=True)]
        if event[0] == STEP:
            results, reported = program(stacked)
        else:
            results, reported = program(stacked, np.full(BATCH, event[1], np.int32)), []
        results, reported = [np.asarray(x) for x in results], [np.asarray(x) for x in reported]
        for i, (number, _) in enumerate(batch):
            yield event, number, [x[i] for x in results], [x[i] for x in reported]


def wrong_in(state: EngineState, answers: list[list[int]]) -> str | None:
    """Return a sentence about an invariant that a state breaks; None if it breaks none.

    Every block is free or held, as often as tables name it; what is findable was computed; the slots of
    computed tokens hold them; answers are those of the request alone.
    """
    if state.status != Status.OK:
        return f"a transition reported {Status(int(state.status))!r}"
    try:
        check_invariants(state.tables)
        if state.host is not None:
            check_invariants(state.host.tables)
    except InvariantError as error:
        return str(error)
    rows, tables, size = state.rows, state.tables, state.tables.block_size
    for row, phase in enumerate(rows.phase):
        name, tokens = letter(row), rows.token_ids[row, : rows.num_tokens[row]].tolist()
        if phase != Phase.EMPTY and tokens != answers[row][: len(tokens)]:
            return f"{name} has tokens {tokens}, alone it has {answers[row][: len(tokens)]}"
        if phase != Phase.RUNNING:
            if held := blocks_of(tables, row):
                return f"{name} is {Phase(int(phase)).name}, and holds blocks {held}"
            continue
        slots = _slots(state)[blocks_of(tables, row)].reshape(-1, 2)[: tables.seq_lens[row]]
        for position, (token, place) in enumerate(slots.astype(int).tolist()):
            if (token, place) != (tokens[position] + 1, position + 1):
                return f"{name} reads position {position} in a slot with token {token - 1} of {place - 1}"
    cache = tables.pool.prefix_cache
    if cache is None:
        return None
    for block in np.flatnonzero(cache.slot >= 0).tolist():
        known = [token if token >= 0 else -1 - token for token in cache.token_ids[block].tolist()]
        kept = _slots(state)[block].astype(int)
        if (
            (kept[:, 0] - 1).tolist() != known
            or (np.diff(kept[:, 1]) != 1).any()
            or kept[0, 1] % size != 1 % size
        ):
            return f"block {block} is found for tokens {known}, but holds {kept.tolist()}"
    return None


def _slots(state: EngineState) -> np.ndarray:
    """Return the content of the slots, [num_blocks, block_size, 2]."""
    cache = state.kv_cache
    return np.asarray(cache.blocks[slots_name(cache)]).reshape(cache.num_blocks, cache.block_size, 2)


def _unfair(before: EngineState, reported: list[np.ndarray]) -> str | None:
    """Return a sentence about rows that a step treated out of turn; None if there are none."""
    admitted, preempted = reported[:2]
    order, phase = live_rows(before), before.rows.phase
    waiting = [row for row in order if phase[row] != Phase.RUNNING]
    running = [row for row in order if phase[row] == Phase.RUNNING]
    for line, mask, verb in ((waiting, admitted, "admitted"), (running[::-1], preempted, "preempted")):
        passed = [row for row in line if not mask[row]]
        late = [row for row in line if mask[row] and passed and line.index(passed[0]) < line.index(row)]
        if late:
            return f"{letter(late[0])} is {verb} before {letter(passed[0])}"
    return None


def stuck(walk: Walk) -> Finding | None:
    """Return a state from which steps alone do not end all requests within their work; None: there is none.

    With n priorities the bound is n times the work.
    """
    bound = len({ask.priority for ask in walk.world.asks})
    num_steps: dict[int, int] = {}
    for start in range(len(walk.edges)):
        way: list[int] = []
        state = start
        on_way: set[int] = set()
        while state not in num_steps and (STEP, -1) in walk.edges[state]:
            if state in on_way:
                return Finding(
                    "steps go round in a circle, and no request ends",
                    [*walk.path(state), *[(STEP, -1)] * len(way)],
                )
            way.append(state)
            on_way.add(state)
            state = walk.edges[state][STEP, -1]
        num_steps.setdefault(state, 0)
        for number in way[::-1]:
            num_steps[number] = num_steps[walk.edges[number][STEP, -1]] + 1
        if walk.complete and num_steps[start] > bound * walk.work[start]:
            what = f"{num_steps[start]} steps end all requests, more than their work, {walk.work[start]}"
            return Finding(what, [*walk.path(start), *[(STEP, -1)] * num_steps[start]])
    return None


def letter(row: int) -> str:
    """Return a request's name in stories."""
    return chr(ord("A") + row)


def tell(programs: Programs, path: list[Event]) -> list[str]:
    """Return a history as a story, one line for each event."""
    leaves, lines = programs.start, []
    for event in path:
        ((_, _, leaves, reported),) = _batched(_program(programs, event), [(0, leaves)], event)
        state = programs.state(leaves)
        if event[0] != STEP:
            ask = programs.world.asks[event[1]]
            more = (
                f": prompt {list(ask.prompt)}, to {ask.max_num_tokens} tokens" if event[0] == ARRIVE else ""
            )
            lines.append(f"{letter(event[1])} {event[0]}{more}")
            continue
        kinds = zip(("admits", "preempts", "swaps out", "computes of"), reported, strict=False)
        did = [
            f"{kind} "
            + ", ".join(
                f"{letter(r)} ({mask[r]})" if kind == "computes of" else letter(r)
                for r in np.flatnonzero(mask).tolist()
            )
            for kind, mask in kinds
            if mask.any()
        ]
        held = [
            f"{letter(r)}: blocks {blocks_of(state.tables, r)}"
            for r in live_rows(state)
            if state.tables.seq_lens[r]
        ]
        lines.append(f"a step {'; '.join(did) or 'does nothing'}. {'; '.join(held)}".rstrip())
    return lines


def _program(programs: Programs, event: Event) -> Callable[..., Any]:
    return {STEP: programs.advance, ARRIVE: programs.arrive, ABORT: programs.abort}[event[0]]
