"""Division into lexemes: sources for llguidance allow exactly what the automaton of the same texts does."""

import json
import random

import numpy as np
import pytest

from jaxpaged.grammar import lexemes
from jaxpaged.grammar.compile import Constraint
from jaxpaged.grammar.deterministic import matches
from jaxpaged.grammar.lark import lark_of
from jaxpaged.grammar.machine import byte_machine
from jaxpaged.grammar.nodes import (
    Both,
    Chars,
    Either,
    GrammarError,
    Limits,
    Minus,
    Multiples,
    NotRegularError,
    Ref,
    Repeat,
    Then,
    chars,
)
from jaxpaged.grammar.recursive import EVERY_TOKEN, Language
from jaxpaged.grammar.regex import parse_regex
from jaxpaged.grammar.rules import Rules
from jaxpaged.grammar.schema import schema_node
from jaxpaged.grammar.vocabulary import TokenBytes
from reference.context_free import TokenGrammar
from tests.grammar import schema_cases
from tests.grammar.languages import VOCABULARY, automaton
from tests.marks import slow_and_nightly

pytest.importorskip("llguidance")

HAS_MARK = np.array([b"~" in raw for raw in VOCABULARY.raw])
# Expressions and schemas in which one part may go on where another begins.
TEXTS = ["(ab|abc|aba)*b{2,3}", r"[ab]*(aab|b)\n?", r"a*[^b]{0,3}ab", r"(\d+ ?)+=\d*", "(a|b)*a(a|b){3}"]
PARTS = [
    {"type": "array", "items": {"enum": [1, 12, 123]}},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 3}}},
    {"anyOf": [{"type": "number", "exclusiveMaximum": 2}, {"type": "integer", "multipleOf": 7}]},
    {
        "type": "object",
        "properties": {"d": {"type": "string", "format": "date"}},
        "additionalProperties": True,
    },
]


def recursive_parts(node, rng, share, named):
    """Return a node in which some parts are rules that come again between two marks."""
    match node:
        case Then(parts) | Either(parts):
            made = type(node)(tuple(recursive_parts(part, rng, share, named) for part in parts))
        case Repeat(part, least, most):
            made = Repeat(recursive_parts(part, rng, share, named), least, most)
        case _:
            made = node
    if isinstance(node, Chars | Both | Minus | Multiples) or rng.random() > share:
        return made
    name = f"rule{len(named)}"
    named[name] = Either((made, Then((chars("~"), Ref(name), chars("~")))))
    return Ref(name)


def assert_allows_the_same(node, seed, num_walks=3, length=20):
    """Walk at random without marks: what is recursive allows there what the automaton does."""
    rng, made = np.random.default_rng(seed), automaton(node)
    for share in (0, 0.2, 0.6):
        named = {}
        start = recursive_parts(node, rng, share, named)
        language = Language(lark_of(Rules(start, named)) + EVERY_TOKEN, VOCABULARY)
        for _ in range(num_walks):
            matcher, state, text = language.matcher(), made.start, b""
            for _ in range(length):
                allowed = made.allowed(state) & ~HAS_MARK
                assert (matcher.allowed() & ~HAS_MARK == allowed).all(), (share, text)
                going = [token for token in np.flatnonzero(allowed) if token not in VOCABULARY.eos_ids]
                if not going:
                    break
                token = int(rng.choice(going))
                assert matcher.advance(token)
                state, text = made.step(state, token), text + VOCABULARY.raw[token]


@pytest.mark.parametrize("case", [*TEXTS, *map(json.dumps, PARTS)])
def test_what_is_divided_allows_what_its_automaton_does(case):
    """Most of these lose texts where conflicts are not divided."""
    node = parse_regex(case) if case in TEXTS else schema_node(json.loads(case), levels=1)
    assert_allows_the_same(node, 0)


ALL_CASES = [case[0] for cases in schema_cases.CASES.values() for case in cases]


@pytest.mark.parametrize("i", slow_and_nightly(range(len(ALL_CASES)), range(0, len(ALL_CASES), 9)))
def test_schemas_of_all_chapters_are_divided_exactly(i):
    try:
        node = schema_node(ALL_CASES[i])
    except NotRegularError:
        pytest.skip("recursive")
    assert_allows_the_same(node, i)


SUMS = r"""# llama.cpp's arithmetic, with its greedy white space
root ::= line+
line ::= sum "=" ws part "\n"
sum  ::= part ("+" ws part)*
part ::= number | "(" ws sum ")" ws
number ::= [0-9]+ ws
ws   ::= [ \t\n]*
"""
LETTERS = [b"a", b"b", b" ", b"\n", b"ab", b"b ", b"\n\n", b"aa"]
FEW = TokenBytes((b"", *LETTERS), (0,))


def accepts(made, text):
    matcher = made.matcher()
    one = {raw: token for token, raw in enumerate(VOCABULARY.raw)}
    is_there = all(matcher.advance(one[bytes([byte])]) for byte in text.encode())
    return is_there and bool(matcher.allowed()[list(VOCABULARY.eos_ids)].all())


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (SUMS, ["1+2=3\n", "1 + 2 = 3 \n", "(1\n+ 2)=3\n\n\n4=4\n"], ["1+2=3", "1=\n", "1 2=3\n"]),
        ('root ::= start end\nstart ::= "a" root? \nend ::= "b"', ["ab", "aabb"], ["a", "aab"]),
        (r'root ::= "\u00e9" [\U0001F642\x41] (root | ""){0,1}', ["éA", "é🙂éA"], ["eA", "é"]),
        ('root ::=\n  # none\n  "a" ( "b"\n | "c" root )\n  | "d" # last', ["ab", "acd", "d"], ["a", "c"]),
        ('root ::= root "a"{2,3} | . x\nx ::= ("(" x ")")?', ["é", "éaa", "é()aaaa"], ["éa", "aaéaa"]),
        ('root ::= w | "(" root ")"\nw ::= [^()] w | [^()]', ["ab", "((ab))", "\n"], ["", "()", "(ab"]),
    ],
)
def test_grammars_of_llama_cpp(grammar, texts, others):
    """White space before a line feed, a rule named start, escapes, comments, lines, rules that begin with
    themselves.
    """
    made = Language(Constraint({"grammar": grammar}, Limits()).source(), VOCABULARY)
    assert [text for text in texts if not accepts(made, text)] == []
    assert [text for text in others if accepts(made, text)] == []


def test_a_grammar_that_is_not_recursive_has_an_automaton():
    constraint = Constraint({"grammar": 'root ::= word (" " word){0,2}\nword ::= [a-z]+'}, Limits())
    assert constraint.source() is None
    assert constraint.automaton(VOCABULARY).num_states > 2


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('root ::= "a', 'line 1: " is missing'),
        ("root ::= other", "line 1: there is no rule 'other'"),
        ('a ::= "a"', "there is no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "line 2: there must be one rule of each name"),
        ('root ::= ("a"', "a group is not closed"),
        ('root ::= "a" )', "is no part of a rule"),
        ("root ::= [b-a]", "range"),
        (r'root ::= "\q"', r"\\q is no escape"),
        (r'root ::= "\ud800" root?', "no such character"),
        ('root ::= "a"{2', "a repetition must be"),
        ("root ::= <|tool|>", "tokens by name"),
        ("root ::= root", "no text is in it"),
    ],
)
def test_what_is_wrong_in_a_grammar_is_told(grammar, why):
    with pytest.raises(GrammarError, match=why):
        Constraint({"grammar": grammar}, Limits()).source()


def random_grammar(rng):
    """Return rules in llama.cpp's notation, and as the oracle's; none begins with itself."""
    names = ["root", "x", "y"]
    lines, rules = [], {"start": [["root"]]}
    for i, name in enumerate(names):
        ways, theirs = [], []
        for _ in range(int(rng.integers(1, 4))):
            parts = [str(rng.choice(["a", "b", " ", "\n", "ab", "aa"]))]
            parts += [
                str(rng.choice([*names, "a", "b", " ", "\n", "W"])) for _ in range(int(rng.integers(0, 4)))
            ]
            theirs.append([each if each in names or each == "W" else each.encode() for each in parts])
            ways.append(
                " ".join(
                    each if each in names else "w" if each == "W" else json.dumps(each) for each in parts
                )
            )
        # A way that ends gives each rule a text.
        ways.append(json.dumps("ab"[i % 2]))
        theirs.append([b"ab"[i % 2 : i % 2 + 1]])
        lines.append(f"{name} ::= {' | '.join(ways)}")
        rules[name] = theirs
    lines.append(r"w ::= [ \n]*")
    rules["W"] = [[], [b" ", "W"], [b"\n", "W"]]
    return "\n".join(lines), rules


@pytest.mark.parametrize("seed", range(6))
def test_random_grammars_have_the_masks_of_the_oracle(seed):
    for i in range(4):
        rng = np.random.default_rng([seed, i])
        grammar, rules = random_grammar(rng)
        source = Constraint({"grammar": grammar}, Limits()).source()
        if source is None:
            continue
        made, want = Language(source, FEW), TokenGrammar(rules, FEW.raw, FEW.eos_ids)
        for _ in range(3):
            matcher, answer = made.matcher(), []
            for _ in range(6):
                allowed = {*matcher.allowed().nonzero()[0].tolist()}
                assert allowed == want.allowed(answer), (grammar, answer)
                if not allowed - {0}:
                    break
                answer.append(int(rng.choice([*(allowed - {0})])))
                assert matcher.advance(answer[-1])


def thing(properties):
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


KINDS = {
    "texts": {"type": "string", "maxLength": 2000},
    "addresses": {"type": "string", "format": "email"},
    "links": {"type": "string", "format": "uri", "maxLength": 200},
    "lists": {"type": "array", "items": {"type": "string"}, "maxItems": 2000},
}


RIGHT = {
    "texts": ("é" * 2000, "a" * 2001),
    "addresses": ("a.b@c-d.e", "a..b@c"),
    "links": ("https://a/" + "b" * 190, "https://a/" + "b" * 191),
    "lists": ([""] * 200, ["a", 1]),
}


def test_twenty_large_properties_are_served_exactly():
    """What has too many states for an automaton is one lexeme: as long as allowed, and one more."""
    kinds = [*KINDS] * 5
    schema = thing({f"p{i}": KINDS[kind] for i, kind in enumerate(kinds)})
    source = Constraint({"json": schema}, Limits()).source()
    made, right = Language(source, VOCABULARY), {f"p{i}": RIGHT[kind][0] for i, kind in enumerate(kinds)}
    right |= {f"p{i}": "short" for i in range(4, 20, 4)}
    assert accepts(made, json.dumps(right, ensure_ascii=False))
    for i in range(4):
        assert not accepts(made, json.dumps(right | {f"p{i}": RIGHT[kinds[i]][1]}, ensure_ascii=False))


def test_twenty_texts_of_two_thousand_characters_may_be_full():
    names = [f"p{i}" for i in range(20)]
    made = Language(
        Constraint({"json": thing(dict.fromkeys(names, KINDS["texts"]))}, Limits()).source(), VOCABULARY
    )
    assert accepts(made, json.dumps(dict.fromkeys(names, "a" * 2000)))


def beside_any(number):
    """Return a schema of optional properties of several kinds beside one of any value."""
    kinds = [
        {"type": "string"},
        {"type": "integer"},
        {"enum": ["a", "ab"]},
        {"type": "string", "pattern": "^b*$"},
    ]
    its = {f"p{i}": kinds[i % 4] for i in range(number)} | {"extra": {}}
    return {"type": "object", "properties": its, "additionalProperties": False}


def test_many_optional_properties_beside_any_value_take_work_by_their_number(monkeypatch):
    """Large parts that must be divided are told without a machine, and each half is written once."""
    made = []

    def counted(*args):
        made.append(byte_machine(*args))
        return made[-1]

    monkeypatch.setattr(lexemes, "byte_machine", counted)
    few, many = (
        (len(Constraint({"json": beside_any(number)}, Limits()).source()), len(made)) for number in (20, 60)
    )
    states = [len(machine.steps) for machine in made]
    assert many[0] < 3.5 * few[0]
    assert sum(states[few[1] :]) < 3.5 * sum(states[: few[1]])
    assert max(states) < 100  # that of one property


def test_optional_properties_beside_any_value_are_divided_exactly():
    schema = beside_any(24)
    made = Language(Constraint({"json": schema}, Limits()).source(), VOCABULARY)
    want = byte_machine(schema_node(schema, levels=1), Limits(max_states=20_000))
    rng = random.Random(0)
    values = {0: ['""', '"x,"'], 1: ["0", "12", "-7"], 2: ['"a"', '"ab"'], 3: ['"bb"', '""']}
    texts = []
    for _ in range(40):
        its = [i for i in range(25) if rng.random() < rng.choice([0.1, 0.5, 1])]
        parts = [f'"p{i}":{rng.choice(values[i % 4])}' if i < 24 else '"extra":5e3' for i in its]
        texts.append("{" + rng.choice([",", " , "]).join(parts) + "}")
        if len(parts) > 1:
            at = rng.randrange(len(parts) - 1)
            parts[at : at + 2] = rng.choice([[parts[at + 1], parts[at]], parts[at : at + 1] * 2, [""]])
            texts.append("{" + ",".join(parts) + "}")
    valid = {text for text in texts if matches(want, text)}
    assert 30 < len(valid) < len(texts) - 15
    assert [text for text in texts if accepts(made, text) != (text in valid)] == []


def test_a_name_with_escapes_bypasses_no_type():
    """Another spelling of a name is no other name, which `additionalProperties` would allow."""
    named = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    beside = {"type": "object", "properties": {"d": named, "x": {}}, "required": ["d"]}
    made = Language(Constraint({"json": beside}, Limits()).source(), VOCABULARY)
    texts = [
        '{"d":{"a":1,"b":[{}]}}',
        '{"d":{"a":"x"}}',
        '{"d":{"\\u0061":"x"}}',
        '{"d":{"b":1,"\\u0061":"x"}}',
    ]
    assert [accepts(made, text) for text in texts] == [True, False, False, False]


@pytest.mark.parametrize("anything", [{}, {"$ref": "#"}])
def test_a_hundred_optional_properties_beside_any_value_are_followed(anything):
    names = {f"p{i}": {"type": "integer"} for i in range(100)}
    schema = {"type": "object", "properties": names | {"x": anything}, "additionalProperties": False}
    made = Language(Constraint({"json": schema}, Limits()).source(), VOCABULARY)
    some = {f"p{i}": i for i in range(0, 100, 7)} | {"x": {"p1": 1, "x": {"p2": 2}}}
    right = json.dumps(some, separators=(",", ":"))
    assert accepts(made, right)
    assert not accepts(made, right.replace('"p98":98', '"p98":"a"'))


def test_a_list_of_two_thousand_items_has_no_item_more():
    beside = {
        "type": "object",
        "properties": {"d": {"type": "array", "items": {"const": 1}, "maxItems": 2000}, "x": {}},
        "required": ["d"],
    }
    made = Language(Constraint({"json": beside}, Limits()).source(), VOCABULARY)
    texts = ['{"d":[' + ",".join("1" * number) + "]}" for number in (2000, 2001)]
    assert [accepts(made, text) for text in texts] == [True, False]


def test_properties_that_are_too_few_are_no_text():
    """The last property alone is fewer than `minProperties`, where nothing can follow it."""
    few = {name: {"const": 1} for name in "abc"}
    thing = {"type": "object", "properties": few, "minProperties": 2, "additionalProperties": False}
    schema = {"type": "array", "items": {"anyOf": [thing, {"type": "array", "items": {"$ref": "#"}}]}}
    made = Language(Constraint({"json": schema}, Limits()).source(), VOCABULARY)
    texts = ['[{"c":1}]', '[{"a":1}]', "[{}]", '[{"a":1,"c":1}]', '[{"b":1,"c":1}]']
    assert [accepts(made, text) for text in texts] == [False, False, False, True, True]
