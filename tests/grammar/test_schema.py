"""JSON schemas: what is written is valid, what is valid in our form may be written, the rest is refused."""

import contextlib
import json
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from jaxpaged.grammar.compile import Constraint
from jaxpaged.grammar.nodes import GrammarError, Limits, NotRegularError
from jaxpaged.grammar.regex import parse_regex
from jaxpaged.grammar.schema import Style, schema_node
from tests.grammar import official, random_schemas, schema_cases
from tests.grammar.languages import VOCABULARY, accepts, automaton, compare, language, write

Validator = jsonschema.Draft202012Validator
ROOT = Path(__file__).parents[2]
OFFICIAL = json.loads(official.FILE.read_text())


def validator(schema):
    return Validator(schema, format_checker=Validator.FORMAT_CHECKER)


def compiled(schema, **fields):
    return Constraint({"json": json.dumps(schema), **fields}, Limits()).automaton(VOCABULARY)


def is_valid(schema, text):
    try:
        return validator(schema).is_valid(json.loads(text))
    except ValueError:
        return False


@pytest.mark.parametrize("chapter", schema_cases.CASES)
def test_a_chapter(chapter):
    for schema, written, others in schema_cases.CASES[chapter]:
        made = compiled(schema)
        assert [text for text in written if not is_valid(schema, text)] == []
        assert [text for text in written if not accepts(made, VOCABULARY, text)] == [], schema
        assert [text for text in others if accepts(made, VOCABULARY, text)] == [], schema


def test_what_is_narrower_than_its_schema():
    for schema, texts in schema_cases.NARROWER:
        made = compiled(schema)
        assert all(is_valid(schema, text) for text in texts)
        assert not any(accepts(made, VOCABULARY, text) for text in texts), schema


def assert_answers_are_valid(schema, rng, num_answers=2):
    made = compiled(schema)
    answers = [write(made, VOCABULARY, rng) for _ in range(num_answers)]
    for answer in answers:
        if answer is not None:
            validator(schema).validate(json.loads(answer))
    return sum(answer is not None for answer in answers)


def test_answers_parse_and_are_valid():
    rng = np.random.default_rng(0)
    schemas = [case[0] for cases in schema_cases.CASES.values() for case in cases]
    schemas += [schema_cases.random_schema(rng) for _ in range(12)]
    ended = [assert_answers_are_valid(schema, rng) for schema in schemas]
    assert np.mean(np.array(ended) > 0) > 0.9


@pytest.mark.slow
def test_answers_of_many_random_schemas_are_valid():
    rng = np.random.default_rng(1)
    ended = [assert_answers_are_valid(schema_cases.random_schema(rng), rng, 3) for _ in range(300)]
    assert np.mean(np.array(ended) > 0) > 0.9


def test_no_token_is_barred_that_a_valid_text_begins_with():
    """The oracle follows bytes by derivatives, and knows neither machines nor tables."""
    rng = np.random.default_rng(2)
    for seed in range(6):
        schema = schema_cases.random_schema(rng, 2)
        node = schema_node(schema)
        compare(automaton(node), language(node), seed=seed, num_walks=1, length=16)


@pytest.mark.parametrize(("schema", "path", "why"), schema_cases.REFUSED)
def test_a_refusal_names_its_place(schema, path, why):
    with pytest.raises(GrammarError) as caught:
        compiled(schema)
    assert why in str(caught.value)
    assert caught.value.path == path


@pytest.mark.slow
@pytest.mark.parametrize("schema", schema_cases.BOMBS, ids=range(len(schema_cases.BOMBS)))
def test_a_bomb_is_refused_within_seconds(schema):
    began = time.process_time()
    with pytest.raises(GrammarError):
        compiled(schema)
    assert time.process_time() - began < 5


def test_white_space_is_as_asked():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"const": 1}}},
        "required": ["a"],
    }
    texts = ('{"a": [1, 1]}', '{"a":[1,1]}', '{ "a" : [1\n,1]}', '{"a":_[1,_1]}')
    asked = ({"disable_any_whitespace": True}, {}, {"whitespace_pattern": "_?"})
    written = [[accepts(compiled(schema, **fields), VOCABULARY, text) for text in texts] for fields in asked]
    assert written == [[True, False, False, False], [True, True, True, False], [False, True, False, True]]
    closed = compiled(
        {"type": "object", "additionalProperties": {"const": 1}}, disable_additional_properties=True
    )
    assert accepts(closed, VOCABULARY, "{}")
    assert not accepts(closed, VOCABULARY, '{"a":1}')


def test_what_is_recursive_goes_some_levels_deep():
    schema = schema_cases.CASES["$ref, $defs"][1][0]
    made = compiled(schema)
    assert [accepts(made, VOCABULARY, "[" * depth + "]" * depth) for depth in (1, 4, 5)] == [
        True,
        True,
        False,
    ]
    [(first, levels), *_] = Constraint({"json_object": True}, Limits()).nodes()
    assert levels == 4
    given = {"json_object": True, "max_depth": 7}
    assert [levels for _, levels in Constraint(given, Limits()).nodes()] == [7]
    assert language(first) != language(schema_node({"type": "object"}, Style(is_compact=True), 4))
    assert language(parse_regex("a")) == language(parse_regex("(?:a)"))


def test_random_schemas_raise_nothing_else():
    """Parts of schemas in wrong places end as a refusal, never as another error."""
    rng = np.random.default_rng(3)
    keys = sorted(
        {
            key
            for cases in schema_cases.CASES.values()
            for case in cases
            if case[0] is not True
            for key in case[0]
        }
    )
    values = [
        None,
        -1,
        1.5,
        "a",
        [],
        {},
        [1],
        {"a": 1},
        True,
        "#",
        ["a"],
        {"a": {"type": "null"}},
        10**30,
        "object",
    ]
    for _ in range(300):
        schema = {str(key): values[rng.integers(len(values))] for key in rng.choice(keys, 3)}
        schema |= (
            {"type": str(rng.choice(["object", "array", "string", "integer"]))} if rng.random() < 0.7 else {}
        )
        with contextlib.suppress(GrammarError):
            schema_node(schema)


def assert_official(case):
    made, _ = official.machine(case["schema"])
    assert [value for value in case["valid"] if not official.is_accepted(made, value)] == [], case["schema"]
    assert [value for value in case["invalid"] if official.is_accepted(made, value)] == [], case["schema"]


def test_official_cases_of_bounded_schemas():
    """Every valid value of the official suite may be written, and no invalid one."""
    cases = [case for cases in OFFICIAL["chapters"].values() for case in cases if not case["deep"]]
    assert len(cases) > 60
    for case in cases:
        assert_official(case)


@pytest.mark.nightly
def test_official_cases_of_all_other_schemas():
    for cases in OFFICIAL["chapters"].values():
        for case in cases:
            if case["deep"]:
                assert_official(case)


def followed(seed):
    """Return a random schema of combinations, and its machine; None if it is not followed."""
    schema = official.opened(random_schemas.combined(np.random.default_rng(seed)))
    try:
        return schema, *official.machine(schema)
    except NotRegularError:
        return None
    except GrammarError as problem:
        if "cannot be met" not in str(problem):
            raise
        return schema, None, False


def assert_agrees(seeds) -> int:
    """Check that values may be written exactly if they are valid; return the schemas that were followed."""
    made = [found for seed in seeds if (found := followed(seed)) is not None]
    for schema, machine, _ in made:
        valid = [value for value in random_schemas.VALUES if Validator(schema).is_valid(value)]
        written = [value for value in random_schemas.VALUES if official.is_accepted(machine, value)]
        assert valid == written, schema
    return len(made)


def test_values_are_written_exactly_if_they_are_valid():
    assert assert_agrees(range(60)) > 30


@pytest.mark.slow
def test_values_of_many_random_schemas_are_written_exactly_if_they_are_valid():
    assert assert_agrees(range(60, 700)) > 300


@pytest.mark.slow
def test_answers_of_random_combinations_are_valid():
    """Answers are validated by jsonschema, which reads numbers as doubles."""
    rng = np.random.default_rng(4)
    schemas = [found[0] for seed in range(150) if (found := followed(seed)) and found[1] and not found[2]]
    ended = [assert_answers_are_valid(schema, rng, 3) for schema in schemas]
    assert len(schemas) > 40
    assert np.mean(np.array(ended) > 0) > 0.9


def test_the_table_of_chapters_is_that_of_the_cases():
    assert official.table(OFFICIAL) in (ROOT / "docs/concepts/grammars.md").read_text()
