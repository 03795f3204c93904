"""Keywords of JSON Schema's draft 2020-12, each with a schema, a text of it, and one that is none.

`python -m tests.grammar.keywords` prints the table for the documentation.
"""

import json
from typing import Any, NamedTuple


class Served(NamedTuple):
    """A keyword that is served: a schema with it, a valid value that may be written, and an invalid text."""

    schema: Any
    valid: str
    invalid: str


class Refused(NamedTuple):
    """A keyword that is refused: a schema with it, and the sentence."""

    schema: Any
    sentence: str


def pair(**rules: Any) -> dict[str, Any]:
    """Return an object of two optional integers, with more rules."""
    whole = {"type": "integer"}
    return {"properties": {"a": whole, "b": whole}, "type": "object"} | rules


def whole(**rules: Any) -> dict[str, Any]:
    return {"type": "integer"} | rules


def array(**rules: Any) -> dict[str, Any]:
    return {"type": "array", "items": whole()} | rules


def string(**rules: Any) -> dict[str, Any]:
    return {"type": "string"} | rules


def annotated(name: str, value: Any) -> Served:
    return Served(whole(**{name: value}), "1", '"1"')


TRUE = {"type": "boolean"}
CORE = {
    "$schema": annotated("$schema", "https://json-schema.org/draft/2020-12/schema"),
    "$id": annotated("$id", "https://example.com/a"),
    "$comment": annotated("$comment", "text"),
    "$vocabulary": annotated("$vocabulary", {}),
    "$defs": Served({"$ref": "#/$defs/x", "$defs": {"x": TRUE}}, "true", "1"),
    "definitions": Served({"$ref": "#/definitions/x", "definitions": {"x": TRUE}}, "true", "1"),
    "$ref": Served({"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": TRUE}}, "[true]", "[1]"),
    "$anchor": Refused(
        {"$ref": "#x", "$defs": {"x": {"$anchor": "x"}}}, "schema at # has $ref='#x', must begin with #/"
    ),
    "$dynamicRef": Refused(
        {"$dynamicRef": "#x"}, "schema at # has no automaton: $dynamicRef is not followed"
    ),
    "$dynamicAnchor": Refused(whole(**{"$dynamicAnchor": "x"}), "$dynamicAnchor is not followed"),
    "$recursiveRef": Refused({"$recursiveRef": "#"}, "$recursiveRef is not followed"),
}
APPLICATORS = {
    "allOf": Served({"allOf": [whole(), {"minimum": 2}]}, "2", "1"),
    "anyOf": Served({"anyOf": [TRUE, {"const": 2}]}, "2", "3"),
    "oneOf": Served({"oneOf": [whole(minimum=2), whole(maximum=4)]}, "5", "3"),
    "not": Served(whole(**{"not": {"const": 2}}), "1", "2"),
    "if": Served(whole(**{"if": {"minimum": 5}, "then": {"multipleOf": 2}}), "6", "7"),
    "then": Served(whole(**{"if": {"const": 1}, "then": False}), "2", "1"),
    "else": Served(whole(**{"if": {"const": 1}, "else": {"minimum": 5}}), "1", "2"),
    "dependentSchemas": Served(pair(dependentSchemas={"a": {"required": ["b"]}}), '{"a":1,"b":1}', '{"a":1}'),
    "properties": Served(pair(), '{"a":1}', '{"a":""}'),
    "patternProperties": Served(
        {"type": "object", "patternProperties": {"^x": TRUE}, "additionalProperties": False},
        '{"xy":true}',
        '{"y":true}',
    ),
    "additionalProperties": Served(pair(additionalProperties=TRUE), '{"a":1,"c":true}', '{"c":1}'),
    "propertyNames": Served(
        {"type": "object", "additionalProperties": TRUE, "propertyNames": {"maxLength": 2}},
        '{"ab":true}',
        '{"abc":true}',
    ),
    "prefixItems": Served(
        {"type": "array", "prefixItems": [whole(), TRUE], "items": False}, "[1,true]", "[true]"
    ),
    "items": Served(array(), "[1,2]", '["1"]'),
    "contains": Served(array(contains={"const": 2}), "[1,2]", "[1]"),
    "unevaluatedItems": Served(
        {"type": "array", "prefixItems": [TRUE], "unevaluatedItems": False}, "[true]", "[true,1]"
    ),
    "unevaluatedProperties": Served(pair(unevaluatedProperties=False), '{"b":1}', '{"c":1}'),
    "additionalItems": Refused(array(additionalItems=False), "additionalItems is not followed"),
    "dependencies": Refused(pair(dependencies={"a": ["b"]}), "dependencies is not followed"),
}
VALIDATION = {
    "type": Served({"type": ["integer", "null"]}, "null", "true"),
    "enum": Served({"enum": [1, "x", None]}, '"x"', "2"),
    "const": Served({"const": "x"}, '"x"', '"y"'),
    "multipleOf": Served(whole(multipleOf=3), "9", "8"),
    "maximum": Served(whole(maximum=3), "-0", "4"),
    "exclusiveMaximum": Served(whole(exclusiveMaximum=3), "2", "3"),
    "minimum": Served(whole(minimum=-3), "-0", "-4"),
    "exclusiveMinimum": Served(whole(exclusiveMinimum=3), "4", "3"),
    "maxLength": Served(string(maxLength=2), '"🙂é"', '"abc"'),
    "minLength": Served(string(minLength=2), '"ab"', '"🙂"'),
    "pattern": Served(string(pattern="b$"), '"ab"', '"ba"'),
    "maxItems": Served(array(maxItems=1), "[1]", "[1,2]"),
    "minItems": Served(array(minItems=1), "[1]", "[]"),
    "uniqueItems": Served(
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "[2,1]", "[1,1]"
    ),
    "maxContains": Served(array(contains={"const": 2}, maxContains=1), "[2,1]", "[2,2]"),
    "minContains": Served(array(contains={"const": 2}, minContains=2), "[2,2]", "[2]"),
    "maxProperties": Served(pair(maxProperties=1), '{"b":1}', '{"a":1,"b":1}'),
    "minProperties": Served(pair(minProperties=1), '{"b":1}', "{}"),
    "required": Served(pair(required=["b"]), '{"b":1}', '{"a":1}'),
    "dependentRequired": Served(pair(dependentRequired={"a": ["b"]}), '{"b":1}', '{"a":1}'),
}
ANNOTATIONS = {
    name: annotated(name, value)
    for name, value in {
        **{"title": "x", "description": "x", "default": 2, "deprecated": True, "readOnly": True},
        **{"writeOnly": True, "examples": ["x"], "contentEncoding": "base64"},
        **{"contentMediaType": "text/plain", "contentSchema": False, "x-anything": 1},
    }.items()
} | {"unknown": Refused(whole(unknown=1), "schema at # has the keyword 'unknown', which is not supported")}
FORMATS = {
    f"format: {name}": Served(string(format=name), json.dumps(valid), json.dumps(invalid))
    for name, valid, invalid in (
        ("date", "2024-02-29", "2023-02-29"),
        ("time", "23:59:59Z", "23:59:60Z"),
        ("date-time", "2024-02-29T00:00:00Z", "2024-02-30T00:00:00Z"),
        ("duration", "P1DT2H", "P1H"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
        ("ipv4", "1.2.3.255", "1.2.3.256"),
        ("ipv6", "fe80::1", "fe80:::1"),
        ("hostname", "a-b.c", "a-.c"),
        ("email", "a.b@c.d", "a..b@c.d"),
        ("uri", "https://a/b?c", "a b"),
        ("json-pointer", "/a~1b", "a"),
        ("relative-json-pointer", "1/a", "/a"),
    )
} | {
    f"format: {name}": Refused(string(format=name), f"schema at # has no automaton: format='{name}' has no")
    for name in (
        "idn-email",
        "idn-hostname",
        "uri-reference",
        "iri",
        "iri-reference",
        "uri-template",
        "regex",
    )
}
CHAPTERS = {
    "core": CORE,
    "applicators": APPLICATORS,
    "validation": VALIDATION,
    "formats": FORMATS,
    "annotations": ANNOTATIONS,
}


def table() -> str:
    """Return the table of all keywords for the documentation."""
    lines = ["| chapter | keyword | schema | answer |", "| --- | --- | --- | --- |"]
    for chapter, cases in CHAPTERS.items():
        for name, case in cases.items():
            schema = json.dumps(case.schema)
            if isinstance(case, Served):
                told = f"`{case.valid}`, not `{case.invalid}`"
            else:
                told = f"refused: {case.sentence}"
            lines.append(f"| {chapter} | `{name}` | `{schema}` | {told} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
