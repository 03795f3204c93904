"""Recursive grammars: llguidance's masks are the oracle's, by a documented rule, and what is refused."""

import json

import numpy as np
import pytest

from jaxpaged.grammar import recursive
from jaxpaged.grammar.automaton import TokenAutomaton
from jaxpaged.grammar.compile import Constraint
from jaxpaged.grammar.lark import lark_of
from jaxpaged.grammar.nodes import GrammarError, Limits, LostError
from jaxpaged.grammar.recursive import EVERY_TOKEN, Language
from jaxpaged.grammar.rules import Rules
from jaxpaged.grammar.schema import schema_node
from jaxpaged.grammar.structural_tag import read_structural_tag
from jaxpaged.grammar.vocabulary import TokenBytes
from jaxpaged.grammar.worker import Worker
from tests.grammar.languages import VOCABULARY, accepts
from tests.tiny_recursive import CASES, LISTS, SUM, TOKENS, language, oracle

pytest.importorskip("llguidance")


@pytest.mark.parametrize("name", CASES)
def test_masks_are_the_oracles_behind_random_answers(name):
    want, rng = oracle(name), np.random.default_rng(1)
    for _ in range(12):
        matcher, answer = language(name).matcher(), []
        for _ in range(25):
            copy = matcher.copy()
            allowed = {*matcher.allowed().nonzero()[0].tolist()}
            assert allowed == want.allowed(answer), answer
            barred = int(rng.choice([*{*range(len(TOKENS.raw))} - allowed]))
            assert not copy.advance(barred)
            answer.append(int(rng.choice([*allowed])))
            assert matcher.advance(answer[-1])
            assert want.stacks(answer)


def source(**fields):
    return Constraint(fields, Limits()).source()


def tag(schema, end=";", **more):
    """Return a structural tag with two tags behind one trigger, of which one follows a schema."""
    tags = [("<a=1>", schema, "</a>"), ("<a=2>", {"enum": [1, 12]}, end), ("[", {"type": "null"}, "]")]
    parts = [
        {"begin": begin, "content": {"type": "json_schema", "json_schema": its}, "end": end}
        for begin, its, end in tags
    ]
    return {"format": {"type": "triggered_tags", "triggers": ["<a=", "["], "tags": parts, **more}}


DEEP = "[" * 9 + "]" * 9
# Constraints whose values have any depth, each with a text that may be written, and one that may not.
ANY_DEPTH = [
    ({"json_object": True}, '{"a": ' * 9 + "[]" + "}" * 9, DEEP),
    ({"json": {}}, DEEP, DEEP + "]"),
    ({"json": "true"}, '[{"a": {"b": [[[[1]]]]}}]', "[[[[[["),
    (
        {"json": {"type": "object", "properties": {"a": {"type": "array"}}}},
        '{"a": ' + DEEP + "}",
        '{"b": 1}',
    ),
    ({"structural_tag": json.dumps(tag(LISTS))}, f"a[null]<a=1>{DEEP}</a>b", f"<a=1>{DEEP}"),
    ({"structural_tag": json.dumps(tag({}, at_least_one=True))}, f"<a=1>{DEEP}</a>", "a"),
]


@pytest.mark.parametrize(("fields", "deep", "barred"), ANY_DEPTH, ids=range(len(ANY_DEPTH)))
def test_values_of_any_depth_are_written_and_are_json(fields, deep, barred):
    made, rng = Language(source(**fields), VOCABULARY), np.random.default_rng(0)
    assert follows(made, deep)
    assert not follows(made, barred)
    answers = [random_answer(made, rng) for _ in range(20)]
    assert any(answers)
    for answer in answers if "structural_tag" not in fields else ():
        json.loads(answer or "0")


def follows(language, text):
    """Check whether a text, in tokens of one byte, may be written and may end."""
    matcher = language.matcher()
    one = {raw: token for token, raw in enumerate(VOCABULARY.raw)}
    return all(matcher.advance(one[bytes([byte])]) for byte in text.encode()) and bool(
        matcher.allowed()[VOCABULARY.eos_ids[0]]
    )


def random_answer(language, rng, most=60):
    """Write an answer by the masks; None if it is too long."""
    matcher, text = language.matcher(), b""
    for _ in range(most):
        token = int(rng.choice(np.flatnonzero(matcher.allowed())))
        if token in VOCABULARY.eos_ids:
            return text.decode()
        assert matcher.advance(token)
        text += VOCABULARY.raw[token]
    return None


@pytest.mark.parametrize("more", [{}, {"at_least_one": True}, {"stop_after_first": True}], ids=str)
def test_a_structural_tag_has_the_masks_of_its_automaton(more):
    """A tag that has both: what llguidance allows behind random answers is what the automaton does."""
    value = json.dumps(tag({"type": "boolean"}, end="", **more))
    fields = {"structural_tag": value}
    rules = Rules(read_structural_tag(value).node(schema_node), {})
    theirs = Language(lark_of(rules) + EVERY_TOKEN, VOCABULARY)
    ours, rng = Constraint(fields, Limits()).automaton(VOCABULARY), np.random.default_rng(1)
    marks = [token for token, raw in enumerate(VOCABULARY.raw) if raw and raw in b"<a=12>[]null</a>true"]
    for _ in range(30):
        matcher, state = theirs.matcher(), ours.start
        for _ in range(14):
            allowed = ours.allowed(state)
            assert (matcher.allowed() == allowed).all()
            likely = [token for token in marks if allowed[token]]
            from_all = np.flatnonzero(allowed)
            token = int(rng.choice(likely if likely and rng.random() < 0.9 else from_all))
            if token in VOCABULARY.eos_ids:
                break
            assert matcher.advance(token)
            state = ours.step(state, token)


def test_only_what_has_any_depth_goes_to_llguidance():
    assert source(grammar=SUM) is not None
    assert source(json=json.dumps(LISTS)) is not None
    ref = {"$ref": "#/$defs/a"}
    assert source(json={"properties": {"a": ref}, "$defs": {"a": {"items": ref}}}) is not None
    for fields, *_ in ANY_DEPTH:
        assert source(**fields) is not None
        assert source(**fields, max_depth=3) is None
    # An automaton says these; or llguidance does not read them as we do.
    stay = [
        {"regex": "a*"},
        {"json": {"type": "array", "items": ref, "$defs": {"a": {"type": "null"}}}},
        {"structural_tag": json.dumps(tag({"type": "null"}))},
        {"structural_tag": json.dumps(tag(LISTS | {"uniqueItems": True}))},
        {"json": {"type": "null", "$defs": {"a": {"items": ref}}}},
        {"json": LISTS | {"contains": {"const": []}}},
        {"json": LISTS | {"uniqueItems": True}},
        {"json": LISTS | {"not": {"const": []}}},
    ]
    assert [source(**fields) for fields in stay] == [None] * len(stay)


def test_without_llguidance_a_schema_goes_some_levels_deep_and_a_grammar_is_refused(monkeypatch):
    monkeypatch.setattr(recursive, "is_installed", lambda: False)
    assert source(json=LISTS) is None
    made = Constraint({"json": LISTS}, Limits()).automaton(VOCABULARY)
    assert [accepts(made, VOCABULARY, "[" * depth + "]" * depth) for depth in (4, 6)] == [True, False]
    with pytest.raises(GrammarError, match=r"needs llguidance: pip install 'jaxpaged\[structured\]'"):
        source(grammar=SUM)


def test_what_cannot_be_followed_is_refused_in_a_process_of_its_own():
    """A grammar that breaks llguidance ends the process, and the next one is read in another."""
    worker, rules = Worker(TOKENS, Limits()), "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(3000))
    try:
        for grammar, why in (
            ('%llguidance {"no_forcing": false}\nstart: "1"', "%llguidance: its options must be ours"),
            ("start: one", r"'at 1\(8\): unknown name: \"one\"'$"),
            ('root ::= "1', 'line 1: " is missing'),
            ("start: start", "no text is in it"),
            ("start: <|end|>", "special token prefix'$"),
            (rules + 'start: r0\nr3000: "1"', "nested too deep: its reader ended by SIGSEGV"),
            ("x" * 2**19, "must have at most"),
        ):
            with pytest.raises(GrammarError, match=why):
                worker.compile({"grammar": grammar})
        assert worker.compile({"grammar": SUM}) == source(grammar=SUM)
        # A schema that llguidance refuses has our reader's sentence.
        endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
        with pytest.raises(GrammarError, match="schema at"):
            worker.compile({"json": endless})
        made = worker.compile({"json": {"type": "array", "items": {"enum": [[], None]}, "maxItems": 1}})
        assert isinstance(made, TokenAutomaton)
    finally:
        worker.close()


def test_an_answer_that_no_token_can_continue_is_lost():
    tokens = TokenBytes((b"", b"a", b"b"), (0,))
    matcher = recursive.Language(source(grammar='start: "a" start "c" | "b"'), tokens).matcher()
    assert matcher.advance(1)
    assert matcher.advance(2)
    with pytest.raises(LostError, match="no token of the vocabulary can continue it"):
        matcher.allowed()


def test_a_used_up_lexer_ends_no_answer_but_one_that_is_too_long_by_itself(monkeypatch):
    """Answers have states of their own: one lexer has room for two of them, and for no long one."""
    monkeypatch.setitem(recursive.BOUNDS, "max_lexer_states", 150)
    short = " | ".join(f"/{letter}[ab]{{0,50}}/" for letter in "acegi")
    made = Language(source(grammar=f"start: {short} | /k[ab]{{0,400}}/"), VOCABULARY)
    one = {raw: token for token, raw in enumerate(VOCABULARY.raw) if len(raw) == 1}
    matchers = {letter: made.matcher() for letter in "acegi"}
    long = made.matcher()
    for i in range(50):
        for letter, matcher in [*matchers.items(), *([("k", long)] if i == 0 else [])]:
            assert matcher.allowed()[one[b"a"]]
            assert not matcher.copy().advance(one[b"z"])
            assert matcher.advance(one[letter.encode() if i == 0 else b"a"])
    why, count = lost(long, one[b"b"])
    assert why == "it needs a lexer of more than 150 states"
    again = made.matcher()
    assert again.advance(one[b"k"])
    assert lost(again, one[b"b"]) == (why, count), "the same answer ends in the same place"


def lost(matcher, token):
    """Write a token again and again, which must be allowed. Return why that ends, and after how many."""
    for count in range(401):
        try:
            assert matcher.allowed()[token]
            assert matcher.advance(token)
        except LostError as error:
            return str(error), count
    raise AssertionError("it does not end")


def test_more_places_than_the_parser_may_have_end_the_answer_and_schemas_of_many_names_are_followed():
    ambiguous = Language(source(grammar="start: s\ns: s s | /[a-z]/\n"), VOCABULARY).matcher()
    assert "Current row has" in lost(ambiguous, VOCABULARY.raw.index(b"a"))[0]
    names = {f"p{i}": {"type": "string"} for i in range(20)} | {"extra": {}}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    assert follows(Language(source(json=schema), VOCABULARY), '{"p0": "a", "p19": "b", "extra": [{}]}')
    with pytest.raises(GrammarError, match="Current row has"):  # it is tried before it is taken
        Language(source(grammar="start: " + " ".join(f'"{i}"?' for i in range(500))), VOCABULARY).try_out()


def test_a_vocabulary_without_an_end_has_masks_too():
    matcher = recursive.Language(source(grammar=SUM), TokenBytes(TOKENS.raw, ())).matcher()
    assert matcher.allowed().nonzero()[0].tolist() == sorted(oracle("sum").allowed([]))
