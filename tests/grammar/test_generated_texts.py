"""Generated texts: formats, bounds and lengths allow exactly what an independent checker calls valid."""

import datetime
import functools
import ipaddress
import json
import math
import random
import re
import uuid
from decimal import Decimal

import pytest

from jaxpaged.grammar.deterministic import matches
from jaxpaged.grammar.formats import FORMATS, MAX_LENGTHS
from jaxpaged.grammar.machine import byte_machine
from jaxpaged.grammar.nodes import Limits
from jaxpaged.grammar.schema import schema_node


def is_date(text):
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def is_clock(text, form):
    try:
        return datetime.time.fromisoformat(text).isoformat(form) == text
    except ValueError:
        return False


def is_time(text):
    """Check a time of day: without a leap second, with at most nine digits of a fraction, and with a zone."""
    clock, rest = text[:8], text[8:]
    if rest.startswith("."):
        digits = len(rest) - 1 - len(rest[1:].lstrip("0123456789"))
        rest = rest[1 + digits :] if 1 <= digits <= 9 else "?"
    is_zone = rest == "Z" or (rest[:1] in ("+", "-") and is_clock(rest[1:], "minutes"))
    return is_zone and is_clock(clock, "seconds")


def is_moment(text):
    date, mark, time = text.partition("T")
    return mark == "T" and is_date(date) and is_time(time)


def is_duration(text):
    """Check units that follow one another without a gap, as RFC 3339 has them."""
    if not text.startswith("P"):
        return False
    date, mark, time = text[1:].partition("T")
    found = []
    for part in (date, time):
        pairs = re.findall("([0-9]+)([A-Z])", part)
        if "".join(map("".join, pairs)) != part:
            return False
        found.append("".join(unit for _, unit in pairs))
    if mark and not found[1]:
        return False
    is_weeks = found == ["W", ""] and not mark
    return is_weeks or (any(found) and found[0] in "YMD" and found[1] in "HMS")


def is_uuid(text, version=None):
    try:
        its = uuid.UUID(text)
    except ValueError:
        return False
    return str(its) == text.lower() and version in (None, str(its.version))


def is_address(text, kind):
    try:
        kind(text)
    except ValueError:
        return False
    return True


def is_host(text):
    """Check labels of letters and digits with single hyphens inside."""
    parts = [part for label in text.split(".") for part in label.split("-")]
    return text.isascii() and all(part.isalnum() for part in parts)


def is_mail(text):
    name, mark, host = text.rpartition("@")
    atoms = [atom.translate({ord(c): "a" for c in "!#$%&'*+/=?^_`{|}~-"}) for atom in name.split(".")]
    return mark == "@" and name.isascii() and all(atom.isalnum() for atom in atoms) and is_host(host)


def is_pointer(text):
    left = text.replace("~0", "").replace("~1", "")
    return (not text or text.startswith("/")) and "~" not in left


def is_relative(text):
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    rest = text[len(digits) :]
    return digits != "" and str(int(digits)) == digits and (rest == "#" or is_pointer(rest))


# Each with a few valid texts, of which others are made, and what checks them.
CHECKS = {
    "date": (is_date, ["2024-02-29", "0001-12-31", "1900-02-28", "2000-02-29", "0400-11-30"]),
    "time": (is_time, ["23:59:59Z", "00:00:00.123456789+23:59", "12:30:01-00:00"]),
    "date-time": (is_moment, ["2024-02-29T23:59:59Z", "2023-02-28T00:00:00.5+01:30"]),
    "duration": (is_duration, ["P1Y2M3D", "PT10H5M1S", "P3W", "P1DT1M", "P4MT2S"]),
    "uuid": (is_uuid, ["123e4567-e89b-12d3-a456-426614174000", "FFFFFFFF-0000-0000-0000-00000000000a"]),
    "ipv4": (functools.partial(is_address, kind=ipaddress.IPv4Address), ["1.20.255.0", "199.249.250.99"]),
    "ipv6": (
        lambda text: "." not in text and "%" not in text and is_address(text, ipaddress.IPv6Address),
        ["::", "1:22:333:4444:a:Bb:cCc:Dddd", "1::2", "::1:2:3:4:5:6:7", "1:2:3:4:5:6:7::", "fe80::1:0"],
    ),
    "hostname": (is_host, ["a", "a-b.c0", "example.com", "1-2-3.x"]),
    "email": (is_mail, ["a@b", "a.b+c@x-y.org", "o'{|}~@h.i"]),
    "json-pointer": (is_pointer, ["", "/", "/a~0b/~1", "//x y/é"]),
    "relative-json-pointer": (is_relative, ["0", "10#", "3/a~1", "0/"]),
} | {
    f"uuid{version}": (
        functools.partial(is_uuid, version=version),
        [f"123e4567-e89b-{version}2d3-{kind}456-426614174000" for kind in "89aB"],
    )
    for version in "134567"
}
LETTERS = "0123456789-:.TZW+/~@#PYMDHS aAfFgG_%é٣"


@functools.cache
def machine(schema: str):
    return byte_machine(schema_node(json.loads(schema)), Limits())


def allows(schema, text: str) -> bool:
    return matches(machine(json.dumps(schema)), text)


def edited(text: str, rng: random.Random, letters: str = LETTERS) -> str:
    """Return a text with one to three characters put in, left out, exchanged or doubled."""
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        at, letter = rng.randrange(len(text) + 1), rng.choice(letters)
        near = text[at - 1 : at] or letter
        text = text[:at] + rng.choice([letter, near, ""]) + text[at + rng.choice([0, 1, 1]) :]
    return text


def check_texts(schema, texts, is_valid):
    """Compare what a schema allows with a checker. There must be some texts of both kinds."""
    texts = [*dict.fromkeys(texts)]
    valid = {text for text in texts if is_valid(text)}
    assert 0 < len(valid) < len(texts)
    wrong = [text for text in texts if allows(schema, text) != (text in valid)]
    assert not wrong, (schema, wrong[:5])


def check_format(name, count):
    is_valid, seeds = CHECKS[name]
    rng = random.Random(name)
    texts = [*seeds, *(edited(rng.choice(seeds), rng) for _ in range(count))]
    texts = [text for text in texts if len(text) <= MAX_LENGTHS.get(name, 999)]
    check_texts(
        {"type": "string", "format": name},
        [json.dumps(text, ensure_ascii=False) for text in texts],
        lambda text: is_valid(json.loads(text)),
    )


@pytest.mark.parametrize("name", ["date", "time", "ipv4", "uuid4"])
def test_a_format_allows_exactly_its_texts(name):
    check_format(name, 300)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"uri"}))
def test_many_texts_of_each_format(name):
    """An address of a resource has no checker in Python's library, and is left out."""
    check_format(name, 4000)


def test_a_format_bounds_the_length_of_its_texts():
    for name, text in (("hostname", "a" * 63), ("email", "a@" + "b" * 125)):
        assert len(text) == MAX_LENGTHS[name]
        assert allows({"type": "string", "format": name}, json.dumps(text))
        assert not allows({"type": "string", "format": name}, json.dumps(text + "b"))


def is_number(text, schema):
    """Check a decimal under a schema's bounds and multiples: JSON's, and without an exponent."""
    if not re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", text, re.ASCII):
        return False
    if schema["type"] == "integer" and "." in text:
        return False
    value = Decimal(text)
    bounds = {key: Decimal(repr(its)) for key, its in schema.items() if key != "type"}
    none = {
        "minimum": -math.inf,
        "exclusiveMinimum": -math.inf,
        "maximum": math.inf,
        "exclusiveMaximum": math.inf,
    }
    low, above, high, below = (bounds.get(key, its) for key, its in none.items())
    multiple = bounds.get("multipleOf")
    return low <= value <= high and above < value < below and not (multiple and value % multiple)


def numbers(schema, rng, count):
    """Yield texts at and about the bounds, 0 with a sign, and ones that are no numbers."""
    yield "-0"
    values = [Decimal(repr(its)) for key, its in schema.items() if key != "type"] or [Decimal(0)]
    for _ in range(count):
        step = rng.choice([0, 0, 1, 2, 5, 17, 250]) * Decimal(10) ** rng.choice([0, 0, 0, -1, -2, -4, 2])
        value = rng.choice(values) * rng.choice([1, 1, 1, 2, 7, -1]) + rng.choice([1, -1]) * step
        text = format(value, "f")
        if rng.random() < 0.2 and "." in text:
            text += "0" * rng.randrange(3)
        if rng.random() < 0.25:
            text = edited(text, rng, "0019.-+e ")
        yield text.strip()


BOUNDS = {
    "minimum": [0, 1, -3, 99, 12.5, -0.001],
    "maximum": [0, 9, -1, 100, 0.3, -12.75],
    "exclusiveMinimum": [0, 1, -10, 0.5],
    "exclusiveMaximum": [0, 2, 1000, -0.25],
    "multipleOf": [1, 3, 7, 10, 0.5, 0.01, 2.5],
}
PAIRS = [
    {"minimum": -5, "maximum": 12, "multipleOf": 3},
    {"exclusiveMinimum": 0, "maximum": 1},
    {"minimum": 18, "exclusiveMaximum": 65},
    {"exclusiveMinimum": -1.5, "exclusiveMaximum": 1.5, "multipleOf": 0.25},
    {"minimum": 0.1, "maximum": 0.35},
]


def check_numbers(rules, count):
    has_integers = not any("." in repr(its) for its in rules.values())
    for kind in ("integer", "number") if has_integers else ("number",):
        schema = {"type": kind} | rules
        rng = random.Random(json.dumps(schema))
        check_texts(schema, numbers(schema, rng, count), functools.partial(is_number, schema=schema))


@pytest.mark.parametrize("key", BOUNDS)
def test_a_bound_allows_exactly_its_numbers(key):
    check_numbers({key: BOUNDS[key][1]}, 150)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules", [*({key: its} for key, values in BOUNDS.items() for its in values), *PAIRS], ids=json.dumps
)
def test_many_numbers_of_each_bound(rules):
    check_numbers(rules, 2000)


def test_no_double_is_behind_a_bound_that_is_not_itself_allowed():
    """A text between the bound and the next double is read as one of them, so it is barred as a whole."""
    under = {"type": "number", "exclusiveMaximum": 2}
    assert allows(under, "1.9999999999999998")
    assert not allows(under, "1.9999999999999999999")
    above = {"type": "number", "exclusiveMinimum": 2}
    assert allows(above, "2.0000000000000004")
    assert not allows(above, "2.0000000000000000001")


LENGTHS = [{"minLength": 2}, {"maxLength": 3}, {"minLength": 1, "maxLength": 4}, {"pattern": "^a.b$"}]
LENGTHS += [{"pattern": "[0-9]{2}"}, {"pattern": "^(ab|cd)*$", "maxLength": 5}, {"pattern": "^.*é$"}]


@pytest.mark.parametrize("rules", LENGTHS, ids=json.dumps)
def test_lengths_and_patterns_count_characters_as_json_reads_them(rules):
    """A character of four bytes, or written as an escape, is one."""
    rng, letters = random.Random(json.dumps(rules)), 'aabbcd01é🙂\n"\\'
    seeds = ["", "ab", "a🙂b", 'a"b', "abcd", "x12", "cdab", "aé", "01"]
    made = [edited(rng.choice(seeds), rng, letters) for _ in range(200)]

    def is_valid(text):
        read, pattern = json.loads(text), rules.get("pattern", "")
        is_met = re.search(pattern.replace("$", r"\Z"), read) is not None
        return is_met and rules.get("minLength", 0) <= len(read) <= rules.get("maxLength", 99)

    texts = [json.dumps(text, ensure_ascii=False) for text in made]
    check_texts({"type": "string"} | rules, texts, is_valid)
