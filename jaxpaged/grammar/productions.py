"""Productions of recursive rules over lexemes: parts in a row, choices, loops, and calls of rules."""

from dataclasses import dataclass, field

from jaxpaged.grammar.nodes import Node


@dataclass(frozen=True)
class Leaf:
    """A lexeme, by its number."""

    number: int


@dataclass(frozen=True)
class Call:
    """A rule, by its name."""

    name: str


@dataclass(frozen=True)
class Row:
    """Parts one behind another."""

    parts: "tuple[Part, ...]"


@dataclass(frozen=True)
class Choice:
    """One of some parts."""

    parts: "tuple[Part, ...]"


@dataclass(frozen=True)
class Loop:
    """A part, some times in a row."""

    part: "Part"
    minimum: int
    maximum: int | None


Part = Leaf | Call | Row | Choice | Loop


@dataclass
class Lexemes:
    """Rules over lexemes: the start, the rules by their names, and the nodes of lexemes, none empty."""

    start: Part
    named: dict[str, Part] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
