"""Values of arguments that a model writes as plain text: as JSON, by the tool's own schema."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from jaxpaged.serve.parsers.base import Arguments
from jaxpaged.text.conversations import strict_json

_LITERALS = {"True": True, "False": False, "None": None}  # as Python writes them, and models, too
_MAX_DEPTH = 16  # nesting of schemas


class ParameterTypes:
    """Types that the parameters of a request's tools may have."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
                schema = function.get("parameters")
                self._schemas[name] = schema if isinstance(schema, Mapping) else {}

    def is_text(self, function: str, parameter: str) -> bool:
        """Return whether a parameter is always a text; so is one that the schema does not describe."""
        return self._types(function, parameter) <= {"string"}

    def json(self, function: str, parameter: str, text: str) -> str:
        """Return a value's text as JSON: of the first type that is allowed and fits, else as a string."""
        types = self._types(function, parameter)
        stripped = text.strip()
        if not types <= {"string"}:
            if stripped in _LITERALS:
                stripped = json.dumps(_LITERALS[stripped])
            try:
                value = strict_json(stripped)
                if types & _types_of_value(value):
                    return stripped
            except (ValueError, RecursionError):
                pass
        return json.dumps(text, ensure_ascii=False)

    def _types(self, function: str, parameter: str) -> set[str]:
        whole = self._schemas.get(function, {})
        types = set[str]()
        for part in _for_same_value(whole, whole, 0):
            properties = part.get("properties")
            if isinstance(properties, Mapping) and parameter in properties:
                types |= _types_of(properties[parameter], whole, 0)
        return types


def _for_same_value(schema: object, whole: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, and the schemas that it refers to or combines for the same value."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    yield schema
    several = [schema.get(name) for name in ("anyOf", "oneOf", "allOf")]
    parts = [each for branches in several if isinstance(branches, list) for each in branches]
    for part in [*parts, *([_target(schema["$ref"], whole)] if "$ref" in schema else [])]:
        yield from _for_same_value(part, whole, depth + 1)


def _target(name: object, whole: Mapping[str, Any]) -> object:
    """Return the part of a schema that a reference names; None if there is none."""
    part: object = whole
    if not isinstance(name, str) or name.partition("/")[0] != "#":
        return None
    for key in name.split("/")[1:]:
        key = unquote(key).replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping):
            part = part.get(key)
        elif isinstance(part, list) and key.isdecimal() and len(key) < 6 and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part


def _types_of(schema: object, whole: Mapping[str, Any], depth: int) -> set[str]:
    """Return the names of types that a JSON schema and its references allow, as far as they say so."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    types = schema.get("type")
    names = {each for each in ([types] if isinstance(types, str) else types or ()) if isinstance(each, str)}
    for name in ("anyOf", "oneOf", "allOf"):
        several = schema.get(name)
        for each in several if isinstance(several, list) else ():
            names |= _types_of(each, whole, depth + 1)
    if "$ref" in schema:
        names |= _types_of(_target(schema["$ref"], whole), whole, depth + 1)
    if not names:
        values = schema.get("enum")
        for value in values if isinstance(values, list) else ():
            names |= _types_of_value(value)
        if "const" in schema:
            names |= _types_of_value(schema["const"])
        if "properties" in schema:
            names.add("object")
        if "items" in schema:
            names.add("array")
    return names


def _types_of_value(value: object) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"integer", "number"} if value.is_integer() else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}


def as_string(text: str) -> Arguments:
    """Return a text as the inside of a JSON string of a call's arguments."""
    return Arguments(json.dumps(text, ensure_ascii=False)[1:-1])
