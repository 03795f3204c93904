"""JSON schemas that refer to themselves, as sources for llguidance.

Only where both readers say the same: a keyword that llguidance does not have, or reads otherwise, has no
source. Such a schema is followed to a few levels by an automaton (`jaxpaged.grammar.compile`).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxpaged.grammar.recursive import EVERY_TOKEN
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
    """Return the source of a schema that refers to itself; None for any other, and where there is none.

    fields: those of `StructuredOutputsParams`.
    """
    if fields.get("whitespace_pattern") is not None or not isinstance(schema, dict):
        return None
    places: dict[str, Any] = {}
    try:
        made = _written(schema, "#", places, only_declared=bool(fields.get("disable_additional_properties")))
        refs = {path: set(_refs(its, places)) for path, its in places.items()}
    except _NoSourceError:
        return None
    if not _has_cycle(refs):
        return None
    guidance = COMPACT if fields.get("disable_any_whitespace") else {"whitespace_flexible": True}
    return "start: %json " + json.dumps(made | {"x-guidance": guidance}) + EVERY_TOKEN


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
        elif key in SAME or (key == "format" and value in FORMATS) or key == "$ref":
            made[key] = value
        elif key not in ANNOTATIONS and not key.startswith("x-"):
            raise _NoSourceError
    said = made.keys() - DEFINITIONS
    if said & {"$ref", "anyOf", "enum", "const"} and len(said - {"type"}) > 1:
        raise _NoSourceError  # how these are combined with others is ours
    if made.get("properties") and (only_declared or "additionalProperties" not in made):
        made["additionalProperties"] = False
    elif only_declared and ("object" in made.get("type", ()) or said & {"required", *ONE, *NAMED}):
        raise _NoSourceError
    return made


def _refs(schema: Any, places: Mapping[str, Any]) -> Iterator[str]:
    """Yield the places that a place refers to, and those inside it."""
    if not isinstance(schema, dict):
        return
    if (name := schema.get("$ref")) is not None:
        if name not in places:
            raise _NoSourceError
        yield name
    parts = [schema[key] for key in ONE if key in schema]
    parts += [part for key in EACH for part in schema.get(key, ())]
    parts += [part for key in NAMED for part in schema.get(key, {}).values()]
    for part in parts:
        yield from _refs(part, places)


def _has_cycle(refs: Mapping[str, set[str]]) -> bool:
    """Check whether the outermost place comes to a place that comes to itself."""
    done: set[str] = set()
    way: set[str] = set()

    def comes_back(path: str) -> bool:
        if path in way:
            return True
        if path in done:
            return False
        done.add(path)
        way.add(path)
        found = any(comes_back(each) for each in refs[path])
        way.discard(path)
        return found

    return comes_back("#")
