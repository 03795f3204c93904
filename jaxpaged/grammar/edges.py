"""Bytes at the edges of a node's texts: those that may begin one, and those that may go on behind one."""

from typing import NamedTuple

from jaxpaged.grammar.machine import utf8_of
from jaxpaged.grammar.nodes import Both, Chars, Either, Members, Minus, Node, Ranges, Repeat, Then


class Edge(NamedTuple):
    """Edge bytes of a node's texts, each set as the bits of a number.

    first: bytes that may begin a text. Some may not, where a node is what others have in common, or a
        difference.
    more: bytes by which a text may go on behind another one of the node. There may be others.
    is_empty: whether the empty text is one, as far as that is known.
    """

    first: int
    more: int
    is_empty: bool


_EMPTY = Edge(0, 0, True)


class Edges:
    """Edges of nodes without references, each worked out once."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Node, Edge]] = {}  # by identity

    def of(self, node: Node) -> Edge:
        """Return the edge of a node."""
        if id(node) not in self.known:
            self.known[id(node)] = node, self._made(node)
        return self.known[id(node)][1]

    def _made(self, node: Node) -> Edge:
        match node:
            case Chars(ranges):
                return Edge(_first_bytes(ranges), 0, False)
            case Then(parts):
                made = _EMPTY
                for part in reversed(parts):
                    made = _behind(self.of(part), made)
                return made
            case Either(parts):
                return _one_of([self.of(part) for part in parts])
            case Repeat(part, minimum, maximum):
                return self._repeated(self.of(part), minimum, maximum)
            case Members():
                return self._members(node)
            case Both(parts):
                edges = [self.of(part) for part in parts]
                first = edges[0].first
                for edge in edges[1:]:
                    first &= edge.first
                return Edge(first, 0, all(edge.is_empty for edge in edges))
            case Minus(part, other):
                return Edge(self.of(part).first, 0, self.of(part).is_empty and not self.of(other).is_empty)
        raise TypeError(f"{type(node).__name__} has no edges")

    def _repeated(self, edge: Edge, minimum: int, maximum: int | None) -> Edge:
        if maximum == 0:
            return _EMPTY
        has_more = edge.is_empty or maximum is None or maximum > max(minimum, 1)
        more = edge.more | (edge.first if has_more or minimum == 0 else 0)
        return Edge(edge.first, more, minimum == 0 or edge.is_empty)

    def _members(self, node: Members) -> Edge:
        """Return the edge of members. Behind a text of them is what is known where nothing counts."""
        parts = [(self.of(part), is_required) for part, is_required in node.parts]
        members = [*parts, *([] if node.rest is None else [(self.of(node.rest), False)])]
        first, more = 0, 0
        for edge, is_required in members:
            first |= edge.first
            if is_required:
                break
        is_empty = node.minimum == 0 and not any(is_required for _, is_required in parts)
        if node.minimum <= 1 and node.maximum is None:
            may_follow = node.rest is not None
            for edge, is_required in reversed(parts):
                more |= edge.more | (self.of(node.comma).first if may_follow else 0)
                may_follow = True
                if is_required:
                    break
        return Edge(first, more | (first if is_empty else 0), is_empty)


def _behind(one: Edge, other: Edge) -> Edge:
    """Return the edge of a part that another one follows."""
    return Edge(
        one.first | (other.first if one.is_empty else 0),
        other.more | (one.more | other.first if other.is_empty else 0),
        one.is_empty and other.is_empty,
    )


def _one_of(edges: list[Edge]) -> Edge:
    first, more = 0, 0
    for edge in edges:
        first, more = first | edge.first, more | edge.more
    is_empty = any(edge.is_empty for edge in edges)
    return Edge(first, more | (first if is_empty else 0), is_empty)


def _first_bytes(ranges: Ranges) -> int:
    mask = 0
    for (low, high), *_ in utf8_of(ranges):
        mask |= (1 << high + 1) - (1 << low)
    return mask
