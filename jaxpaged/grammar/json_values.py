"""JSON's numbers and strings as nodes: ranges of integers, lengths, patterns and formats of strings."""

import json
from typing import Any

from jaxpaged.grammar.formats import FORMATS, MAX_LENGTHS
from jaxpaged.grammar.nodes import (
    EMPTY,
    MAX_POINT,
    NOTHING,
    Both,
    Chars,
    Either,
    Members,
    Minus,
    Node,
    Ranges,
    Repeat,
    Then,
    chars,
    common,
    optional,
    others,
    text,
)
from jaxpaged.grammar.regex import parse_regex

DIGIT = chars("0123456789")
HEX = chars("0123456789abcdefABCDEF")
MAX_DIGITS = 18  # of an integer's bounds
_NATURAL = Either((chars("0"), Then((chars("123456789"), Repeat(DIGIT)))))
INTEGER = Then((optional(chars("-")), _NATURAL))
_EXPONENT = Then((chars("eE"), optional(chars("+-")), Repeat(DIGIT, 1, 2)))
NUMBER = Then((INTEGER, optional(Then((chars("."), Repeat(DIGIT, 1)))), optional(_EXPONENT)))

# Characters that stand for themselves in a JSON string, and the short forms of others.
PLAIN: Ranges = others([(0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))])
SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", ord('"'): '"', ord("\\"): "\\"}
_SURROGATE_HIGH = Then((chars("dD"), chars("89abAB"), HEX, HEX))
_SURROGATE_LOW = Then((chars("dD"), chars("cdefCDEF"), HEX, HEX))
_FOUR = Either(
    (
        Then((chars("0123456789abcefABCEF"), HEX, HEX, HEX)),
        Then((chars("dD"), chars("01234567"), HEX, HEX)),
        Then((_SURROGATE_HIGH, text("\\u"), _SURROGATE_LOW)),
    )
)
# One character of a string in every way that JSON has; half of a pair of surrogates is none.
CHARACTER = Either(
    (Chars(PLAIN), Then((chars("\\"), Either((chars('"\\/bfnrt'), Then((chars("u"), _FOUR)))))))
)


def string(minimum: int = 0, maximum: int | None = None) -> Node:
    """Return JSON strings of `minimum` to `maximum` characters."""
    return quoted(Repeat(CHARACTER, minimum, maximum))


def pattern_text(pattern: str, path: str, *, is_wide: bool = False) -> Node:
    """Return texts that contain a match of a pattern; `is_wide`: for any reader. Raises `GrammarError`."""
    return parse_regex(pattern, is_search=True, is_wide=is_wide, path=path)


def format_texts(name: str) -> list[Node]:
    """Return nodes whose common texts are those of a format of `FORMATS`."""
    nodes = [parse_regex(FORMATS[name])]
    if name in MAX_LENGTHS:
        nodes.append(length_text(0, MAX_LENGTHS[name]))
    return nodes


def length_text(minimum: int, maximum: int | None) -> Node:
    """Return texts of `minimum` to `maximum` characters."""
    return Repeat(Chars(((0, MAX_POINT),)), minimum, maximum)


def literal(value: Any) -> Node:
    """Return the text of a JSON value, as `json.dumps` writes it; characters beyond ASCII as themselves."""
    return text(json.dumps(value, ensure_ascii=False))


def quoted(inside: Node) -> Node:
    return Then((chars('"'), inside, chars('"')))


def encoded(node: Node) -> Node:
    """Return the node of a JSON string's content between its quotes, for each text of a node.

    A character is written as itself where JSON lets it, and the shortest way where it does not.
    """
    match node:
        case Chars(ranges):
            alternatives: list[Node] = []
            if plain := common(ranges, PLAIN):
                alternatives.append(Chars(plain))
            for low, high in common(ranges, others(PLAIN)):
                alternatives += [text(_escape(point)) for point in range(low, high + 1)]
            return alternatives[0] if len(alternatives) == 1 else Either(tuple(alternatives))
        case Then(parts):
            return Then(tuple(map(encoded, parts)))
        case Either(parts):
            return Either(tuple(map(encoded, parts)))
        case Repeat(part, minimum, maximum):
            return Repeat(encoded(part), minimum, maximum)
        case Both(parts):
            return Both(tuple(map(encoded, parts)))
        case Minus(part, other):
            return Minus(encoded(part), encoded(other))
        case Members(parts, comma, rest, minimum, maximum):
            members = tuple((encoded(part), required) for part, required in parts)
            return Members(members, encoded(comma), None if rest is None else encoded(rest), minimum, maximum)
        case _:
            raise TypeError(f"{type(node).__name__} is no part of a string")


def other_string(names: list[str]) -> Node:
    """Return JSON strings that are none of `names`, with characters written as `encoded` does."""

    def behind(begun: list[str]) -> Node:
        """Return the rest of a string that starts with a beginning of the given names but is none of them."""
        first = {name[0] for name in begun if name}
        other = Then((Chars(others((ord(letter), ord(letter)) for letter in first)), Repeat(any_char)))
        alternatives: list[Node] = [other] if "" in begun else [EMPTY, other]
        for letter in sorted(first):
            left = [name[1:] for name in begun if name.startswith(letter)]
            alternatives.append(Then((chars(letter), behind(left))))
        return Either(tuple(alternatives))

    any_char = Chars(((0, MAX_POINT),))
    return quoted(encoded(behind(names)))


def integer(minimum: int | None, maximum: int | None) -> Node:
    """Return the integers from `minimum` to `maximum`, both included; None: no bound. 0 may have a sign."""
    if minimum is None and maximum is None:
        return INTEGER
    alternatives = []
    if maximum is None or maximum >= 0:
        low = max(minimum or 0, 0)
        alternatives += [natural(low, maximum)] if maximum is None or low <= maximum else []
    if minimum is None or minimum <= 0:
        low = 0 if maximum is None or maximum >= 0 else -maximum
        high = None if minimum is None else -minimum
        alternatives += [Then((chars("-"), natural(low, high)))] if high is None or low <= high else []
    return Either(tuple(alternatives)) if alternatives else NOTHING


def natural(minimum: int, maximum: int | None) -> Node:
    """Return the digits of the integers from `minimum`, not below 0, to `maximum`; None: without a bound."""
    alternatives = []
    first = len(str(minimum))
    last = first if maximum is None else len(str(maximum))
    for length in range(first, last + 1):
        low = max(minimum, 10 ** (length - 1) if length > 1 else 0)
        high = 10**length - 1 if maximum is None else min(maximum, 10**length - 1)
        alternatives.append(_between(str(low), str(high)))
    if maximum is None:
        alternatives.append(Then((chars("123456789"), Repeat(DIGIT, last, None))))
    return Either(tuple(alternatives))


def _between(low: str, high: str) -> Node:
    """Return numbers of one length, from `low` to `high`."""
    if not low:
        return EMPTY
    if low == "0" * len(low) and high == "9" * len(high):
        return Repeat(DIGIT, len(low), len(low))
    if low[0] == high[0]:
        return Then((chars(low[0]), _between(low[1:], high[1:])))
    nines, zeros = "9" * (len(low) - 1), "0" * (len(low) - 1)
    alternatives = [
        Then((chars(low[0]), _between(low[1:], nines))),
        Then((chars(high[0]), _between(zeros, high[1:]))),
    ]
    if int(low[0]) + 1 < int(high[0]):
        inner = Chars(((ord(low[0]) + 1, ord(high[0]) - 1),))
        alternatives.append(Then((inner, Repeat(DIGIT, len(zeros), len(zeros)))))
    return Either(tuple(alternatives))


def _escape(point: int) -> str:
    return "\\" + SHORT[point] if point in SHORT else f"\\u{point:04x}"
