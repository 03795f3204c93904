"""Each kind of value in each place: answers are valid, and what is valid may be written."""

import json
import re
import types

import hypothesis
import hypothesis_jsonschema._from_schema as drawing
import jsonschema
import numpy as np
import pytest
from hypothesis.internal.conjecture import utils
from hypothesis_jsonschema import from_schema

from jaxpaged.grammar.compile import Constraint
from jaxpaged.grammar.nodes import Limits
from jaxpaged.grammar.recursive import Language, is_installed
from tests.grammar import official, schema_cases
from tests.grammar.languages import VOCABULARY, write
from tests.grammar.own_schemas import SCHEMAS
from tests.marks import slow_and_nightly

Validator = jsonschema.Draft202012Validator
LEVELS = 4  # of values inside values, where they may be of any depth
# Values at the edges of the kinds of `own_schemas.VALUES`: what is not valid may not be written.
PROBES = [
    7,
    6,
    -1,
    101,
    1899,
    2101,
    0.3,
    999.5,
    None,
    True,
    "",
    "a",
    "too long a text",
    "AB-12",
    "2026-02-30",
]
PROBES += [[], [5], ["a", "a"], [1, True, 2], {}, {"x": 1}, {"x": 1, "y": 2, "z": 3}]
# One of 18 in `make test-all`: each kind of value once or twice, each place once or more.
SLOW = [*SCHEMAS][::17]


class Elements(utils.many):
    """Elements of a collection, as hypothesis-jsonschema 0.23 asks for them: by `more`."""

    left = None

    def more(self):
        if self.left is None:
            self.left = iter(self.__enter__())
        found = next(self.left, self) is not self
        if not found:
            self.__exit__(None)
        return found


@pytest.fixture(autouse=True)
def elements_by_more(monkeypatch):
    """Give hypothesis-jsonschema what newer versions of hypothesis have no more."""
    if not hasattr(utils.many, "more"):
        names = vars(utils) | {"many": Elements}
        monkeypatch.setattr(drawing, "cu", types.SimpleNamespace(**names))


def validator(schema):
    return Validator(schema, format_checker=Validator.FORMAT_CHECKER)


def test_there_are_many():
    assert len({json.dumps(schema) for schema in SCHEMAS.values()}) > 200


@pytest.mark.parametrize("name", slow_and_nightly(SCHEMAS, SLOW))
def test_answers_are_valid_and_what_is_valid_may_be_written(name):
    schema = SCHEMAS[name]
    made = Constraint({"json": json.dumps(schema)}, Limits()).automaton(VOCABULARY)
    rng = np.random.default_rng(0)
    answers = [answer for _ in range(4) if (answer := write(made, VOCABULARY, rng)) is not None]
    for answer in answers:
        validator(schema).validate(json.loads(answer))
    assert_all_may_be_written(schema)


def assert_all_may_be_written(schema, num_values=12):
    """Draw valid values by hypothesis-jsonschema, and check that the grammar has each."""
    machine, is_deep = official.machine(schema, LEVELS)

    @hypothesis.settings(
        max_examples=num_values,
        deadline=None,
        database=None,
        suppress_health_check=[*hypothesis.HealthCheck],
        derandomize=True,
    )
    @hypothesis.given(
        from_schema(older(schema), custom_formats={"uuid": hypothesis.strategies.uuids().map(str)})
    )
    def check(value):
        validator(schema).validate(value)
        hypothesis.assume(not is_deep or depth(value) < LEVELS)
        assert official.is_accepted(machine, in_order(value, order)), value

    order = [*declared(schema)]
    check()
    for value in PROBES:
        assert validator(schema).is_valid(value) or not official.is_accepted(machine, value), value


def declared(schema):
    """Yield the names of all declared properties, as they stand in a schema."""
    its = [*schema.values()] if isinstance(schema, dict) else schema if isinstance(schema, list) else []
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        yield from schema["properties"]
    for part in its:
        yield from declared(part)


def in_order(value, order):
    """Return a value with declared properties first, in their order: of many, no other order is tried."""
    match value:
        case dict():
            names = sorted(value, key=lambda name: order.index(name) if name in order else len(order))
            return {name: in_order(value[name], order) for name in names}
        case list():
            return [in_order(each, order) for each in value]
    return value


def older(schema):
    """Return an equal schema in the words of draft 7, for hypothesis-jsonschema. `\\d` is ASCII's digits;
    Python has more.
    """
    if isinstance(schema, list):
        return [older(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: part if key in ("enum", "const") else older(part) for key, part in schema.items()}
    if (first := made.pop("prefixItems", None)) is not None:
        made |= {"items": first, "additionalItems": made.get("items", True)}
    if isinstance(pattern := made.get("pattern"), str):
        made["pattern"] = pattern.replace(r"\d", "[0-9]")
    return made


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(40))
def test_what_is_valid_under_random_schemas_may_be_written(seed):
    schema = official.opened(schema_cases.random_schema(np.random.default_rng([5, seed])))
    assert_all_may_be_written(schema)


@pytest.mark.slow
def test_objects_of_any_depth_may_be_written_as_python_writes_them():
    """The matcher of `json_object` takes each object that hypothesis draws, byte by byte."""
    if not is_installed():
        pytest.skip("needs llguidance")
    source = Constraint({"json_object": True}, Limits()).source()
    language = Language(source, VOCABULARY)
    one = {raw: token for token, raw in enumerate(VOCABULARY.raw)}
    deepest = 0

    @hypothesis.settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @hypothesis.given(from_schema({"type": "object"}))
    def check(value):
        nonlocal deepest
        text, matcher = json.dumps(value, ensure_ascii=False), language.matcher()
        hypothesis.assume(not re.search(r"\de[+-]\d{3}", text))  # an exponent has one or two digits
        for byte in text.encode():
            token = one[bytes([byte])]
            assert matcher.allowed()[token], text
            assert matcher.advance(token)
        assert matcher.allowed()[list(VOCABULARY.eos_ids)].all()
        deepest = max(deepest, depth(value))

    check()
    assert deepest > 2


def depth(value):
    match value:
        case dict():
            return 1 + max(map(depth, value.values()), default=0)
        case list():
            return 1 + max(map(depth, value), default=0)
    return 0
