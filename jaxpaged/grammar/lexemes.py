"""Division of recursive rules into lexemes, so that longest matches lose no text.

llguidance's lexer takes the longest match among all lexemes that may come, and never goes back. A lexeme here
is a part without recursion, as large as that allows. Wherever one might swallow what belongs behind another,
or behind itself, it is divided, at last into single characters.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterable

import numpy as np

from jaxpaged.grammar.automaton import NOT_ALLOWED
from jaxpaged.grammar.conflicts import conflicts, conflicts_alone, leaves_of
from jaxpaged.grammar.deterministic import ByteMachine
from jaxpaged.grammar.edges import Edges
from jaxpaged.grammar.machine import byte_machine
from jaxpaged.grammar.nodes import (
    ANY,
    EMPTY,
    Both,
    Chars,
    Either,
    GrammarError,
    Limits,
    Members,
    Minus,
    Multiples,
    Node,
    NotRegularError,
    Ref,
    Repeat,
    Then,
    TooLargeError,
    both,
    either,
)
from jaxpaged.grammar.productions import Call, Choice, Leaf, Lexemes, Loop, Part, Row
from jaxpaged.grammar.rules import Rules, children, spelled_out, walk

FEW = 8  # times that a repetition is spelled out where conflicts are looked for
MAX_COPIED = 4  # recursive parts inside of one that is used several times
MAX_SECONDS = 3.0  # of processor time
MAX_STATES = 4000  # of one lexeme, or of one machine that is spelled out as rules
_LIMITS = Limits(max_states=MAX_STATES)


def divided(rules: Rules) -> Lexemes:
    """Return simplest rules over lexemes that lose no text. Raises `GrammarError`."""
    cutter = _Cutter(rules)
    deadline = time.process_time() + MAX_SECONDS
    while time.process_time() < deadline:
        made = cutter.whole()
        # What is told without machines comes first: large lexemes that are divided anyway need none.
        if not (numbers := conflicts_alone(made, cutter.edges)):
            leaves = {leaf.number for leaf in leaves_of(made)}
            numbers = {number for number in leaves if cutter.machine(number) is None}
        if not numbers and not (numbers := conflicts(made, cutter.machines)):
            return made
        cutter.split |= numbers
    raise GrammarError("the grammar takes too long to divide: make it simpler")


class _Cutter:
    """A division of rules, with the lexemes that must be divided further."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.split: set[int] = set()  # numbers of nodes
        self.numbers: dict[object, int] = {}  # of nodes by what they are
        self.nodes: list[Node] = []  # by their numbers
        self.known: dict[int, tuple[Node, int | None]] = {}  # numbers of nodes by identity; None: recursive
        self.machines: dict[int, ByteMachine] = {}
        self.edges = Edges()
        self.shared: dict[int, tuple[Node, bool]] = {}
        self.empty: dict[int, bool] = {}
        self.some: dict[int, Node] = {}
        self.joined: dict[tuple[int, ...], Node] = {}
        self.made: Lexemes = Lexemes(Row(()))
        self.uses: dict[int, int] = {}  # of parts, by identity
        for root in (rules.start, *rules.named.values()):
            for node in walk(root):
                for part in children(node):
                    self.uses[id(part)] = self.uses.get(id(part), 0) + 1

    def whole(self) -> Lexemes:
        """Return all rules over the lexemes that there are now."""
        self.made = Lexemes(Row(()), nodes=self.nodes)
        self.made.start = self.part(self.rules.start)
        for name, node in self.rules.named.items():
            self.made.named[name] = self.part(node)
        return self.made

    def number(self, node: Node) -> int | None:
        """Return the number of a node, the same for nodes that are alike; None if it is recursive."""
        if id(node) in self.known:
            return self.known[id(node)][1]
        child_numbers: tuple[int | None, ...] = tuple(map(self.number, children(node)))
        made = None
        if not isinstance(node, Ref | Multiples) and None not in child_numbers:
            more: object = None
            if isinstance(node, Chars):
                more = node.ranges
            elif isinstance(node, Repeat):
                more = node.minimum, node.maximum
            elif isinstance(node, Members):
                must = tuple(is_required for _, is_required in node.parts)
                more = must, node.rest is None, node.minimum, node.maximum
            made = self.numbers.setdefault((type(node).__name__, child_numbers, more), len(self.nodes))
            if made == len(self.nodes):
                self.nodes.append(node)
        self.known[id(node)] = node, made
        return made

    def part(self, node: Node) -> Part:
        """Return a node over lexemes. What is recursive and used several times gets a rule of its own."""
        if self.is_shared(node):
            name = f"s{id(node)}"
            if name not in self.made.named:
                self.made.named[name] = Row(())
                self.made.named[name] = self.inside(node)
            return Call(name)
        return self.inside(node)

    def is_shared(self, node: Node) -> bool:
        """Return whether a part gets a rule of its own: it is recursive, large and used several times."""
        if id(node) not in self.shared:
            self.shared[id(node)] = node, self._is_shared(node)
        return self.shared[id(node)][1]

    def _is_shared(self, node: Node) -> bool:
        is_plain = isinstance(node, Ref | Multiples) or self.number(node) is not None
        if is_plain or self.uses.get(id(node), 0) < 2:
            return False
        inside = [part for part in walk(node) if not isinstance(part, Ref) and self.number(part) is None]
        return len(inside) > MAX_COPIED

    def inside(self, node: Node) -> Part:
        """Return the rule part of a node, made of lexemes."""
        if (number := self.number(node)) is not None and (number not in self.split or node == EMPTY):
            return self.leaf(node, number)
        match node:
            case Ref(name):
                return Call(name)
            case Then(parts):
                if number is not None:
                    return Row(tuple(map(self.part, parts)))
                return Row(tuple(self.run(parts)))
            case Either(parts):
                if number is not None:
                    return Choice(tuple(map(self.part, parts)))
                flat = [alternative for part in parts for alternative in self.alternatives(part)]
                plain = [part for part in flat if self.number(part) is not None]
                others = [part for part in flat if self.number(part) is None]
                first = [self.part(self.joint(plain, Either))] if plain else []
                return Choice((*first, *map(self.part, others)))
            case Repeat(part, minimum, maximum):
                inside, minimum = self.without_empty(part, minimum)
                return Loop(inside, minimum, maximum)
            case Members(parts, _, None, minimum, None) if minimum <= 1 < len(parts):
                return self.halves(node)
            case Members():
                key = (2, id(node))
                return self.part(self.joined.setdefault(key, spelled_out(node)))
            case Both() | Minus() | Multiples():
                return self.spelled_out(node)
        raise NotRegularError(f"{type(node).__name__} is not followed inside of what is recursive")

    def leaf(self, node: Node, number: int) -> Part:
        if node == EMPTY:
            return Row(())
        if not self.is_empty(node):
            return Leaf(number)
        some = self.not_empty(node)
        return Choice((Row(()), self.part(some))) if some is not None else Row(())

    def run(self, parts: tuple[Node, ...]) -> Iterable[Part]:
        """Yield parts in a row, those that are not recursive joined."""
        flat = [each for part in parts for each in self.flat(part)]
        for is_plain, members in itertools.groupby(flat, lambda part: self.number(part) is not None):
            if is_plain:
                yield self.part(self.joint([*members], Then))
            else:
                yield from map(self.part, members)

    def flat(self, node: Node) -> list[Node]:
        if isinstance(node, Then) and self.number(node) is None and not self.is_shared(node):
            return [each for part in node.parts for each in self.flat(part)]
        return [node]

    def halves(self, node: Members) -> Part:
        """Return members by a rule for them, which may stand in several places."""
        name = f"h{id(node)}"
        if name not in self.made.named:
            self.made.named[name] = self.two_halves(node)
        return Call(name)

    def two_halves(self, node: Members) -> Part:
        """Return the rule of members that are cut in two halves, of which either may be missing."""
        middle = len(node.parts) // 2
        sides = [node.parts[:middle], node.parts[middle:]]
        must = [any(is_required for _, is_required in side) for side in sides]
        keys = (3, id(node)), (4, id(node))
        first, last = (
            self.joined.setdefault(key, dataclasses.replace(node, parts=side, minimum=1))
            for key, side in zip(keys, sides, strict=True)
        )
        rest = self.part(Then((node.comma, last)))
        alternatives: list[Part] = [
            Row((self.part(first), rest if must[1] else Choice((Row(()), rest)))),
            *([] if must[0] else [self.part(last)]),
        ]
        return Choice((*([] if node.minimum or any(must) else [Row(())]), *alternatives))

    def alternatives(self, node: Node) -> list[Node]:
        if isinstance(node, Either) and self.number(node) is None and not self.is_shared(node):
            return [each for part in node.parts for each in self.alternatives(part)]
        return [node]

    def joint(self, parts: list[Node], kind: type[Then] | type[Either]) -> Node:
        """Return parts as one, the same each time."""
        if len(parts) == 1:
            return parts[0]
        key = (int(kind is Then), *map(id, parts))
        return self.joined.setdefault(key, kind(tuple(parts)))

    def without_empty(self, part: Node, minimum: int) -> tuple[Part, int]:
        """Return the repeated part without its empty text, where that is known, and the least number of
        repetitions.
        """
        if self.number(part) is None or not self.is_empty(part):
            return self.part(part), minimum
        some = self.not_empty(part)
        return (self.part(some) if some is not None else Row(())), 0

    def is_empty(self, node: Node) -> bool:
        """Return whether the empty text is one of a part that is not recursive."""
        number = self.number(node)
        assert number is not None
        if number not in self.empty:
            match node:
                case Then(parts) | Both(parts):
                    may_be_empty = all(map(self.is_empty, parts))
                case Either(parts):
                    may_be_empty = any(map(self.is_empty, parts))
                case Repeat(part, minimum):
                    may_be_empty = minimum == 0 or self.is_empty(part)
                case Members(parts, _, _, minimum):
                    may_be_empty = minimum == 0 and not any(is_required for _, is_required in parts)
                case Minus(part, other):
                    may_be_empty = self.is_empty(part) and not self.is_empty(other)
                case _:
                    may_be_empty = False
            self.empty[number] = may_be_empty
        return self.empty[number]

    def not_empty(self, node: Node) -> Node | None:
        """Return the node of a part's texts without the empty one; None if there are no others."""
        number = self.number(node)
        assert number is not None
        if number not in self.some:
            made: Node | None = node
            if self.is_empty(node):
                made = self._not_empty(node)
            if made is None:
                return None
            self.some[number] = made
        return self.some[number]

    def _not_empty(self, node: Node) -> Node | None:
        match node:
            case Then(()):
                return None
            case Then(parts):
                some = self.not_empty(parts[0])
                after: Node = Then(parts[1:])
                alternatives: list[Node] = [Then((some, *parts[1:]))] if some is not None else []
                alternatives += [more] if (more := self.not_empty(after)) is not None else []
                return either(alternatives) if alternatives else None
            case Either(parts):
                alternatives = [full for part in parts if (full := self.not_empty(part)) is not None]
                return either(alternatives) if alternatives else None
            case Repeat(repeated, _, maximum):
                once = None if maximum == 0 else self.not_empty(repeated)
                return None if once is None else Repeat(once, 1, maximum)
            case Members(parts, _, rest, _, maximum):
                return dataclasses.replace(node, minimum=1) if maximum != 0 and (parts or rest) else None
        return Both((node, Repeat(ANY, 1)))

    def spelled_out(self, node: Node) -> Part:
        """Return a machine's texts by a rule for each of its states, a character at a time."""
        machine = byte_machine(node, _LIMITS)
        by_byte = machine.steps[:, machine.kind_of]
        if (by_byte[:, 128:] != NOT_ALLOWED).any():
            raise NotRegularError("what texts have in common is not followed beside others that begin so")
        names = [f"m{id(node)}_{state}" for state in range(len(by_byte))]
        if names[0] not in self.made.named:
            for state, targets in enumerate(by_byte):
                alternatives: list[Part] = [Row(())] if machine.accepting[state] else []
                for target in np.unique(targets[targets != NOT_ALLOWED]).tolist():
                    letters = Chars(
                        tuple((int(byte), int(byte)) for byte in np.flatnonzero(targets == target))
                    )
                    alternatives.append(Row((self.part(letters), Call(names[target]))))
                self.made.named[names[state]] = Choice(tuple(alternatives))
        return Call(names[0])

    def machine(self, number: int) -> ByteMachine | None:
        """Return the machine of a lexeme, or of a simpler one with more texts; None if that is large, too."""
        if number not in self.machines:
            try:
                self.machines[number] = byte_machine(_wider(self.nodes[number], {}), _LIMITS, MAX_SECONDS / 4)
            except TooLargeError:
                return None
        return self.machines[number]


def _wider(node: Node, known: dict[int, tuple[Node, Node]]) -> Node:
    """Return a node without long repetitions that has all of its texts, and may have more."""
    if id(node) not in known:
        made = node
        match node:
            case Then(parts):
                made = Then(tuple(_wider(part, known) for part in parts))
            case Either(parts):
                made = Either(tuple(_wider(part, known) for part in parts))
            case Repeat(part, minimum, maximum):
                few = minimum if minimum <= FEW else 1
                made = Repeat(
                    _wider(part, known), few, maximum if maximum is not None and maximum <= FEW else None
                )
            case Members(parts, comma, rest, minimum):
                members = tuple((_wider(part, known), is_required) for part, is_required in parts)
                more = None if rest is None else _wider(rest, known)
                made = Members(members, _wider(comma, known), more, min(minimum, 1), None)
            case Both(parts):
                made = both(_wider(part, known) for part in parts)
            case Minus(part, other):
                made = Minus(_wider(part, known), other)
        known[id(node)] = node, made
    return known[id(node)][1]
