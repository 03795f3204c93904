"""Regular languages of text, as trees of nodes, and the errors and limits of all that compiles them."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxpaged.checks import InputError

MAX_POINT = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]  # of code points, first and last, in order and apart


class GrammarError(InputError):
    """Error for a grammar that cannot be met, is too large, or uses an unsupported feature.

    `path` says where in a schema, as `#/properties/name`; it is "" elsewhere.
    """

    def __init__(self, sentence: str, path: str = "") -> None:
        super().__init__(sentence)
        self.path = path


class TooLargeError(GrammarError):
    """A grammar whose automaton is larger than the limits allow."""


class NotRegularError(GrammarError):
    """A part of a schema that has no automaton.

    `is_recursive`: it has one to any depth, as values inside values have.
    """

    def __init__(self, sentence: str, path: str = "", *, is_recursive: bool = False) -> None:
        super().__init__(sentence, path)
        self.is_recursive = is_recursive


class LostError(RuntimeError):
    """An answer behind which its grammar cannot be followed. It ends: no token may come unconstrained."""


@dataclass(frozen=True)
class Limits:
    """Bounds on time and memory for compiling one grammar."""

    max_states: int = 4096  # of an automaton
    max_table_bytes: int = 64 * 2**20
    max_spec_chars: int = 2**18
    cpu_seconds: int = 5  # of processor time
    memory_bytes: int = 512 * 2**20


@dataclass(frozen=True)
class Chars:
    """One character of some ranges of code points."""

    ranges: Ranges


@dataclass(frozen=True)
class Then:
    """Parts one behind another; with no parts, the empty text."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Either:
    """One of some parts; with no parts, no text at all."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Repeat:
    """A part from `minimum` to `maximum` times in a row; None: any number of times."""

    part: "Node"
    minimum: int = 0
    maximum: int | None = None


@dataclass(frozen=True)
class Members:
    """Parts in order, with `comma` between those that are there.

    A part with False may be missing. `rest` may follow any number of times. The parts that are there are
    `minimum` to `maximum`; None: any number.
    """

    parts: "tuple[tuple[Node, bool], ...]"
    comma: "Node"
    rest: "Node | None" = None
    minimum: int = 0
    maximum: int | None = None


@dataclass(frozen=True)
class Tagged:
    """Free text in which each trigger is followed by its own part.

    With `must_have_one` a trigger comes at least once; with `ends_with_first` nothing is behind its part.
    """

    tags: "tuple[tuple[str, Node], ...]"
    must_have_one: bool = False
    ends_with_first: bool = False


@dataclass(frozen=True)
class Both:
    """Texts that are in all of some parts."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Minus:
    """Texts of one part that are not in another."""

    part: "Node"
    other: "Node"


@dataclass(frozen=True)
class Multiples:
    """Decimal numbers without a sign, whose value x 10**places is a multiple of `modulus`.

    With `is_whole` there is no fraction; else one may end with any number of zeros.
    """

    modulus: int
    places: int = 0
    is_whole: bool = True


@dataclass(frozen=True)
class Distinct:
    """Choice of `minimum` to `maximum` parts in any order, each once at most, with `comma` between."""

    parts: "tuple[Node, ...]"
    comma: "Node"
    minimum: int
    maximum: int


@dataclass(frozen=True)
class Ref:
    """A node by its name, in a language of rules (`jaxpaged.grammar.rules`)."""

    name: str


Node = Chars | Then | Either | Repeat | Members | Tagged | Both | Minus | Multiples | Distinct | Ref
EMPTY = Then(())
NOTHING = Either(())
ANY = Chars(((0, MAX_POINT),))


def chars(letters: str) -> Chars:
    """Return one character of these."""
    return Chars(joined((ord(letter), ord(letter)) for letter in letters))


def text(value: str) -> Node:
    """Return one text."""
    return Then(tuple(Chars(((ord(letter), ord(letter)),)) for letter in value))


def optional(part: Node) -> Node:
    return Either((EMPTY, part))


def either(parts: Iterable[Node]) -> Node:
    """Return the node of an alternative of parts, without parts that have no text."""
    kept = [part for part in parts if part != NOTHING]
    return kept[0] if len(kept) == 1 else Either(tuple(kept))


def both(parts: Iterable[Node]) -> Node:
    """Return the node of the texts that all parts have."""
    kept = tuple(parts)
    if NOTHING in kept:
        return NOTHING
    return kept[0] if len(kept) == 1 else Both(kept)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in order, with neighbouring and overlapping ranges joined."""
    made: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if made and low <= made[-1][1] + 1:
            made[-1] = made[-1][0], max(made[-1][1], high)
        elif low <= high:
            made.append((low, high))
    return tuple(made)


def others(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ranges of all other code points."""
    made, next_point = [], 0
    for low, high in joined(ranges):
        if low > next_point:
            made.append((next_point, low - 1))
        next_point = high + 1
    return (*made, (next_point, MAX_POINT)) if next_point <= MAX_POINT else tuple(made)


def common(one: Ranges, other: Ranges) -> Ranges:
    """Return the ranges of code points that are in both."""
    return others((*others(one), *others(other)))
