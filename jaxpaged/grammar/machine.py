"""Byte machine: nodes as an automaton over the bytes of UTF-8, first with choices, then without."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt8

from jaxpaged.grammar.automaton import NOT_ALLOWED, useful_states
from jaxpaged.grammar.nodes import (
    Chars,
    Either,
    GrammarError,
    Limits,
    Members,
    Node,
    Ranges,
    Repeat,
    Tagged,
    Then,
    others,
)

MAX_PARTS = 100_000  # states of the machine with choices
STATES_AHEAD = 4  # times as many states as the limit may be there before equal ones are merged
MAX_ROUNDS = 200  # of merging
MAX_WORK = 5_000_000  # states of the machine with choices that are looked at
ENCODED = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))


class ByteMachine(NamedTuple):
    """A deterministic automaton over bytes: S states, K kinds of bytes. State 0 is the start."""

    steps: Int[np.ndarray, "S K"]  # int32; `NOT_ALLOWED` where such a byte may not come
    kind_of: UInt8[np.ndarray, "256"]  # kinds of bytes
    accepting: Bool[np.ndarray, "S"]


def byte_machine(node: Node, limits: Limits) -> ByteMachine:
    """Return the automaton of a language; each state can be reached and can reach an end.

    Raises `GrammarError` if no text is in the language, or it has more states than the limits allow.
    """
    parts = _Parts()
    start, end = parts.new(), parts.new()
    parts.add(node, start, end)
    machine = _without_choices(parts, start, end, STATES_AHEAD * limits.max_states)
    kept = useful_states(machine.steps, machine.accepting, 0)
    if not kept[0]:
        raise GrammarError("the grammar cannot be met: no text is in it")
    machine = _merged(_renumbered(machine, np.where(kept, np.cumsum(kept) - 1, NOT_ALLOWED), kept))
    if len(machine.steps) > limits.max_states:
        raise too_many_states(limits.max_states)
    return machine


def too_many_states(most: int) -> GrammarError:
    return GrammarError(
        f"the grammar has more than {most} states: make repetitions shorter or leave them open"
    )


class _Parts:
    """A machine with choices: from each state, bytes and free steps lead to others."""

    def __init__(self) -> None:
        self.free: list[list[int]] = []
        self.arcs: list[list[tuple[int, int, int]]] = []  # first byte, last byte, state

    def new(self) -> int:
        if len(self.free) >= MAX_PARTS:
            raise GrammarError(f"the grammar has more than {MAX_PARTS} parts: make repetitions shorter")
        self.free.append([])
        self.arcs.append([])
        return len(self.free) - 1

    def add(self, node: Node, start: int, end: int) -> None:
        """Add a node's texts as ways from `start` to `end`."""
        match node:
            case Chars(ranges):
                self._add_bytes(utf8_of(ranges), start, end)
            case Then(parts):
                for part in parts[:-1]:
                    middle = self.new()
                    self.add(part, start, middle)
                    start = middle
                if parts:
                    self.add(parts[-1], start, end)
                else:
                    self.free[start].append(end)
            case Either(parts):
                for part in parts:
                    self._alone(part, start, end)
            case Repeat(part, least, most):
                self._repeat(part, least, most, start, end)
            case Members():
                self._members(node, start, end)
            case Tagged():
                self._tagged(node, start, end)

    def _after(self, state: int, low: int, high: int) -> int:
        new = self.new()
        self.arcs[state].append((low, high, new))
        return new

    def _alone(self, node: Node, start: int, end: int) -> None:
        """Add a node between states of its own, so that no loop of it is shared."""
        if isinstance(node, Chars):
            self.add(node, start, end)
            return
        first, last = self.new(), self.new()
        self.free[start].append(first)
        self.add(node, first, last)
        self.free[last].append(end)

    def _repeat(self, part: Node, least: int, most: int | None, start: int, end: int) -> None:
        for _ in range(least):
            middle = self.new()
            self._alone(part, start, middle)
            start = middle
        if most is None:
            loop = self.new()
            self.free[start].append(loop)
            self._alone(part, loop, loop)
            self.free[loop].append(end)
            return
        for _ in range(most - least):
            self.free[start].append(end)
            middle = self.new()
            self._alone(part, start, middle)
            start = middle
        self.free[start].append(end)

    def _members(self, node: Members, start: int, end: int) -> None:
        """Add each part once: it is entered with nothing before it, or behind a comma."""
        none, some = start, self.new()  # where nothing, and where something, has been written
        for part, is_required in node.parts:
            entry, after = self.new(), self.new()
            self.free[none].append(entry)
            self._alone(node.comma, some, entry)
            self._alone(part, entry, after)
            if is_required:
                none, some = self.new(), after  # nothing leads to `none`
            else:
                none_after = self.new()
                self.free[none].append(none_after)
                self.free[some].append(after)
                none, some = none_after, after
        if node.rest is not None:
            entry = self.new()
            self.free[none].append(entry)
            self._alone(node.comma, some, entry)
            self._alone(node.rest, entry, some)
        self.free[none].append(end)
        self.free[some].append(end)

    def _tagged(self, node: Tagged, start: int, end: int) -> None:
        """Add free text: a state for each beginning of a trigger that the text so far may end with."""
        triggers = dict(node.tags)
        beginnings = {trigger[:i] for trigger in triggers for i in range(len(trigger))}
        states = {begun: self.new() for begun in beginnings}
        letters = sorted({letter for trigger in triggers for letter in trigger})
        other = utf8_of(others((ord(letter), ord(letter)) for letter in letters))
        self.free[start].append(states[""])
        behind = states[""]  # where the text goes on behind a tag
        if node.ends_with_first:
            behind = end
        elif node.must_have_one:
            behind = self.new()
            self._alone(Tagged(node.tags), behind, end)
        entries = {trigger: self.new() for trigger in triggers}
        for trigger, part in node.tags:
            self._alone(part, entries[trigger], behind)
        for begun, state in states.items():
            if not node.must_have_one:
                self.free[state].append(end)
            self._add_bytes(other, state, states[""])
            for letter in letters:
                now = begun + letter
                ways = [entries[trigger] for trigger in triggers if now.endswith(trigger)]
                if not ways:
                    ways = [states[next(now[i:] for i in range(len(now) + 1) if now[i:] in states)]]
                for there in ways:
                    self._add_bytes(utf8_of(((ord(letter), ord(letter)),)), state, there)

    def _add_bytes(self, sequences: Sequence[Sequence[tuple[int, int]]], start: int, end: int) -> None:
        for sequence in sequences:
            state = start
            for low, high in sequence[:-1]:
                state = self._after(state, low, high)
            self.arcs[state].append((*sequence[-1], end))


def _without_choices(parts: _Parts, start: int, end: int, most: int) -> ByteMachine:
    """Return the machine whose states are sets of states: all that the bytes so far may lead to."""
    kind_of, arcs = _kinds(parts)
    num_kinds = int(kind_of.max()) + 1

    work = 0

    @functools.cache
    def reached(state: int) -> frozenset[int]:
        nonlocal work
        seen, waiting = {state}, [state]
        while waiting:
            for there in parts.free[waiting.pop()]:
                if there not in seen:
                    seen.add(there)
                    waiting.append(there)
        work += 8 * len(seen)
        if work > MAX_WORK:
            raise too_many_states(most // STATES_AHEAD)
        return frozenset(there for there in seen if arcs[there] or there == end)

    first = reached(start)
    numbers = {first: 0}
    waiting, rows = [first], []
    for states in waiting:
        targets: dict[int, set[int]] = {}
        for state in states:
            for low, high, there in arcs[state]:
                for kind in range(low, high):
                    targets.setdefault(kind, set()).add(there)
        row = np.full(num_kinds, NOT_ALLOWED, np.int32)
        known: dict[frozenset[int], int] = {}
        for kind, targeted in targets.items():
            key = frozenset(targeted)
            if key not in known:
                union = frozenset[int]().union(*map(reached, key))
                if union not in numbers:
                    numbers[union] = len(waiting)
                    waiting.append(union)
                known[key] = numbers[union]
            row[kind] = known[key]
        rows.append(row)
        work += len(states) + sum(map(len, targets.values()))
        if len(waiting) > most or work > MAX_WORK:
            raise too_many_states(most // STATES_AHEAD)
    return ByteMachine(np.stack(rows), kind_of, np.array([end in states for states in waiting]))


def _kinds(parts: _Parts) -> tuple[np.ndarray, list[list[tuple[int, int, int]]]]:
    """Return kinds of bytes that no arc tells apart, [256], and the arcs by ranges of kinds."""
    is_edge = np.zeros(257, bool)
    for arcs in parts.arcs:
        for low, high, _ in arcs:
            is_edge[low] = is_edge[high + 1] = True
    kind_of = np.cumsum(is_edge[:256])
    kind_of -= kind_of[0]
    by_kind = kind_of.tolist()
    ranges = [[(by_kind[low], by_kind[high] + 1, there) for low, high, there in arcs] for arcs in parts.arcs]
    return kind_of.astype(np.uint8), ranges


def _merged(machine: ByteMachine) -> ByteMachine:
    """Return the machine with states merged that nothing tells apart, where few rounds find them."""
    groups, num_groups = machine.accepting.astype(np.int32), 0
    for _ in range(MAX_ROUNDS):
        their = np.append(groups, NOT_ALLOWED)[machine.steps]
        rows = np.ascontiguousarray(np.concatenate([groups[:, None], their], axis=1), np.int32)
        found: dict[bytes, int] = {}
        groups = np.array([found.setdefault(row.tobytes(), len(found)) for row in rows], np.int32)
        if len(found) == num_groups:
            _, first = np.unique(groups, return_index=True)  # groups are numbered by their first state
            kept = np.zeros(len(groups), bool)
            kept[first] = True
            return _renumbered(machine, groups, kept)
        num_groups = len(found)
    return machine


def _renumbered(machine: ByteMachine, numbers: np.ndarray, kept: np.ndarray) -> ByteMachine:
    """Return the machine of some states, under new numbers; steps to states left out are not allowed."""
    if len(set(numbers[kept].tolist())) == len(numbers):
        return machine
    numbers = np.append(numbers, NOT_ALLOWED).astype(np.int32)
    return ByteMachine(numbers[machine.steps[kept]], machine.kind_of, machine.accepting[kept])


@functools.lru_cache(maxsize=1024)
def utf8_of(ranges: Ranges) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the UTF-8 of code points as sequences of ranges of bytes; surrogates have none."""
    found: list[tuple[tuple[int, int], ...]] = []
    for low, high in ranges:
        for first, last in ENCODED:
            if max(low, first) <= min(high, last):
                _split(max(low, first), min(high, last), found)
    return tuple(found)


def _split(low: int, high: int, found: list[tuple[tuple[int, int], ...]]) -> None:
    """Add sequences for code points of one length in bytes."""
    size = len(chr(low).encode())
    for bits in range(6, 6 * size, 6):
        mask = (1 << bits) - 1
        if low | mask < high:
            if low & mask:
                _split(low, low | mask, found)
                _split((low | mask) + 1, high, found)
                return
            if high & mask != mask:
                _split(low, (high & ~mask) - 1, found)
                _split(high & ~mask, high, found)
                return
    found.append(tuple(zip(chr(low).encode(), chr(high).encode(), strict=True)))
