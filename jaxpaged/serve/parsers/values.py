"""Values of arguments that a model writes as plain text: as JSON, by the tool's own schema."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.serve.parsers.base import Arguments
from jaxpaged.text.conversations import strict_json

_LITERALS = {"True": True, "False": False, "None": None}  # as Python writes them, and models, too
_MAX_DEPTH = 16  # nesting of schemas


class ParameterTypes:
    """Types that the parameters of a request's tools may have."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._properties: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
                schema = function.get("parameters")
                properties = schema.get("properties") if isinstance(schema, Mapping) else None
                self._properties[name] = properties if isinstance(properties, Mapping) else {}

    def is_text(self, function: str, parameter: str) -> bool:
        """Return whether a parameter is nothing but a text: so is one of which the schema says nothing."""
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
        return _types_of(self._properties.get(function, {}).get(parameter), 0)


def _types_of(schema: object, depth: int) -> set[str]:
    """Return the names of types that a JSON schema allows, as far as it says so itself."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    types = schema.get("type")
    found = {each for each in ([types] if isinstance(types, str) else types or ()) if isinstance(each, str)}
    for name in ("anyOf", "oneOf", "allOf"):
        several = schema.get(name)
        for each in several if isinstance(several, list) else ():
            found |= _types_of(each, depth + 1)
    if not found:
        values = schema.get("enum")
        for value in values if isinstance(values, list) else ():
            found |= _types_of_value(value)
        if "properties" in schema or "$ref" in schema:
            found.add("object")
        if "items" in schema:
            found.add("array")
    return found


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
