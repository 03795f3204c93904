"""Recursive grammars: llguidance's masks are the oracle's, by a documented rule, and what is refused."""

import json

import numpy as np
import pytest

from jaxpaged.grammar import recursive
from jaxpaged.grammar.automaton import TokenAutomaton
from jaxpaged.grammar.compile import compile_constraint, recursive_source
from jaxpaged.grammar.nodes import GrammarError, Limits
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
    return recursive_source(fields, Limits())


def test_only_what_refers_to_itself_goes_to_llguidance():
    assert source(grammar=SUM) is not None
    assert source(json=json.dumps(LISTS)) is not None
    ref = {"$ref": "#/$defs/a"}
    assert source(json={"properties": {"a": ref}, "$defs": {"a": {"items": ref}}}) is not None
    # An automaton says these; or any value, to some levels; or llguidance does not read them as we do.
    stay = [
        {"json_object": True},
        {"regex": "a*"},
        {"json": {"type": "array", "items": ref, "$defs": {"a": {"type": "null"}}}},
        {"json": {}},
        {"json": {"type": "null", "$defs": {"a": {"items": ref}}}},
        {"json": LISTS | {"contains": {"const": []}}},
        {"json": LISTS | {"uniqueItems": True}},
        {"json": LISTS | {"not": {"const": []}}},
        {"json": LISTS, "whitespace_pattern": " ?"},
    ]
    assert [source(**fields) for fields in stay] == [None] * len(stay)


def test_without_llguidance_a_schema_goes_some_levels_deep_and_a_grammar_is_refused(monkeypatch):
    monkeypatch.setattr(recursive, "is_installed", lambda: False)
    assert source(json=LISTS) is None
    made = compile_constraint({"json": LISTS}, VOCABULARY, Limits())
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
            ('root ::= "1', "Unexpected end"),
            ("start: start", "no text is in it"),
            ("start: <|end|>", "special token prefix'$"),
            (rules + 'start: r0\nr3000: "1"', "took more"),
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


def test_an_answer_that_no_token_can_continue_may_end():
    tokens = TokenBytes((b"", b"a", b"b"), (0,))
    matcher = recursive.Language(source(grammar='start: "a" start "c" | "b"'), tokens).matcher()
    assert matcher.advance(1)
    assert matcher.advance(2)
    assert matcher.allowed().tolist() == [True, False, False]
    assert matcher.advance(0)
    assert not matcher.copy().advance(2)
    assert matcher.advance(0)


def test_a_vocabulary_without_an_end_has_masks_too():
    matcher = recursive.Language(source(grammar=SUM), TokenBytes(TOKENS.raw, ())).matcher()
    assert matcher.allowed().nonzero()[0].tolist() == sorted(oracle("sum").allowed([]))
