"""Schemas as applications have them: each kind of value in each place of a larger schema."""

import itertools
from typing import Any

type Schema = dict[str, Any]


def thing(properties: dict[str, Schema], *required: str) -> Schema:
    """Return the schema of an object with these properties alone."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
    }


VALUES: dict[str, Schema] = {
    "text": {"type": "string"},
    "short text": {"type": "string", "minLength": 1, "maxLength": 8},
    "code": {"type": "string", "pattern": "^[A-Z]{2,3}-[0-9]{4}$"},
    "part of a text": {"type": "string", "pattern": "a[bc]"},
    "choice": {"enum": ["red", "green", 'bl"ue', "grün"]},
    "mixed choice": {"enum": [1, "1", None, True, {"k": [1]}]},
    "constant": {"const": "fixed"},
    "count": {"type": "integer", "minimum": 0},
    "percent": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
    "year": {"type": "integer", "exclusiveMinimum": 1899, "exclusiveMaximum": 2101},
    "price": {"type": "number", "minimum": 0, "maximum": 999, "multipleOf": 0.25},
    "flag": {"type": "boolean"},
    "nothing": {"type": "null"},
    "number or text": {"type": ["integer", "string"]},
    "day": {"type": "string", "format": "date"},
    "moment": {"type": "string", "format": "date-time"},
    "identity": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
    "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
    "some fives": {"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}, "maxItems": 4},
    "point": thing({"x": {"type": "integer"}, "y": {"type": "integer"}}, "x", "y"),
    "counts by name": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "not seven": {"type": "integer", "not": {"const": 7}},
}
PLACES = {
    "alone": lambda its: its,
    "required": lambda its: thing({"id": {"type": "integer"}, "value": its}, "id", "value"),
    "optional": lambda its: thing({"a": {"type": "null"}, "value": its, "z": {"type": "null"}}, "z"),
    "list": lambda its: {"type": "array", "items": its},
    "short list": lambda its: {"type": "array", "items": its, "minItems": 1, "maxItems": 3},
    "or none": lambda its: {"anyOf": [its, {"type": "null"}]},
    "by name": lambda its: (
        thing({"first": {"$ref": "#/$defs/it"}, "second": {"$ref": "#/$defs/it"}}, "first")
        | {"$defs": {"it": its}}
    ),
    "of a kind": lambda its: {
        "oneOf": [
            thing({"kind": {"const": "one"}, "value": its}, "kind", "value"),
            thing({"kind": {"const": "other"}}, "kind"),
        ]
    },
    "call": lambda its: thing(
        {"name": {"const": "tool"}, "arguments": thing({"value": its, "more": {"type": "boolean"}}, "value")},
        "name",
        "arguments",
    ),
}
SCHEMAS = {
    f"{value}, {place}": PLACES[place](VALUES[value]) for value, place in itertools.product(VALUES, PLACES)
}
