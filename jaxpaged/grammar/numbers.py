"""JSON's numbers between bounds, and multiples, as nodes: exact over decimal text.

A number with a bound or a multiple has no exponent: a sign, digits, and a fraction of any length.
"""

import math
from decimal import Decimal

from jaxpaged.grammar.json_values import DIGIT, INTEGER, natural
from jaxpaged.grammar.nodes import (
    EMPTY,
    Either,
    Minus,
    Multiples,
    Node,
    Repeat,
    Then,
    both,
    chars,
    either,
    optional,
    text,
)

MAX_PLACES = 40  # of a bound's fraction
MAX_REMAINDERS = 4000  # states of a multiple
LEAST = Decimal("1e-18")  # what is above 0 where 0 itself is not allowed
_SOME_ZEROS = Repeat(chars("0"), 1)
_POINT = chars(".")
DECIMAL = Then((INTEGER, optional(Then((_POINT, Repeat(DIGIT, 1))))))


def bound(value: float, *, is_open: bool = False, is_low: bool = True) -> Decimal:
    """Return a bound as a decimal; one that is not itself allowed as the next double, or `LEAST` beside 0."""
    if not is_open:
        return Decimal(repr(value))
    if value == 0:
        return LEAST if is_low else -LEAST
    following = math.nextafter(value, math.inf if is_low else -math.inf)
    return Decimal(repr(following))


def decimal(low: Decimal | None, high: Decimal | None) -> Node:
    """Return the decimals from `low` to `high`, both included, without an exponent; None: without a bound."""
    alternatives: list[Node] = []
    if high is None or high >= 0:
        alternatives.append(_unsigned(max(low or Decimal(0), Decimal(0)), high))
    if low is None or low <= 0:
        top = None if low is None else -low
        alternatives.append(Then((chars("-"), _unsigned(max(-(high or Decimal(0)), Decimal(0)), top))))
    return either(alternatives)


def multiples(of: Decimal, *, is_whole: bool) -> Node | None:
    """Return the multiples of a number above 0; None if it has too many remainders."""
    top, places = of.as_integer_ratio()[0], 0
    if not is_whole:
        places = max(-int(of.normalize().as_tuple().exponent), 0)
        top = int(of.scaleb(places))
    zeros = 0
    while is_whole and top % 10 == 0:
        top, zeros = top // 10, zeros + 1
    if top * (places + 1) > MAX_REMAINDERS or zeros > MAX_PLACES:
        return None
    magnitude: Node = Multiples(top, places, is_whole)
    if zeros:
        magnitude = Either((text("0"), Then((Minus(magnitude, text("0")), text("0" * zeros)))))
    return Then((optional(chars("-")), magnitude))


def _unsigned(low: Decimal, high: Decimal | None) -> Node:
    """Return the decimals without a sign from `low` to `high`."""
    parts = [_from(*_digits(low))]
    if high is not None:
        parts.append(_to(*_digits(high)))
    return both(parts)


def _digits(value: Decimal) -> tuple[int, str]:
    """Return a number's whole part, and the digits of its fraction."""
    whole, _, fraction = f"{value:f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _from(whole: int, fraction: str) -> Node:
    fractions = optional(Then((_POINT, Repeat(DIGIT, 1))))
    equal = Then((_POINT, _fraction_from(fraction))) if fraction else fractions
    return Either((Then((natural(whole + 1, None), fractions)), Then((text(str(whole)), equal))))


def _fraction_from(digits: str) -> Node:
    if not digits:
        return Repeat(DIGIT)
    above = chars("0123456789"[int(digits[0]) + 1 :])
    alternatives: list[Node] = [Then((chars(digits[0]), _fraction_from(digits[1:])))]
    if digits[0] != "9":
        alternatives.append(Then((above, Repeat(DIGIT))))
    return either(alternatives)


def _to(whole: int, fraction: str) -> Node:
    fractions = optional(Then((_POINT, Repeat(DIGIT, 1))))
    equal = optional(Then((_POINT, _fraction_to(fraction, is_first=True))))
    alternatives: list[Node] = [Then((text(str(whole)), equal))]
    if whole:
        alternatives.append(Then((natural(0, whole - 1), fractions)))
    return either(alternatives)


def _fraction_to(digits: str, *, is_first: bool = False) -> Node:
    if not digits:
        return _SOME_ZEROS if is_first else Repeat(chars("0"))
    alternatives: list[Node] = [] if is_first else [EMPTY]
    alternatives.append(Then((chars(digits[0]), _fraction_to(digits[1:]))))
    if digits[0] != "0":
        alternatives.append(Then((chars("0123456789"[: int(digits[0])]), Repeat(DIGIT))))
    return either(alternatives)
