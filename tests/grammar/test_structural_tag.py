"""Structural tags, against Python's `re` with a look ahead, which no automaton has."""

import json
import re

import numpy as np
import pytest

from jaxpaged.grammar.compile import Constraint
from jaxpaged.grammar.nodes import GrammarError, Limits
from tests.grammar.languages import VOCABULARY, accepts, write

A = {"begin": "<a=1>", "schema": {"enum": [1, 20]}, "end": "</a>"}
B = {"begin": "<a=é", "schema": {"type": "null"}, "end": ""}
C = {"begin": "[[", "schema": {"const": [[]]}, "end": "]"}
TRIGGERS = ["<a=", "[["]
FREE = r"(?:(?!<a=|\[\[).)*"
TAG = r"(?:<a=1>(?:1|20)</a>|<a=énull|\[\[\[\[\]\]\])"


def compiled(value):
    return Constraint({"structural_tag": json.dumps(value)}, Limits()).automaton(VOCABULARY)


def triggered(**options):
    tags = [
        {
            "begin": tag["begin"],
            "content": {"type": "json_schema", "json_schema": tag["schema"]},
            "end": tag["end"],
        }
        for tag in (A, B, C)
    ]
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": TRIGGERS, "tags": tags, **options},
    }


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        ({"structures": [A, B, C], "triggers": TRIGGERS}, f"(?:{FREE}{TAG})*{FREE}"),
        (triggered(), f"(?:{FREE}{TAG})*{FREE}"),
        (triggered(at_least_one=True), f"(?:{FREE}{TAG})+{FREE}"),
        (triggered(stop_after_first=True), f"{FREE}(?:{TAG})?"),
        (triggered(at_least_one=True, stop_after_first=True), FREE + TAG),
    ],
    ids=["structures", "triggered", "one", "first", "one_first"],
)
def test_what_may_be_written(value, pattern):
    made = compiled(value)
    rng = np.random.default_rng(0)
    pieces = [
        "<",
        "<a",
        "<a=",
        "<a=1>1</a>",
        "<a=1>20</a>",
        "<a=énull",
        "[",
        "[[",
        "[[[[]]]",
        "]",
        "é",
        "=",
        "x\n",
    ]
    texts = ["".join(rng.choice(pieces, rng.integers(5))) for _ in range(400)]
    expected = [re.fullmatch(pattern, text, re.DOTALL) is not None for text in texts]
    assert 20 < sum(expected) < 380
    assert [accepts(made, VOCABULARY, text) for text in texts] == expected
    answers = [write(made, VOCABULARY, rng) for _ in range(5)]
    assert all(re.fullmatch(pattern, answer, re.DOTALL) for answer in answers if answer is not None)


@pytest.mark.parametrize(
    ("value", "path", "why"),
    [
        (
            {"structures": [A, {"begin": "<b>", "schema": {}, "end": ""}], "triggers": TRIGGERS},
            "#/structures/1",
            "'<b>'",
        ),
        ({"structures": [{"begin": "<a="}], "triggers": TRIGGERS}, "#/structures/0", "begin, schema and end"),
        ({"structures": [A], "triggers": [""]}, "#/triggers", "texts"),
        ({"structures": [], "triggers": TRIGGERS}, "#", "1 to 256"),
        ({"format": {"type": "sequence", "elements": []}}, "#", "type='sequence'"),
        (triggered(at_least_one=1), "#", "at_least_one=1"),
        ([1], "#", "must have structures"),
        ({"format": 3}, "#", "format=3"),
        ({"structures": [A | {"schema": {"not": {}}}], "triggers": TRIGGERS}, "#", "no value is valid"),
    ],
)
def test_a_refusal_names_its_place(value, path, why):
    with pytest.raises(GrammarError) as caught:
        compiled(value)
    assert caught.value.path == path
    assert why in str(caught.value)
