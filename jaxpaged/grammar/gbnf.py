"""Reader of llama.cpp's grammars (GBNF) as rules: `root ::= "a" [0-9]+ (rule | .)*`."""

from collections.abc import Callable

from jaxpaged.checks import shown
from jaxpaged.grammar.nodes import (
    ANY,
    EMPTY,
    MAX_POINT,
    NOTHING,
    Chars,
    Either,
    GrammarError,
    Node,
    Ref,
    Repeat,
    Then,
    joined,
    others,
    text,
)
from jaxpaged.grammar.rules import Rules

START = "root"
MAX_RULES = 5000
MAX_DEPTH = 50  # groups inside each other
MAX_COUNT = 10_000  # of a repetition
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
HEX = {"x": 2, "u": 4, "U": 8}  # digits of a code point behind each
DIGITS, HEX_DIGITS = "0123456789", "0123456789abcdefABCDEF"


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in GBNF: its first line with a rule has `::=`."""
    for line in grammar.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            return line.lstrip()[:1] not in "%/" and "::=" in line
    return False


def read_gbnf(grammar: str) -> Rules:
    """Return a grammar's rules. Raises `GrammarError` for one that is malformed, or lacks a rule."""
    return _Reader(grammar).rules()


class _Reader:
    """A reader of one grammar, at `at`."""

    def __init__(self, grammar: str) -> None:
        self.grammar, self.at, self.depth = grammar, 0, 0
        self.named: dict[str, Node] = {}
        self.asked: dict[str, int] = {}  # names that parts refer to, and where first

    def rules(self) -> Rules:
        self.space(lines=True)
        while self.at < len(self.grammar):
            name = self.name()
            self.space()
            if not self.take("::="):
                raise self.error("::= must stand behind a rule's name")
            if name in self.named or len(self.named) >= MAX_RULES:
                raise self.error(f"there must be one rule of each name, and at most {MAX_RULES}")
            self.space(lines=True)
            self.named[name] = self.choice(is_nested=False)
            if self.at < len(self.grammar) and self.peek() not in "\r\n":
                raise self.error(f"{shown(self.peek())} is no part of a rule")
            self.space(lines=True)
        self.asked.setdefault(START, self.at)
        for name, at in self.asked.items():
            if name not in self.named:
                self.at = at
                raise self.error(f"there is no rule {shown(name)}")
        return Rules(Ref(START), self.named)

    def choice(self, *, is_nested: bool) -> Node:
        alternatives = [self.sequence(is_nested)]
        while self.goes_on():
            self.take("|")
            self.space(lines=True)
            alternatives.append(self.sequence(is_nested))
        return alternatives[0] if len(alternatives) == 1 else Either(tuple(alternatives))

    def goes_on(self) -> bool:
        """Return whether another alternative follows, on this line or the next one that is not empty."""
        before = self.at
        self.space(lines=True)
        if self.peek() == "|":
            return True
        self.at = before
        return False

    def sequence(self, is_nested: bool) -> Node:
        parts: list[Node] = []
        while self.at < len(self.grammar) and self.peek() not in "|)\r\n":
            parts.append(self.repeated(self.part(), is_nested))
            self.space(lines=is_nested)
        return parts[0] if len(parts) == 1 else Then(tuple(parts))

    def part(self) -> Node:
        if self.take('"'):
            return text("".join(map(chr, self.points('"'))))
        if self.take("["):
            return self.bracket()
        if self.take("."):
            return ANY
        if self.take("("):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise self.error(f"groups may be at most {MAX_DEPTH} deep")
            self.space(lines=True)
            made = self.choice(is_nested=True)
            self.space(lines=True)
            if not self.take(")"):
                raise self.error("a group is not closed")
            self.depth -= 1
            return made
        if self.peek() in "<!":
            raise self.error("tokens by name or number are not supported: a grammar is over text")
        at = self.at
        name = self.name()
        self.asked.setdefault(name, at)
        return Ref(name)

    def repeated(self, part: Node, is_nested: bool) -> Node:
        while True:
            before = self.at
            self.space(lines=is_nested)
            if self.take("{"):
                minimum, maximum = self.counts()
            elif (sign := self.peek()) and sign in "*+?":
                self.at += 1
                minimum, maximum = int(sign == "+"), 1 if sign == "?" else None
            else:
                self.at = before
                return part
            part = Repeat(part, minimum, maximum) if maximum != 0 else EMPTY

    def counts(self) -> tuple[int, int | None]:
        inside, closed, _ = self.grammar[self.at : self.at + 40].partition("}")
        first, comma, last = (part.strip() for part in inside.partition(","))
        digits = [part for part in (first, last) if part]
        if not closed or not first or not all(set(part) <= set(DIGITS) and len(part) < 9 for part in digits):
            raise self.error("a repetition must be {n}, {n,} or {n,m}")
        self.at += len(inside) + 1
        minimum, maximum = int(first), None if comma and not last else int(last or first)
        if max(minimum, maximum or 0) > MAX_COUNT or (maximum is not None and maximum < minimum):
            raise self.error(f"a repetition must have 0 <= n <= m <= {MAX_COUNT}")
        return minimum, maximum

    def bracket(self) -> Node:
        is_negated = self.take("^")
        pairs: list[tuple[int, int]] = []
        points = self.points("]", ranges=pairs)
        ranges = joined([*pairs, *((point, point) for point in points)])
        ranges = others(ranges) if is_negated else ranges
        return Chars(ranges) if ranges else NOTHING

    def points(self, end: str, ranges: list[tuple[int, int]] | None = None) -> list[int]:
        """Return code points up to a mark; with `ranges`, two with a hyphen between go there."""
        points: list[int] = []
        while not self.take(end):
            if self.peek() in ("", "\n", "\r"):
                raise self.error(f"{end} is missing")
            low = self.point()
            is_range = ranges is not None and self.peek() == "-"
            if is_range and self.grammar[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self.point()
                if high < low:
                    raise self.error("a range must end with a character that is not before its first")
                assert ranges is not None
                ranges.append((low, high))
            else:
                points.append(low)
        return points

    def point(self) -> int:
        letter = self.grammar[self.at]
        self.at += 1
        if letter != "\\":
            return ord(letter)
        kind = self.peek()
        self.at += 1
        if kind and kind in ESCAPES:
            return ord(ESCAPES[kind])
        if kind not in HEX:
            raise self.error(f"\\{kind} is no escape")
        digits = self.grammar[self.at : self.at + HEX[kind]]
        if len(digits) < HEX[kind] or not set(digits) <= set(HEX_DIGITS):
            raise self.error(f"\\{kind} must have {HEX[kind]} hexadecimal digits")
        self.at += len(digits)
        point = int(digits, 16)
        if point > MAX_POINT or 0xD800 <= point < 0xE000:
            raise self.error("there is no such character")
        return point

    def name(self) -> str:
        name = self.span(lambda letter: letter.isalnum() or letter in "-_")
        if not name:
            raise self.error(
                "a rule's name is missing" if not self.peek() else f"{shown(self.peek())} is no name"
            )
        return name

    def space(self, *, lines: bool = False) -> None:
        """Skip white space and comments, and line ends where they mean nothing."""
        allowed = " \t\r\n" if lines else " \t"
        while (letter := self.peek()) and (letter in allowed or letter == "#"):
            if letter == "#":
                self.span(lambda letter: letter not in "\r\n")
            else:
                self.at += 1

    def span(self, belongs: Callable[[str], bool]) -> str:
        begun = self.at
        while self.at < len(self.grammar) and belongs(self.grammar[self.at]):
            self.at += 1
        return self.grammar[begun : self.at]

    def peek(self) -> str:
        return self.grammar[self.at : self.at + 1]

    def take(self, mark: str) -> bool:
        """Return whether a mark is next, and go past it if so."""
        is_next = self.grammar.startswith(mark, self.at)
        self.at += len(mark) * is_next
        return is_next

    def error(self, why: str) -> GrammarError:
        line = self.grammar.count("\n", 0, self.at) + 1
        return GrammarError(f"structured_outputs.grammar cannot be read in line {line}: {why}")
