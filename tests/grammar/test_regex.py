"""Regular expressions: tables that allow what the oracle does, and texts that Python's `re` matches."""

import re

import numpy as np
import pytest

from jaxpaged.grammar.nodes import (
    EMPTY,
    Both,
    Distinct,
    Either,
    GrammarError,
    Limits,
    Members,
    Minus,
    Multiples,
    Repeat,
    Then,
    chars,
    text,
)
from jaxpaged.grammar.regex import parse_regex
from tests.grammar.languages import VOCABULARY, accepts, automaton, compare, language, write

PATTERNS = [
    "yes|no|maybe",
    "(ab|abc|aba)*b{2,3}",
    r"[^\"\\\x00-\x1f]{0,3}é?",
    r"\d{3}-\d+|\w\s\W",
    r"[漢-語🙂a-cé-ż]+",
    r"(?:a|(?P<x>b)){1,2}(?<y>c)?.",
    r"^-?(0|[1-9]\d{0,2})(\.5)?$",
    r"(a?){3}|\u00e9\x41\u{1F642}|[\]\-^]",
    "(a|b)*a(a|b){3}",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tables_allow_what_the_oracle_allows(pattern):
    """A bar too many, a bar too few, half a character: each is a token that the oracle judges otherwise."""
    node = parse_regex(pattern)
    compare(automaton(node), language(node))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_answers_match_in_python(pattern):
    rng = np.random.default_rng(0)
    made = automaton(parse_regex(pattern))
    answers = [write(made, VOCABULARY, rng) for _ in range(5)]
    ours = pattern.replace("(?<y>", "(?P<y>").replace(r"\u{1F642}", "🙂")
    assert all(re.fullmatch(ours, answer, re.ASCII) for answer in answers if answer is not None)


def test_a_search_finds_its_match_anywhere():
    made = automaton(parse_regex("^a|b$|cc", is_search=True))
    found = dict.fromkeys(("a", "xb", "xccy", "é漢cc"), True) | dict.fromkeys(("xa", "bx", "c", "\na"), False)
    assert {text: accepts(made, VOCABULARY, text) for text in found} == found


SPACES = [chr(point) for point in range(0x10000) if chr(point).isspace() or point == 0xFEFF]


def test_white_space_is_none_for_any_reader_where_it_is_barred():
    """ECMAScript has U+FEFF, Python U+001C: `\\S` allows neither, and `\\s` only what is ASCII's for both."""
    for pattern in (r"\S", r"[^\s]", r"[\S]"):
        made = automaton(parse_regex(pattern))
        assert [text for text in SPACES if accepts(made, VOCABULARY, text)] == []
        assert all(accepts(made, VOCABULARY, text) for text in "aé漢🙂")
    for pattern in (r"\s", r"[^\S]", r"[\s]"):
        made = automaton(parse_regex(pattern))
        assert [text for text in SPACES if accepts(made, VOCABULARY, text)] == [*"\t\n\v\f\r "]
        wide = automaton(parse_regex(pattern, is_wide=True))
        assert all(accepts(wide, VOCABULARY, text) for text in SPACES)


@pytest.mark.parametrize(
    "node",
    [
        Members(((text("a"), False), (text("b"), True), (text("ab"), False)), text(", ")),
        Members(((text("a"), False), (text("bb"), False)), chars(","), text("c")),
        Members((), chars(","), text("a")),
        Repeat(Either((EMPTY, Repeat(chars("a")))), 2, 4),
        Members(tuple((text(letter), letter == "b") for letter in "abc"), chars(","), None, 2),
        Members(((text("a"), False), (text("b"), True)), chars(","), text("cc"), 1, 3),
        Then((Both((parse_regex("[ab]*"), parse_regex(".{3,}b"), parse_regex("(a|b|é){0,5}"))), text("0"))),
        Minus(parse_regex("[ab]{0,4}"), parse_regex(".*bb.*|a")),
        Multiples(12),
        Distinct((text("a"), text("bb"), Either((text("ab"), text("c")))), chars(","), 1, 2),
        Multiples(25, 2, is_whole=False),
        Multiples(3, 0, is_whole=False),
    ],
)
def test_members_common_texts_and_multiples(node):
    """The machine pairs and counts states; the oracle spells out every way."""
    compare(automaton(node), language(node), num_walks=12)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "a reference back"),
        (r"\bfoo", r"\\b is not supported"),
        (r"\p{L}", r"\\p is not supported"),
        ("(?i)a", "a flag"),
        ("a++", "possessive"),
        ("[[:alpha:]]", "POSIX"),
        ("a(", "not closed"),
        ("a)", "closes no group"),
        ("[b-a]", "range"),
        ("[a", "not closed"),
        ("*a", "nothing to repeat"),
        ("a{3,2}", "0 <= n <= m"),
        ("a{99999}", "0 <= n <= m"),
        ("a{,3}", "a brace itself"),
        ("a^b", "end of the whole"),
        ("a\\", "too early"),
        (r"\u12", "hexadecimal"),
        ("(" * 60 + ")" * 60, "deep"),
    ],
)
def test_what_is_not_read_is_named(pattern, why):
    with pytest.raises(GrammarError, match=why):
        parse_regex(pattern)


@pytest.mark.parametrize(
    "pattern", ["[^\\x00-\\u{10FFFF}]", "[\\ud800-\\udfff]", "(a|b)*a(a|b){20}", "((a{0,999}){9}){20}"]
)
def test_what_has_no_text_or_too_many_states_is_refused(pattern):
    with pytest.raises(GrammarError, match="cannot be met|states|parts"):
        automaton(parse_regex(pattern), limits=Limits(max_states=512))
