"""JSON schemas whose values have any depth, and structural tags with such schemas, as sources for llguidance.

Only where both readers say the same: a keyword that llguidance does not have, or reads otherwise, has no
source. Such a schema is followed to a few levels by an automaton (`jaxpaged.grammar.compile`).
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxpaged.grammar.recursive import EVERY_TOKEN
from jaxpaged.grammar.structural_tag import StructuralTag
from jaxpaged.grammar.ways import ANNOTATIONS

# Keywords that are handed on as they are.
SAME = {
    *("type", "enum", "const", "required"),
    *("minItems", "maxItems", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
ONE, EACH, NAMED = {"items", "additionalProperties"}, {"anyOf", "prefixItems"}, {"properties"}
DEFINITIONS = {"$defs", "definitions"}
FORMATS = {"date", "time", "date-time", "uuid", "ipv4"}
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class _NoSourceError(Exception):
    """A part of a schema that llguidance does not read as we do."""


def schema_source(schema: Any, fields: Mapping[str, Any]) -> str | None:
    """Return the source of a schema; None where llguidance does not read it as we do.

    fields: those of `StructuredOutputsParams`.
    """
    made = _json(schema, fields)
    return None if made is None else f"start: {made}{EVERY_TOKEN}"


def tag_source(tag: StructuralTag, fields: Mapping[str, Any]) -> str | None:
    """Return the source of a structural tag; None where llguidance does not read its schemas as we do.

    A text with a trigger behind it is a lexeme of its own, which ends with the first trigger: so the free
    text has none.
    """
    rules, ways = ["TEXT: /(?s:.*)/"], list[str]()
    for i, (trigger, tags) in enumerate(tag.behind.items()):
        rules.append(f"trigger_{i}[lazy]: TEXT {json.dumps(trigger)}")
        for begin, schema, end in tags:
            if (made := _json(schema, fields)) is None:
                return None
            marks = [json.dumps(mark) if mark else "" for mark in (begin, end)]
            ways.append(f"trigger_{i} {marks[0]} {made} {marks[1]}")
    rules += [f"tag_{i}: {way}" for i, way in enumerate(ways)]
    tags_ = f"({' | '.join(f'tag_{i}' for i in range(len(ways)))})"
    if tag.ends_with_first:
        start = tags_ if tag.must_have_one else f"{tags_} | TEXT"
    else:
        start = f"{tags_}{'+' if tag.must_have_one else '*'} TEXT"
    return "\n".join([f"start: {start}", *rules]) + EVERY_TOKEN


def _json(schema: Any, fields: Mapping[str, Any]) -> str | None:
    """Return a schema as a part of a rule; None where llguidance does not read it as we do."""
    schema = {} if schema is True else schema
    if fields.get("whitespace_pattern") is not None or not isinstance(schema, dict):
        return None
    places: dict[str, Any] = {}
    try:
        made = _written(schema, "#", places, only_declared=bool(fields.get("disable_additional_properties")))
    except _NoSourceError:
        return None
    refs = [its["$ref"] for its in places.values() if isinstance(its, dict) and "$ref" in its]
    if not all(isinstance(ref, str) and ref in places for ref in refs):
        return None
    guidance = COMPACT if fields.get("disable_any_whitespace") else {"whitespace_flexible": True}
    return "%json " + json.dumps(made | {"x-guidance": guidance})


def _written(schema: Any, path: str, places: dict[str, Any], *, only_declared: bool) -> Any:
    """Return a schema as llguidance is to read it, and note its places by their paths."""
    places[path] = schema
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise _NoSourceError

    def below(part: Any, *names: str) -> Any:
        return _written(part, "/".join([path, *names]), places, only_declared=only_declared)

    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in DEFINITIONS | NAMED:
            if not isinstance(value, dict) or any(set("~%/") & set(name) for name in value):
                raise _NoSourceError
            made[key] = {name: below(part, key, name) for name, part in value.items()}
        elif key in ONE:
            made[key] = below(value, key)
        elif key in EACH:
            if not isinstance(value, list):
                raise _NoSourceError
            made[key] = [below(part, key, str(i)) for i, part in enumerate(value)]
        elif (
            key in SAME or key == "$ref" or (key == "format" and isinstance(value, str) and value in FORMATS)
        ):
            made[key] = value
        elif key not in ANNOTATIONS and not key.startswith("x-"):
            raise _NoSourceError
    said = made.keys() - DEFINITIONS
    if said & {"$ref", "anyOf", "enum", "const"} and len(said - {"type"}) > 1:
        raise _NoSourceError  # how these are combined with others is ours
    if made.get("properties") and (only_declared or "additionalProperties" not in made):
        made["additionalProperties"] = False
    elif only_declared and (
        made.get("type") == "object"
        or isinstance(made.get("type"), list)
        or said & {"required", *ONE, *NAMED}
    ):
        raise _NoSourceError
    return made
