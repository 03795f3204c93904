"""Official cases of JSON Schema's draft 2020-12, and the texts in which a value may be written.

`official_cases.json` holds the cases of the part that grammars follow, by chapters. To make it anew:

    pip download --no-deps --no-binary :all: jsonschema==4.26.0 && tar xf jsonschema-4.26.0.tar.gz
    python -m tests.grammar.official jsonschema-4.26.0/json
"""

import itertools
import json
import sys
from decimal import Decimal
from pathlib import Path

from jaxpaged.grammar.deterministic import matches
from jaxpaged.grammar.machine import byte_machine
from jaxpaged.grammar.nodes import GrammarError, Limits, NotRegularError
from jaxpaged.grammar.places import UnmetError
from jaxpaged.grammar.schema import schema_node

FILE = Path(__file__).parent / "official_cases.json"
LEVELS = 2
CLOSING = ("unevaluatedItems", "unevaluatedProperties")


def opened(schema):
    """Return an equal schema that says where properties may be others than the declared ones."""
    if isinstance(schema, list):
        return [opened(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: part if key in ("enum", "const") else opened(part) for key, part in schema.items()}
    if any(isinstance(made.get(key), dict) for key in ("properties", "patternProperties")):
        made.setdefault("additionalProperties", True)
    return made


def texts(value) -> list[str]:
    """Return the texts of a value, by the order of properties and the ways to write whole numbers."""
    match value:
        case dict():
            names = {key: json.dumps(key, ensure_ascii=False) for key in value}
            parts = [[f"{names[key]}: {its}" for its in texts(value[key])] for key in value]
            orders = itertools.permutations(parts) if len(parts) < 6 else [parts]
            return [f"{{{', '.join(its)}}}" for order in orders for its in itertools.product(*order)]
        case list():
            return [f"[{', '.join(its)}]" for its in itertools.product(*map(texts, value))]
        case float():
            return [
                json.dumps(value),
                f"{Decimal(repr(value)):f}",
                *([str(int(value))] if value.is_integer() else []),
            ]
    return [json.dumps(value, ensure_ascii=False)]


def machine(schema, levels=LEVELS):
    """Return the machine of a schema, None if nothing is valid, and whether it goes some levels deep."""
    try:
        return byte_machine(schema_node(schema), Limits()), False
    except UnmetError:
        return None, False
    except NotRegularError as problem:
        if not problem.is_recursive:
            raise
    return byte_machine(schema_node(schema, levels=levels), Limits()), True


def is_accepted(made, value) -> bool:
    return made is not None and any(matches(made, text) for text in texts(value))


def table(cases) -> str:
    """Return the table of chapters for the documentation."""
    lines = [
        "| chapter | followed | refused | valid | invalid | narrower |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in sorted({*cases["chapters"], *cases["refused"]}):
        its = cases["chapters"].get(name, [])
        counts = (sum(len(case[kind]) for case in its) for kind in ("valid", "invalid", "narrower"))
        lines.append(
            f"| {name} | {len(its)} | {cases['refused'].get(name, 0)} | {' | '.join(map(str, counts))} |"
        )
    return "\n".join(lines)


def main(suite: Path) -> None:
    """Write the cases that are followed, with what is valid and not written, and how many are refused."""
    folder = suite / "tests" / "draft2020-12"
    chapters, refused = {}, {}
    for file in sorted([*folder.glob("*.json"), *(folder / "optional" / "format").glob("*.json")]):
        kept, others = [], 0
        for case in json.loads(file.read_text()):
            schema = case["schema"]
            is_closing = file.stem in CLOSING
            schema = schema if is_closing else opened(schema)
            try:
                made, is_deep = machine(schema)
            except GrammarError:
                others += 1
                continue
            found = {"schema": schema, "deep": is_deep, "valid": [], "invalid": [], "narrower": []}
            for test in case["tests"]:
                kind = "valid" if test["valid"] else "invalid"
                if kind == "valid" and not is_accepted(made, test["data"]):
                    kind = "narrower"
                found[kind].append(test["data"])
            kept.append(found)
        if kept:
            chapters[file.stem] = kept
        if others:
            refused[file.stem] = others
    head = {
        "source": "JSON-Schema-Test-Suite, draft 2020-12, as in the sources of jsonschema 4.26.0",
        "license": (suite / "LICENSE").read_text(),
        "refused": refused,
    }
    lines = [
        f"{json.dumps(name)}: [\n{',\n'.join(json.dumps(case, ensure_ascii=False) for case in cases)}\n]"
        for name, cases in chapters.items()
    ]
    text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    FILE.write_text(f'{text},\n"chapters": {{\n{",\n".join(lines)}\n}}\n}}\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
