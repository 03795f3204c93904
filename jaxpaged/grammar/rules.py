"""Recursive languages as rules: nodes with names, that refer to each other; and their simplest form.

`simplest` leaves only what a writer of sources needs: characters, sequences, choices, repetitions, members
that are not recursive, common texts, differences, and references to rules that are recursive.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxpaged.grammar.machine import byte_machine
from jaxpaged.grammar.nodes import (
    ANY,
    EMPTY,
    NOTHING,
    Both,
    Chars,
    Distinct,
    Either,
    GrammarError,
    Limits,
    Members,
    Minus,
    Node,
    NotRegularError,
    Ref,
    Repeat,
    Tagged,
    Then,
    either,
    optional,
    text,
)

_ALL = Repeat(ANY)
MAX_JOINED = 20  # neighbours of an object that are one part beside recursive ones
_MAX_LOOKED_AT = 3000  # characters of it, as `size` counts
_SMALL = Limits(max_states=1000)  # of a part that is looked at for a text of its own


@dataclass(frozen=True)
class Rules:
    """Language of a node, in which `Ref`s name other nodes."""

    start: Node
    named: dict[str, Node]


def children(node: Node) -> tuple[Node, ...]:
    """Return the parts of a node."""
    match node:
        case Members(parts, comma, rest):
            return (*(part for part, _ in parts), comma, *([] if rest is None else [rest]))
        case Distinct(parts, comma):
            return (*parts, comma)
        case Tagged(tags):
            return tuple(part for _, part in tags)
        case Then(parts) | Either(parts) | Both(parts):
            return parts
        case Repeat(part):
            return (part,)
        case Minus(part, other):
            return (part, other)
    return ()


def simplest(rules: Rules) -> Rules:
    """Return the same language in its simplest form.

    Raises `GrammarError` if it has no text, and `NotRegularError` where common texts or differences are asked
    of recursive parts.
    """
    expand = _Expander(_tainted(rules.named)).node
    named = {name: expand(node) for name, node in rules.named.items()}
    start = expand(rules.start)
    productive = _productive(named)
    prune = _Pruner(productive).node
    start = prune(start)
    if start == NOTHING:
        raise GrammarError("the grammar cannot be met: no text is in it")
    named = {name: _without_end_recursion(name, prune(named[name])) for name in productive}
    inline = _Inliner(named)
    start = inline.node(start)
    kept = inline.kept
    return Rules(start, kept)


class _Memo:
    """A rewriting of nodes, each once: nodes share parts, so they are known by identity."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Node, Node]] = {}

    def node(self, node: Node) -> Node:
        if id(node) not in self.known:
            self.known[id(node)] = node, self.made(node)
        return self.known[id(node)][1]

    def made(self, node: Node) -> Node:
        """Return the node with its parts rewritten."""
        match node:
            case Then(parts):
                return Then(tuple(map(self.node, parts)))
            case Either(parts):
                return Either(tuple(map(self.node, parts)))
            case Repeat(part, minimum, maximum):
                return Repeat(self.node(part), minimum, maximum)
            case Both(parts):
                return Both(tuple(map(self.node, parts)))
            case Minus(part, other):
                return Minus(self.node(part), self.node(other))
            case Members(parts, comma, rest, minimum, maximum):
                members = tuple((self.node(part), is_required) for part, is_required in parts)
                more = None if rest is None else self.node(rest)
                return Members(members, self.node(comma), more, minimum, maximum)
        return node


class _Expander(_Memo):
    """A rewriting of objects' members, of items that differ, and of text with tags as plain parts."""

    def __init__(self, tainted: set[str]) -> None:
        super().__init__()
        self.tainted = tainted  # rules that are recursive, or refer to one that is

    def made(self, node: Node) -> Node:
        match node:
            case Members():
                if all(map(self.is_plain, children(node))):
                    return super().made(node)
                return super().made(self.members(node))
            case Distinct():
                return super().made(_distinct(node))
            case Tagged():
                return super().made(_tagged(node))
        return super().made(node)

    def members(self, node: Members) -> Node:
        """Return members, of which some are recursive, as plain parts.

        Neighbours that are not recursive are one part, where nothing counts: so that they are one lexeme.
        """
        if node.maximum is None and node.minimum <= 1:
            parts: list[tuple[Node, bool]] = []
            for is_plain, run in itertools.groupby(node.parts, lambda each: self.is_plain(each[0])):
                if not is_plain:
                    parts += run
                    continue
                for members in itertools.batched(run, MAX_JOINED):
                    block = Members(members, node.comma, None, 1)
                    parts.append((block, any(is_required for _, is_required in members)))
            node = dataclasses.replace(node, parts=tuple(parts))
        return spelled_out(node)

    def is_plain(self, node: Node) -> bool:
        return not any(isinstance(part, Ref) and part.name in self.tainted for part in walk(node))


def spelled_out(node: Members) -> Node:
    """Return members by the part that comes next and how many there are, as far as that matters."""
    last = node.maximum if node.maximum is not None else max(node.minimum, 1)
    known: dict[tuple[int, int], Node] = {}
    for i in reversed(range(len(node.parts) + 1)):
        for count in range(last + 1):
            known[i, count] = _from_here(node, i, count, last, known)
    return known[0, 0]


def _from_here(node: Members, i: int, count: int, last: int, known: dict[tuple[int, int], Node]) -> Node:
    if i == len(node.parts):
        left, spare = max(node.minimum - count, 0), None if node.maximum is None else node.maximum - count
        if node.rest is None or spare == 0:
            return NOTHING if left else EMPTY
        more: Node = Then((node.comma, node.rest))
        if count:
            return Repeat(more, left, spare)
        some = Then((node.rest, Repeat(more, max(left - 1, 0), None if spare is None else spare - 1)))
        return some if left else optional(some)
    part, is_required = node.parts[i]
    alternatives: list[Node] = []
    if count < last or node.maximum is None:
        before = (node.comma,) if count else ()
        behind = known[i + 1, min(count + 1, last)]
        if not is_required and count == last:  # the number does not change
            return behind if behind == NOTHING else Then((optional(Then((*before, part))), behind))
        if behind != NOTHING:
            alternatives.append(Then((*before, part, behind)))
    if not is_required:
        alternatives.append(known[i + 1, count])
    return either(alternatives)


def _distinct(node: Distinct) -> Node:
    """Return items by the set of parts that are left."""
    known: dict[int, Node] = {}

    def behind(taken: int) -> Node:
        if taken not in known:
            size, alternatives = taken.bit_count(), list[Node]()
            for i, part in enumerate(node.parts if size < node.maximum else ()):
                if not taken >> i & 1:
                    before = (node.comma,) if taken else ()
                    alternatives.append(Then((*before, part, behind(taken | 1 << i))))
            known[taken] = either([*([EMPTY] if size >= node.minimum else []), *alternatives])
        return known[taken]

    return behind(0)


def _tagged(node: Tagged) -> Node:
    """Return free text that ends with the first trigger in it, the trigger's part, and so on."""
    trigger = Either(tuple(text(mark) for mark, _ in node.tags))
    has_more = Then((_ALL, trigger, Repeat(ANY, 1)))
    tags = either(Then((Minus(Then((_ALL, text(mark))), has_more), part)) for mark, part in node.tags)
    rest = Minus(_ALL, Then((_ALL, trigger, _ALL)))
    if node.ends_with_first:
        return tags if node.must_have_one else Either((tags, rest))
    return Then((Repeat(tags, int(node.must_have_one)), rest))


def _productive(named: dict[str, Node]) -> set[str]:
    """Return the rules that have a text."""
    productive: set[str] = set()
    while True:
        has_text = _has_text(productive)
        new = {name for name, node in named.items() if name not in productive and has_text(node)}
        if not new:
            return productive
        productive |= new


def _has_text(productive: set[str]) -> Callable[[Node], bool]:
    """Return a predicate of nodes: whether a node has a text if only the `productive` rules have one."""
    known: dict[int, tuple[Node, bool]] = {}
    spelled: dict[int, tuple[Node, Node]] = {}

    def check(node: Node) -> bool:
        if id(node) not in known:
            known[id(node)] = node, made(node)
        return known[id(node)][1]

    def made(node: Node) -> bool:
        match node:
            case Chars(ranges):
                return bool(ranges)
            case Then(parts):
                return all(map(check, parts))
            case Either(parts):
                return any(map(check, parts))
            case Repeat(part, minimum):
                return minimum == 0 or check(part)
            case Ref(name):
                return name in productive
            case Both(parts):
                return all(map(check, parts)) and not _is_void(node)
            case Minus(part):
                return check(part) and not _is_void(node)
            case Members():
                return all(map(check, children(node))) or check(spell(node))
        return True

    def spell(node: Members) -> Node:
        return spelled.setdefault(id(node), (node, spelled_out(node)))[1]

    return check


def _is_void(node: Node) -> bool:
    """Return whether common texts, or a difference, are proved to be none. Large ones are not looked at."""
    if any(isinstance(part, Ref) for part in walk(node)) or size(node) > _MAX_LOOKED_AT:
        return False
    try:
        byte_machine(node, _SMALL)
    except GrammarError as problem:
        return "cannot be met" in str(problem)
    return False


def size(node: Node) -> int:
    """Return how many characters a node of the simplest form has, each repetition spelled out."""
    known: dict[int, int] = {}

    def of(node: Node) -> int:
        if id(node) not in known:
            times = max(node.minimum, node.maximum or 1, 1) if isinstance(node, Repeat) else 1
            known[id(node)] = 1 + times * sum(map(of, children(node)))
        return known[id(node)]

    return of(node)


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes inside of it, each once."""
    seen, waiting = set[int](), [node]
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting += children(node)


class _Pruner(_Memo):
    """Rewriter of nodes that drops parts without a text."""

    def __init__(self, productive: set[str]) -> None:
        super().__init__()
        self.has_text = _has_text(productive)

    def made(self, node: Node) -> Node:
        if not self.has_text(node):
            return NOTHING
        match node:
            case Members() if not all(map(self.has_text, children(node))):
                return self.node(spelled_out(node))
            case Either(parts):
                return either(map(self.node, parts))
            case Repeat(part, _, maximum):
                return EMPTY if maximum == 0 or not self.has_text(part) else super().made(node)
            case Minus(part, other):
                return Minus(self.node(part), self.node(other)) if self.has_text(other) else self.node(part)
        return super().made(node)


def _without_end_recursion(name: str, node: Node) -> Node:
    """Return a rule that recurs only at the end, or the beginning, of its alternatives as a repetition."""
    flat = [_parts(alternative) for alternative in _ways(node)]
    for at in (-1, 0):
        again = [alternative for alternative in flat if alternative and alternative[at] == Ref(name)]
        others = [alternative for alternative in flat if not (alternative and alternative[at] == Ref(name))]
        bodies = [alternative[:-1] if at else alternative[1:] for alternative in again]
        inside = [part for alternative in (*bodies, *others) for part in alternative]
        if not again or not others or any(Ref(name) == part for each in inside for part in walk(each)):
            continue
        loop = (
            Repeat(either(Then(tuple(alternative)) for alternative in bodies if alternative))
            if any(bodies)
            else EMPTY
        )
        rest = either(Then(tuple(alternative)) for alternative in others)
        return Then((loop, rest) if at else (rest, loop))
    return node


def _ways(node: Node) -> list[Node]:
    return (
        [alternative for part in node.parts for alternative in _ways(part)]
        if isinstance(node, Either)
        else [node]
    )


def _parts(node: Node) -> list[Node]:
    return [each for part in node.parts for each in _parts(part)] if isinstance(node, Then) else [node]


class _Inliner(_Memo):
    """A rewriting that puts rules in the place of their names, where they do not come again in themselves."""

    def __init__(self, named: dict[str, Node]) -> None:
        super().__init__()
        self.named = named
        self.recursive = _recursive(named)
        self.kept: dict[str, Node] = {}
        self.inlined: dict[str, Node] = {}

    def made(self, node: Node) -> Node:
        if isinstance(node, Ref):
            if node.name not in self.recursive:
                if node.name not in self.inlined:
                    self.inlined[node.name] = self.node(self.named[node.name])
                return self.inlined[node.name]
            if node.name not in self.kept:
                self.kept[node.name] = NOTHING  # under way
                self.kept[node.name] = self.node(self.named[node.name])
            return node
        made = super().made(node)
        if isinstance(made, Both | Minus) and any(isinstance(part, Ref) for part in walk(made)):
            raise NotRegularError("what values of any depth have in common is not followed")
        return made


def _tainted(named: dict[str, Node]) -> set[str]:
    """Return the rules that are recursive, or refer to one that is."""
    tainted = _recursive(named)
    while True:
        new = {
            name
            for name, node in named.items()
            if name not in tainted
            and any(isinstance(part, Ref) and part.name in tainted for part in walk(node))
        }
        if not new:
            return tainted
        tainted |= new


def _recursive(named: dict[str, Node]) -> set[str]:
    """Return the rules that come again in themselves."""
    direct = {
        name: {part.name for part in walk(node) if isinstance(part, Ref)} for name, node in named.items()
    }
    recursive = set()
    for name in named:
        seen, waiting = set[str](), [*direct[name]]
        while waiting and name not in seen:
            there = waiting.pop()
            if there not in seen:
                seen.add(there)
                waiting += direct[there]
        if name in seen:
            recursive.add(name)
    return recursive
