"""Parser of regular expressions: what ECMAScript, Python and Rust write alike, as nodes.

`\\d` and `\\w` are ASCII's, as in ECMAScript. Readers differ in what white space is: `\\s` is ASCII's, which
is white space for all, and `\\S` what is none for any. With `is_wide`, where texts are barred, it is the
other way round. What no automaton follows, such as a look ahead or a reference back, is refused by its name.
"""

from jaxpaged.checks import shown
from jaxpaged.grammar.nodes import (
    EMPTY,
    MAX_POINT,
    Chars,
    Either,
    GrammarError,
    Node,
    Ranges,
    Repeat,
    Then,
    chars,
    joined,
    others,
)

MAX_DEPTH = 50  # groups inside each other
MAX_COUNT = 10_000  # of a repetition
DIGITS: Ranges = ((48, 57),)
WORDS: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACES: Ranges = ((9, 13), (32, 32))
# White space of ECMAScript, of Python, or of Rust.
ANY_SPACES: Ranges = (
    *((9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
CLASSES = {"d": DIGITS, "w": WORDS, "s": SPACES}
CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0, "a": 7, "e": 27}
LINE_ENDS = "\n\r\u2028\u2029"
ANY = Chars(((0, MAX_POINT),))


def parse_regex(pattern: str, *, is_search: bool = False, is_wide: bool = False, path: str = "") -> Node:
    """Return the texts that a regular expression matches as a whole; with `is_search`, that contain a match.

    `^` and `$` may stand at the ends of the expression's branches. The dot is any character but a line end.
    is_wide: a text that any reader of expressions may match is in it, not only what all match.

    Raises `GrammarError`.
    """
    return _Parser(pattern, is_search, is_wide, path).whole()


class _Parser:
    """A reader of one expression, at `at`."""

    def __init__(self, pattern: str, is_search: bool, is_wide: bool, path: str) -> None:
        self.pattern, self.is_search, self.is_wide, self.path = pattern, is_search, is_wide, path
        self.at, self.depth = 0, 0

    def whole(self) -> Node:
        branches = [self.branch(is_outermost=True)]
        while self.take("|"):
            branches.append(self.branch(is_outermost=True))
        if self.at < len(self.pattern):
            raise self.error(f"{shown(self.peek())} closes no group")
        return Either(tuple(branches)) if len(branches) > 1 else branches[0]

    def branch(self, *, is_outermost: bool = False) -> Node:
        begins = is_outermost and self.take("^")
        parts: list[Node] = []
        ends = False
        while self.at < len(self.pattern) and self.peek() not in "|)":
            if is_outermost and self.peek() == "$" and self.pattern[self.at + 1 : self.at + 2] in ("", "|"):
                self.at, ends = self.at + 1, True
                break
            parts.append(self.repeated(self.atom()))
        if self.is_search and is_outermost:
            parts = [*([] if begins else [Repeat(ANY)]), *parts, *([] if ends else [Repeat(ANY)])]
        return parts[0] if len(parts) == 1 else Then(tuple(parts))

    def atom(self) -> Node:
        letter = self.next()
        if letter == "(":
            return self.group()
        if letter == "[":
            return Chars(self.bracket())
        if letter == ".":
            return Chars(others(chars(LINE_ENDS).ranges))
        if letter == "\\":
            return Chars(self.escape(is_wide=self.is_wide))
        if letter in "^$":
            raise self.error(f"{letter} may only stand at an end of the whole expression")
        if letter in "*+?":
            raise self.error(f"{letter} has nothing to repeat")
        return chars(letter)

    def group(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"groups may be at most {MAX_DEPTH} deep")
        if self.take("?"):
            if self.take("P<") or (
                self.peek() == "<" and self.pattern[self.at + 1 : self.at + 2] not in "=!"
            ):
                self.at = self.pattern.find(">", self.at) + 1 or len(self.pattern)
            elif not self.take(":"):
                kind = "look-around" if self.peek() in ("=", "!", "<") else "a flag or group of this kind"
                raise self.error(f"{kind} is not supported")
        branches = [self.branch()]
        while self.take("|"):
            branches.append(self.branch())
        if not self.take(")"):
            raise self.error("a group is not closed")
        self.depth -= 1
        return Either(tuple(branches)) if len(branches) > 1 else branches[0]

    def repeated(self, part: Node) -> Node:
        while (bounds := self.bounds()) is not None:
            minimum, maximum = bounds
            if self.take("+"):
                raise self.error("possessive repetition is not supported")
            self.take("?")  # lazy: the same texts
            part = Repeat(part, minimum, maximum) if maximum != 0 else EMPTY
        return part

    def bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return bounds
        if self.peek() != "{":
            return None
        inside, closed, _ = self.pattern[self.at + 1 :].partition("}")
        first, comma, last = inside.partition(",")
        digits = [number for number in (first, last) if number]
        if not closed or not first or not all(n.isascii() and n.isdigit() and len(n) < 9 for n in digits):
            raise self.error("a repetition must be {n}, {n,} or {n,m}; a brace itself is \\{")
        self.at += len(inside) + 2
        minimum = int(first)
        maximum = None if comma and not last else int(last or first)
        if max(minimum, maximum or 0) > MAX_COUNT or (maximum is not None and maximum < minimum):
            raise self.error(f"a repetition must have 0 <= n <= m <= {MAX_COUNT}")
        return minimum, maximum

    def escape(self, *, is_wide: bool) -> Ranges:
        letter = self.next()
        if letter.lower() in CLASSES:
            ranges = CLASSES[letter.lower()]
            if letter == ("s" if is_wide else "S"):
                ranges = ANY_SPACES
            return ranges if letter.islower() else others(ranges)
        if letter in CONTROLS:
            return ((CONTROLS[letter], CONTROLS[letter]),)
        if letter in "xu":
            point = self.hexadecimal(2 if letter == "x" else 4)
            if 0xD800 <= point < 0xDC00 and self.take("\\u"):  # a character that UTF-16 writes as two
                point = 0x10000 + (point - 0xD800 << 10) + (self.hexadecimal(4) - 0xDC00)
            if point > MAX_POINT:
                raise self.error("there is no such code point")
            return ((point, point),)
        if letter.isascii() and letter.isalnum():
            kind = "a reference back" if letter.isdigit() else f"\\{letter}"
            raise self.error(f"{kind} is not supported")
        return ((ord(letter), ord(letter)),)

    def hexadecimal(self, length: int) -> int:
        if self.take("{"):
            digits, closed, _ = self.pattern[self.at :].partition("}")
            self.at += len(digits) + len(closed)
        else:
            digits = self.pattern[self.at : self.at + length]
            self.at += length
            if len(digits) < length:
                digits = ""
        if not 0 < len(digits) <= 6 or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
            raise self.error("a code point must be in hexadecimal digits")
        return int(digits, 16)

    def bracket(self) -> Ranges:
        is_negated = self.take("^")
        is_wide = self.is_wide != is_negated
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            if self.at == len(self.pattern):
                raise self.error("a class is not closed by ]")
            if self.pattern.startswith(("[:", "[.", "[="), self.at):
                raise self.error("a POSIX class is not supported")
            low = self.in_bracket(is_wide)
            is_range = self.peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", "")
            if is_range and len(low) == 1 and low[0][0] == low[0][1]:
                self.at += 1
                high = self.in_bracket(is_wide)
                if len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                    raise self.error("a range must end with a character that is not before its first")
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges += low
        return others(ranges) if is_negated else joined(ranges)

    def in_bracket(self, is_wide: bool) -> Ranges:
        letter = self.next()
        if letter == "\\":
            if self.take("b"):
                return ((8, 8),)
            return self.escape(is_wide=is_wide)
        return ((ord(letter), ord(letter)),)

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def next(self) -> str:
        if self.at >= len(self.pattern):
            raise self.error("it ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def take(self, mark: str) -> bool:
        """Return whether a mark is next, and go past it if so."""
        is_next = self.pattern.startswith(mark, self.at)
        self.at += len(mark) * is_next
        return is_next

    def error(self, why: str) -> GrammarError:
        where = f" at {self.path}" if self.path else ""
        sentence = f"regex={shown(self.pattern)}{where} cannot be read at character {self.at}: {why}"
        return GrammarError(sentence, self.path)
