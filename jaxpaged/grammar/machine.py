"""Compiler of nodes to automata over the bytes of UTF-8, first with choices, then without."""

import functools
import itertools
import math
import time
from collections.abc import Sequence

import numpy as np

from jaxpaged.grammar.automaton import NOT_ALLOWED
from jaxpaged.grammar.deterministic import ByteMachine, paired, too_many_states, useful
from jaxpaged.grammar.nodes import (
    Both,
    Chars,
    Distinct,
    Either,
    GrammarError,
    Limits,
    Members,
    Minus,
    Multiples,
    Node,
    Ranges,
    Ref,
    Repeat,
    Tagged,
    Then,
    TooLargeError,
    others,
)

MAX_PARTS = 100_000  # states of the machine with choices
STATES_AHEAD = 4  # times as many states as the limit may be there before equal ones are merged
MAX_WORK = 5_000_000  # states of the machine with choices that are looked at
WORK_UNTIMED = 1000  # between two looks at the time, which cost more than most work
ENCODED = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))


def byte_machine(node: Node, limits: Limits, seconds: float = math.inf) -> ByteMachine:
    """Return the automaton of a language; each state can be reached and can reach an end.

    seconds: of processor time, behind which it counts as too large.

    Raises `GrammarError` if no text is in the language, or it has more states than the limits allow.
    """
    compiler = _Compiler(STATES_AHEAD * limits.max_states, time.process_time() + seconds)
    machine = compiler.machine(node)
    if machine is None:
        raise GrammarError("the grammar cannot be met: no text is in it")
    if len(machine.steps) > limits.max_states:
        raise too_many_states(limits.max_states)
    return machine


class _Compiler:
    """A compiler of nodes, with the machines of parts that were made, and a bound of all work."""

    def __init__(self, max_states: int, deadline: float = math.inf) -> None:
        self.max_states, self.work = max_states, 0  # states of one machine; states that were looked at
        self.deadline = deadline  # of processor time
        self.next_look = 0  # work behind which the time is looked at
        # By identity: nodes share parts, so a hash or a comparison of their values could take forever.
        self.known: dict[int, tuple[Node, ByteMachine | None]] = {}

    def machine(self, node: Node) -> ByteMachine | None:
        """Return the machine of a node; None if it has no text."""
        if id(node) not in self.known:
            if isinstance(node, Both | Minus):
                made = self.combined(node)
            else:
                parts = _Parts(self)
                start, end = parts.new(), parts.new()
                parts.add(node, start, end)
                made = useful(_without_choices(parts, start, end))
            self.known[id(node)] = node, made
        return self.known[id(node)][1]

    def combined(self, node: Both | Minus) -> ByteMachine | None:
        """Return the machine of the texts of all parts of a `Both`, or of the first but not the second part
        of a `Minus`.
        """
        first, *others = node.parts if isinstance(node, Both) else (node.part, node.other)
        made = self.machine(first)
        for part in others:
            other = self.machine(part)
            if made is None or (other is None and isinstance(node, Both)):
                return None
            if other is not None:
                made = useful(paired(made, other, self.max_states, is_minus=isinstance(node, Minus)))
                self.spend(0 if made is None else 4 * len(made.steps))
        return made

    def spend(self, work: int) -> None:
        self.work += work
        if self.work > MAX_WORK:
            raise too_many_states(self.max_states // STATES_AHEAD)
        if self.work < self.next_look:
            return
        self.next_look = self.work + WORK_UNTIMED
        if time.process_time() > self.deadline:
            raise TooLargeError("the grammar takes too long to compile: make it simpler")


class _Parts:
    """A machine with choices: from each state, bytes and free steps lead to others."""

    def __init__(self, compiler: _Compiler) -> None:
        self.compiler = compiler
        self.free: list[list[int]] = []
        self.arcs: list[list[tuple[int, int, int]]] = []  # first byte, last byte, state

    def new(self) -> int:
        if len(self.free) >= MAX_PARTS:
            raise TooLargeError(f"the grammar has more than {MAX_PARTS} parts: make repetitions shorter")
        self.free.append([])
        self.arcs.append([])
        return len(self.free) - 1

    def add(self, node: Node, start: int, end: int) -> None:
        """Add a node's texts as paths from `start` to `end`."""
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
            case Repeat(part, minimum, maximum):
                self._repeat(part, minimum, maximum, start, end)
            case Members():
                self._members(node, start, end)
            case Tagged():
                self._tagged(node, start, end)
            case Both() | Minus():
                if (machine := self.compiler.machine(node)) is not None:
                    self._copy(machine, start, end)
            case Multiples():
                self._multiples(node, start, end)
            case Distinct():
                self._distinct(node, start, end)
            case Ref(name):
                raise TypeError(f"{name} is recursive, and has no machine")

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

    def _repeat(self, part: Node, minimum: int, maximum: int | None, start: int, end: int) -> None:
        for _ in range(minimum):
            middle = self.new()
            self._alone(part, start, middle)
            start = middle
        if maximum is None:
            loop = self.new()
            self.free[start].append(loop)
            self._alone(part, loop, loop)
            self.free[loop].append(end)
            return
        for _ in range(maximum - minimum):
            self.free[start].append(end)
            middle = self.new()
            self._alone(part, start, middle)
            start = middle
        self.free[start].append(end)

    def _members(self, node: Members, start: int, end: int) -> None:
        """Add each part once for each number of parts so far: entered with none before it, or behind a comma.

        Numbers are told apart as far as they matter; the last stands for all that are larger.
        """
        last = node.maximum if node.maximum is not None else max(node.minimum, 1)
        is_open = node.maximum is None
        counts = [start, *(self.new() for _ in range(last))]  # where so many parts have been written

        def entered(count: int) -> int:
            """Return the beginning of a part that makes so many."""
            entry = self.new()
            for before in (count - 1, count) if is_open and count == last else (count - 1,):
                if before == 0:
                    self.free[counts[0]].append(entry)
                else:
                    self._alone(node.comma, counts[before], entry)
            return entry

        for part, is_required in node.parts:
            behind = [self.new() for _ in counts]
            for count in range(1, last + 1):
                self._alone(part, entered(count), behind[count])
            if not is_required:
                for before, after in zip(counts, behind, strict=True):
                    self.free[before].append(after)
            counts = behind
        if node.rest is not None:
            for count in range(1, last + 1):
                self._alone(node.rest, entered(count), counts[count])
        for count in range(node.minimum, last + 1):
            self.free[counts[count]].append(end)

    def _copy(self, machine: ByteMachine, start: int, end: int) -> None:
        """Add a machine without choices."""
        states = [self.new() for _ in machine.steps]
        self.free[start].append(states[0])
        for state, targets in zip(states, machine.steps[:, machine.kind_of], strict=True):
            edges = [0, *(np.flatnonzero(np.diff(targets)) + 1).tolist(), 256]
            for low, high in itertools.pairwise(edges):
                if targets[low] != NOT_ALLOWED:
                    self.arcs[state].append((low, high - 1, states[targets[low]]))
        for i in np.flatnonzero(machine.accepting).tolist():
            self.free[states[i]].append(end)

    def _multiples(self, node: Multiples, start: int, end: int) -> None:
        """Add a state for each remainder of the digits so far, and each number of them in the fraction."""
        modulus, places = node.modulus, node.places
        states = [[self.new() for _ in range(modulus)] for _ in range(places + 1)]
        zero = self.new()  # behind a first 0, which no digit follows
        for digit in range(10):
            first = states[0][digit % modulus] if digit else zero
            self.arcs[start].append((48 + digit, 48 + digit, first))
        whole = [*enumerate(states[0]), (0, zero)]
        for used, row in enumerate(states):
            for rest, state in enumerate(row):
                if used == 0 or used < places:
                    there = states[used + 1 if used else 0]
                    for digit in range(10):
                        after = there[(10 * rest + digit) % modulus]
                        self.arcs[state].append((48 + digit, 48 + digit, after))
                if rest * 10 ** (places - used) % modulus == 0:
                    self.free[state].append(end)
        self.free[zero].append(end)
        if node.is_whole:
            return
        zeros = self.new()  # behind the last place that counts
        self.arcs[zeros].append((48, 48, zeros))
        self.free[zeros].append(end)
        for rest, state in whole:
            point = self._after(state, ord("."), ord("."))
            if places == 0:
                self.arcs[point] += [(48, 48, zeros)] if rest == 0 else []
                continue
            for digit in range(10):
                self.arcs[point].append((48 + digit, 48 + digit, states[1][(10 * rest + digit) % modulus]))
        if places:
            self.free[states[places][0]].append(zeros)

    def _distinct(self, node: Distinct, start: int, end: int) -> None:
        """Add a state for each set of parts that have been written."""
        states = {0: start}  # by the sum of 2**i of the parts in a set
        waiting = [0]
        for taken in waiting:
            state, size = states[taken], taken.bit_count()
            if size >= node.minimum:
                self.free[state].append(end)
            if size == node.maximum:
                continue
            entry = self.new()
            if taken:
                self._alone(node.comma, state, entry)
            else:
                self.free[state].append(entry)
            for i, part in enumerate(node.parts):
                there = taken | 1 << i
                if there == taken:
                    continue
                if there not in states:
                    states[there] = self.new()
                    waiting.append(there)
                self._alone(part, entry, states[there])

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
                alternatives = [entries[trigger] for trigger in triggers if now.endswith(trigger)]
                if not alternatives:
                    alternatives = [states[next(now[i:] for i in range(len(now) + 1) if now[i:] in states)]]
                for there in alternatives:
                    self._add_bytes(utf8_of(((ord(letter), ord(letter)),)), state, there)

    def _add_bytes(self, sequences: Sequence[Sequence[tuple[int, int]]], start: int, end: int) -> None:
        for sequence in sequences:
            state = start
            for low, high in sequence[:-1]:
                state = self._after(state, low, high)
            self.arcs[state].append((*sequence[-1], end))


def _without_choices(parts: _Parts, start: int, end: int) -> ByteMachine:
    """Return the machine whose states are sets of states: all that the bytes so far may lead to."""
    kind_of, arcs = _kinds(parts)
    num_kinds = int(kind_of.max()) + 1
    compiler = parts.compiler

    @functools.cache
    def reached(state: int) -> frozenset[int]:
        seen, waiting = {state}, [state]
        while waiting:
            for there in parts.free[waiting.pop()]:
                if there not in seen:
                    seen.add(there)
                    waiting.append(there)
        compiler.spend(8 * len(seen))
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
        compiler.spend(len(states) + sum(map(len, targets.values())))
        if len(waiting) > compiler.max_states:
            raise too_many_states(compiler.max_states // STATES_AHEAD)
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


@functools.lru_cache(maxsize=1024)
def utf8_of(ranges: Ranges) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the UTF-8 of code points as sequences of ranges of bytes; surrogates have none."""
    sequences: list[tuple[tuple[int, int], ...]] = []
    for low, high in ranges:
        for first, last in ENCODED:
            if max(low, first) <= min(high, last):
                _split(max(low, first), min(high, last), sequences)
    return tuple(sequences)


def _split(low: int, high: int, sequences: list[tuple[tuple[int, int], ...]]) -> None:
    """Add sequences for code points of one length in bytes."""
    size = len(chr(low).encode())
    for bits in range(6, 6 * size, 6):
        mask = (1 << bits) - 1
        if low | mask < high:
            if low & mask:
                _split(low, low | mask, sequences)
                _split((low | mask) + 1, high, sequences)
                return
            if high & mask != mask:
                _split(low, (high & ~mask) - 1, sequences)
                _split(high & ~mask, high, sequences)
                return
    sequences.append(tuple(zip(chr(low).encode(), chr(high).encode(), strict=True)))
