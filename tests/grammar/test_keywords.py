"""Each keyword of JSON Schema is served exactly, or refused in one sentence at the door."""

import json
from pathlib import Path

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY

from jaxpaged.grammar.compile import Constraint
from jaxpaged.grammar.deterministic import matches
from jaxpaged.grammar.formats import FORMATS
from jaxpaged.grammar.machine import byte_machine
from jaxpaged.grammar.nodes import GrammarError, Limits
from jaxpaged.grammar.schema import schema_node
from tests.grammar.keywords import CHAPTERS, Refused, table
from tests.grammar.languages import VOCABULARY

CASES = {name: case for cases in CHAPTERS.values() for name, case in cases.items()}
GUIDE = Path(__file__).parents[2] / "docs/guides/structured.md"


def compiled(schema):
    constraint = Constraint({"json": schema}, Limits())
    return constraint.source() or constraint.automaton(VOCABULARY)


def is_valid(schema, text):
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_keyword_is_served_exactly_or_refused_in_one_sentence(chapter):
    for name, case in CHAPTERS[chapter].items():
        if isinstance(case, Refused):
            with pytest.raises(GrammarError) as problem:
                compiled(case.schema)
            assert case.sentence in str(problem.value), name
            assert "\n" not in str(problem.value), name
            continue
        machine = byte_machine(schema_node(case.schema), Limits())
        written = json.dumps(json.loads(case.valid), ensure_ascii=False)
        assert matches(machine, case.valid) or matches(machine, written), name
        assert not matches(machine, case.invalid), name
        if chapter != "formats":
            assert is_valid(case.schema, case.valid), name


def test_the_table_has_all_keywords_and_formats_and_stands_in_the_guide():
    pages = [REGISTRY.contents(name) for name in REGISTRY if "draft/2020-12/meta/" in name]
    names = {name for page in pages for name in page.get("properties", {})}
    assert len(names) > 50
    assert names - {"format"} <= CASES.keys()
    assert {f"format: {name}" for name in FORMATS if name[:4] != "uuid"} <= CASES.keys()
    assert table() in GUIDE.read_text()
