"""Conflicts between lexemes: where the longest match of one takes what belongs behind another."""

import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from jaxpaged.grammar.automaton import NOT_ALLOWED
from jaxpaged.grammar.deterministic import ByteMachine
from jaxpaged.grammar.edges import Edges
from jaxpaged.grammar.nodes import GrammarError
from jaxpaged.grammar.productions import Call, Choice, Leaf, Lexemes, Loop, Part, Row

MAX_SETS = 20_000  # sets of states that lexemes may be in at once
MAX_ROWS = 5000  # rows of places that are possible at once
MAX_PAIRS = 20_000  # of rows
_Places = frozenset[int]


def conflicts(made: Lexemes, machine_of: Mapping[int, ByteMachine]) -> set[int]:
    """Return the lexemes that may go on, where another one ends, with a byte that may follow that.

    Two lexemes are looked at where they may be possible at once: some are that never are, and none is missed.
    machine_of: the machine of each lexeme by its number, or one with more texts.
    """
    numbers = sorted({leaf.number for leaf in leaves_of(made)})
    machines = [machine_of[number] for number in numbers]
    first = {
        number: _bits(machine.steps[0][machine.kind_of] != NOT_ALLOWED)
        for number, machine in zip(numbers, machines, strict=True)
    }
    follow = _Follow(made, first).of_leaves()
    offsets = np.cumsum([0, *(len(machine.steps) for machine in machines)])
    rows = [
        np.where(next_states != NOT_ALLOWED, next_states + offset, NOT_ALLOWED)
        for machine, offset in zip(machines, offsets[:-1], strict=True)
        for next_states in [machine.steps[:, machine.kind_of]]
    ]
    by_byte = np.ascontiguousarray(np.concatenate(rows).T)
    kinds: dict[bytes, int] = {}  # of bytes that no machine tells apart
    kind_of = np.array([kinds.setdefault(row.tobytes(), len(kinds)) for row in by_byte])
    columns = by_byte[np.unique(kind_of, return_index=True)[1]].T
    owner = np.repeat(np.arange(len(numbers)), np.diff(offsets))
    accepting = np.concatenate([machine.accepting for machine in machines])
    behind = np.zeros((len(numbers), columns.shape[1]), bool)  # kinds of bytes that may follow each
    for i, number in enumerate(numbers):
        letters = [byte for byte in range(256) if follow.get(number, 0) >> byte & 1]
        behind[i, kind_of[letters]] = True
    alike = {(number, number) for number in numbers}  # lexemes with a text in common
    lost: set[tuple[int, int]] = set()  # one that ends, and one that goes on
    goes_on = ((columns != NOT_ALLOWED) & behind[owner]).any(axis=1) & accepting
    lost |= {(numbers[i], numbers[i]) for i in np.unique(owner[goes_on]).tolist()}
    start = offsets[:-1].astype(np.int64)
    seen, waiting = {start.tobytes()}, [start]
    for states in waiting:
        there = columns[states]
        owners = owner[states].tolist()
        for end in np.flatnonzero(accepting[states]).tolist():
            goes_on = ((there != NOT_ALLOWED) & behind[owners[end]]).any(axis=1)
            lost |= {(numbers[owners[end]], numbers[owners[i]]) for i in np.flatnonzero(goes_on).tolist()}
            alike |= {
                (numbers[owners[end]], numbers[owners[i]]) for i in np.flatnonzero(accepting[states]).tolist()
            }
        for column in {column.tobytes(): column for column in there.T}.values():
            following = np.unique(column[column != NOT_ALLOWED]).astype(np.int64)
            # A lexeme alone was looked at above.
            if len(following) > 1 and (key := following.tobytes()) not in seen:
                seen.add(key)
                waiting.append(following)
        if len(waiting) > MAX_SETS:
            raise GrammarError("the grammar has too many parts that may begin alike: make it simpler")
    if not lost:
        return set()
    at_once = _AtOnce(made, alike, lost).pairs()
    return {other for one, other in lost if one == other or at_once is None or (one, other) in at_once}


def conflicts_alone(made: Lexemes, edges: Edges) -> set[int]:
    """Return lexemes that may go on, where one of their texts ends, with a byte that may follow.

    It takes no machine, and misses some. One may be none, where only a few of a part's texts count.
    """
    edge_of = {leaf.number: edges.of(made.nodes[leaf.number]) for leaf in leaves_of(made)}
    follow = _Follow(made, {number: edge.first for number, edge in edge_of.items()}).of_leaves()
    return {number for number, edge in edge_of.items() if edge.more & follow.get(number, 0)}


def leaves_of(made: Lexemes) -> Iterable[Leaf]:
    """Yield the lexemes of all rules, wherever they stand."""
    waiting: list[Part] = [made.start, *made.named.values()]
    while waiting:
        match waiting.pop():
            case Leaf() as leaf:
                yield leaf
            case Row(parts) | Choice(parts):
                waiting += parts
            case Loop(part):
                waiting.append(part)


def _bits(marks: np.ndarray) -> int:
    """Return marks as the bits of a number."""
    return sum(1 << int(i) for i in np.flatnonzero(marks))


class _Follow:
    """Bytes that may begin parts, and that may follow them: as the bits of a number."""

    def __init__(self, made: Lexemes, first: dict[int, int]) -> None:
        self.made, self.leaf_first = made, first
        self.begun = dict.fromkeys(made.named, (0, False))  # of rules
        self.follow = dict.fromkeys(made.named, 0)
        self.behind: dict[int, int] = {}
        self.known: dict[int, tuple[int, bool]] = {}

    def of_leaves(self) -> dict[int, int]:
        """Return the bytes that may follow each lexeme."""
        while True:
            now = {name: self.begins(part) for name, part in self.made.named.items()}
            self.known = {}
            if now == self.begun:
                break
            self.begun = now
        while True:
            before = self.follow.copy(), self.behind.copy()
            self.walk(self.made.start, 0)
            for name, part in self.made.named.items():
                self.walk(part, self.follow[name])
            if before == (self.follow, self.behind):
                return self.behind

    def begins(self, part: Part) -> tuple[int, bool]:
        """Return the bytes that may begin a part, and whether it may be empty."""
        if id(part) not in self.known:
            self.known[id(part)] = self.begins_anew(part)
        return self.known[id(part)]

    def begins_anew(self, part: Part) -> tuple[int, bool]:
        match part:
            case Leaf(number):
                return self.leaf_first[number], False
            case Call(name):
                return self.begun[name]
            case Loop(inside, minimum):
                first, nullable = self.begins(inside)
                return first, nullable or minimum == 0
        first_bytes, is_row = 0, isinstance(part, Row)
        nullable = is_row
        for each in part.parts:
            if is_row and not nullable:
                break
            first, is_empty = self.begins(each)
            first_bytes |= first
            nullable = is_empty if is_row else nullable or is_empty
        return first_bytes, nullable

    def walk(self, part: Part, behind: int) -> None:
        """Record the bytes that may follow each part of a rule's part."""
        match part:
            case Leaf(number):
                self.behind[number] = self.behind.get(number, 0) | behind
            case Call(name):
                self.follow[name] |= behind
            case Loop(inside, _, maximum):
                self.walk(inside, behind if maximum == 1 else behind | self.begins(inside)[0])
            case Choice(parts):
                for each in parts:
                    self.walk(each, behind)
            case Row(parts):
                for each in reversed(parts):
                    self.walk(each, behind)
                    first, nullable = self.begins(each)
                    behind = first | behind if nullable else first


class _AtOnce:
    """Lexemes that may be possible at once.

    A place is a leaf where it stands. Behind each stand rows: places possible at once, by one caller of each
    rule. Places that have a text in common are gone through at once, and then the rows behind both are
    possible together.
    """

    def __init__(self, made: Lexemes, alike: set[tuple[int, int]], asked: set[tuple[int, int]]) -> None:
        self.made, self.asked = made, asked
        self.alike_to: dict[int, list[int]] = {}
        for one, other in alike:
            self.alike_to.setdefault(one, []).append(other)
        self.known: dict[_Places, dict[int, list[int]]] = {}
        self.leaves: list[int] = []  # a lexeme for each place
        self.places: dict[int, int] = {}  # by the identity of a leaf
        self.begun: dict[str, tuple[_Places, bool]] = {name: (frozenset(), False) for name in made.named}
        self.twice: set[int] = set()  # places that are come to in several ways at once
        self.rows: dict[str, set[_Places]] = {name: set() for name in made.named}
        self.behind: dict[int, set[_Places]] = {}
        self.num_rows = 0

    def pairs(self) -> set[tuple[int, int]] | None:
        """Return the pairs of `asked` that are; None where there are too many rows to be found out."""
        while True:
            now = {name: self.begins(part) for name, part in self.made.named.items()}
            if now == self.begun:
                break
            self.begun = now
        start, _ = self.begins(self.made.start)
        before = -1
        while before != self.num_rows:
            before = self.num_rows
            self.walk(self.made.start, {frozenset()})
            for name, part in self.made.named.items():
                self.walk(part, set(self.rows[name]))
            if self.num_rows > MAX_ROWS:
                return None
        rows = {start, *itertools.chain(*self.behind.values())}
        waiting: list[tuple[_Places, _Places, bool]] = [(row, row, True) for row in rows]
        seen: set[tuple[_Places, _Places, bool]] = set(waiting)
        gone = set[tuple[int, int]]()
        ambiguous = set[tuple[int, int]]()

        def go(one: int, other: int) -> None:
            if (one, other) not in gone:
                gone.add((one, other))
                for pair in itertools.product(self.behind.get(one, ()), self.behind.get(other, ())):
                    if (item := (*pair, False)) not in seen:
                        seen.add(item)
                        waiting.append(item)

        for place in self.twice:
            go(place, place)
        for one, other, is_same in waiting:
            ours, theirs = self.by_lexeme(one), self.by_lexeme(other)
            for first in ours:
                ambiguous |= {(first, second) for second in theirs if (first, second) in self.asked}
                ambiguous |= {(second, first) for second in theirs if (second, first) in self.asked}
                for second in self.alike_to.get(first, ()):
                    for pair in itertools.product(ours[first], theirs.get(second, ())):
                        if not (is_same and pair[0] == pair[1]):
                            go(*pair)
            if len(waiting) > MAX_PAIRS:
                return None
        return ambiguous

    def by_lexeme(self, row: _Places) -> dict[int, list[int]]:
        """Return the places of a row by their lexemes."""
        if row not in self.known:
            made: dict[int, list[int]] = {}
            for place in row:
                made.setdefault(self.leaves[place], []).append(place)
            self.known[row] = made
        return self.known[row]

    def place(self, leaf: Leaf) -> int:
        if id(leaf) not in self.places:
            self.places[id(leaf)] = len(self.leaves)
            self.leaves.append(leaf.number)
        return self.places[id(leaf)]

    def joined(self, one: _Places, other: _Places) -> _Places:
        self.twice |= one & other
        return one | other

    def begins(self, part: Part) -> tuple[_Places, bool]:
        """Return the positions that may be first in a part, and whether the part may be empty."""
        match part:
            case Leaf():
                return frozenset([self.place(part)]), False
            case Call(name):
                return self.begun[name]
            case Loop(inside, minimum):
                first, nullable = self.begins(inside)
                return first, nullable or minimum == 0
        first_places: _Places = frozenset()
        is_row = isinstance(part, Row)
        nullable = is_row
        for each in part.parts:
            if is_row and not nullable:
                break
            first, is_empty = self.begins(each)
            first_places = self.joined(first_places, first)
            nullable = is_empty if is_row else nullable or is_empty
        return first_places, nullable

    def walk(self, part: Part, rows: "set[_Places]") -> None:
        """Record the rows that may follow each part of a rule's part."""
        match part:
            case Leaf():
                self.note(self.behind.setdefault(self.place(part), set()), rows)
            case Call(name):
                self.note(self.rows[name], rows)
            case Loop(inside, _, maximum):
                first, _ = self.begins(inside)
                self.walk(inside, rows if maximum == 1 else {self.joined(first, row) for row in rows})
            case Choice(parts):
                for each in parts:
                    self.walk(each, rows)
            case Row(parts):
                for each in reversed(parts):
                    self.walk(each, rows)
                    first, nullable = self.begins(each)
                    rows = {self.joined(first, row) for row in rows} if nullable else {first}

    def note(self, known: "set[_Places]", rows: "set[_Places]") -> None:
        self.num_rows += len(rows - known)
        known |= rows
