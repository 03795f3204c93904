"""Strings and numbers of JSON schemas as nodes, by all keywords that hold of them together."""

import math
from decimal import Decimal
from typing import Any

from jaxpaged.checks import shown
from jaxpaged.grammar import json_values, numbers
from jaxpaged.grammar.formats import FORMATS
from jaxpaged.grammar.nodes import Either, Minus, Node, both, either, text
from jaxpaged.grammar.places import Alternative, Place, counts, not_regular, type_of, unmet, wrong

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OF_STRINGS = {"minLength", "maxLength", "pattern", "format", "not"}
MAX_EXACT = 16  # characters of a decimal that no other has the double of: 15 digits and a point
FREE_FORMATS = {"path", "file-path", "directory-path", "password"}  # any string is one


def string(alternative: Alternative) -> Node:
    """Return JSON strings. Raises `UnmetError`, or `GrammarError`."""
    minimum, maximum = counts(alternative, "minLength", "maxLength")
    texts, barred = [], [text(value) for value in excluded(alternative, "string")]
    for place in alternative:
        for key in ("pattern", "format"):
            if not isinstance(place.schema.get(key, ""), str):
                raise wrong(place.path, f"has a {key} that is not a string")
        if "pattern" in place.schema:
            texts.append(json_values.pattern_text(place.schema["pattern"], f"{place.path}/pattern"))
        if "pattern" in (other := place.schema.get("not", {})):
            barred.append(json_values.pattern_text(other["pattern"], f"{place.path}/pattern", is_wide=True))
        if (name := place.schema.get("format")) is not None and name not in FREE_FORMATS:
            if name not in FORMATS:
                raise not_regular(place.path, f"format={shown(name)} has no automaton")
            texts += json_values.format_texts(name)
    if not texts and not barred:
        return json_values.string(minimum, maximum)
    if minimum or maximum is not None or not texts:
        texts.append(json_values.length_text(minimum, maximum))
    content = both(map(json_values.encoded, texts))
    if barred:
        content = Minus(content, json_values.encoded(Either(tuple(barred))))
    return json_values.quoted(content)


def number(alternative: Alternative, *, is_integer: bool) -> Node:
    """Return JSON numbers. Raises `UnmetError`, or `GrammarError`."""
    low, high = bounds(alternative, is_integer=is_integer)
    conditions: list[Node] = []
    values = [Decimal(repr(value)) for value in excluded(alternative, "number") if math.isfinite(value)]
    barred = [numbers.decimal(value, value) for value in values]
    for place in alternative:
        if "multipleOf" in place.schema:
            conditions.append(_multiple(place, is_integer=is_integer))
        if "multipleOf" in (other := place.schema.get("not", {})):
            barred.append(_multiple(place._replace(schema=other), is_integer=is_integer))
        if other.get("type") == "integer":
            if is_integer:
                raise unmet(place.path, "an integer is one")
            barred.append(_multiple(place._replace(schema={"multipleOf": 1}), is_integer=False))
    if is_integer:
        conditions.insert(0, json_values.integer(*(None if end is None else int(end) for end in (low, high))))
    elif conditions or barred or low is not None or high is not None:
        for end in (low, high):
            if end is not None and -int(end.normalize().as_tuple().exponent) > numbers.MAX_PLACES:
                raise wrong(
                    alternative[0].path,
                    f"has a bound of more than {numbers.MAX_PLACES} digits in its fraction",
                )
        conditions.insert(0, numbers.decimal(low, high))
        if barred:  # what differs in decimals must differ for readers with doubles
            conditions.append(json_values.length_text(0, MAX_EXACT))
    else:
        return json_values.NUMBER
    made = both(conditions)
    return Minus(made, either(barred)) if barred else made


def bounds(alternative: Alternative, *, is_integer: bool) -> tuple[Decimal | None, Decimal | None]:
    """Return the least and the largest number, both allowed; None: no bound. Raises `UnmetError`."""
    lows: list[Decimal] = []
    highs: list[Decimal] = []
    for place in alternative:
        for key in BOUNDS:
            if key in place.schema:
                end = _bound(place, key, is_integer=is_integer)
                (lows if "inimum" in key else highs).append(end)
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise unmet(
            alternative[0].path, f"no {'integer' if is_integer else 'number'} is from {low:f} to {high:f}"
        )
    return low, high


def excluded(alternative: Alternative, kind: str) -> list[Any]:
    """Return the values of a type that an alternative excludes."""
    barred = []
    for place in alternative:
        other = place.schema.get("not", {})
        values = other.get("enum", []) if "const" not in other else [other["const"]]
        if not isinstance(values, list):
            raise wrong(place.path, "has an enum that is not a list")
        barred += [value for value in values if type_of(value) == kind]
    return barred


def _bound(place: Place, key: str, *, is_integer: bool) -> Decimal:
    value: Any = place.schema[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < 10**json_values.MAX_DIGITS:
        limit = f"1e{json_values.MAX_DIGITS}"
        raise wrong(place.path, f"has {key}={shown(value)}, must be a number below {limit}")
    is_low, is_open = "inimum" in key, key.startswith("exclusive")
    if not is_integer:
        return numbers.bound(value, is_open=is_open, is_low=is_low)
    if is_low:
        return Decimal(math.floor(value) + 1 if is_open else math.ceil(value))
    return Decimal(math.ceil(value) - 1 if is_open else math.floor(value))


def _multiple(place: Place, *, is_integer: bool) -> Node:
    value: Any = place.schema["multipleOf"]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 1e-18 <= value < 10**json_values.MAX_DIGITS:
        raise wrong(place.path, f"has multipleOf={shown(value)}, must be a number above 0 and below 1e18")
    node = numbers.multiples(Decimal(repr(value)), is_whole=is_integer)
    if node is None:
        raise not_regular(place.path, f"multipleOf={shown(value)} has too many remainders")
    return node
