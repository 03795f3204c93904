"""Places of a JSON schema: a part of it with its path, its errors, and the kinds of values that it allows."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxpaged.checks import shown
from jaxpaged.grammar.nodes import GrammarError, Limits, NotRegularError

KINDS = ("object", "array", "string", "number", "boolean", "null")
TYPES = (*KINDS, "integer")


class Place(NamedTuple):
    """A part of a schema."""

    schema: Any
    path: str
    refs: tuple[str, ...] = ()  # references followed on the way from the whole schema
    here: tuple[str, ...] = ()  # those of them that no step into a value is behind
    is_made: bool = False  # of a condition or a negation: it declares no properties
    root: str = "#"  # path of the nearest part around it with an `$id`, from which references are looked up

    def at(self, *keys: str | int) -> "Place":
        """Return the part for a value inside of this one's values."""
        part, path = self.schema, self.path
        for key in keys:
            part, path = part[key], f"{path}/{escaped(key)}"
        return Place(part, path, self.refs, (), self.is_made, path if is_root(part) else self.root)

    def beside(self, *keys: str | int) -> "Place":
        """Return a part for the same value."""
        return self.at(*keys)._replace(here=self.here)

    def made(self, schema: Any) -> "Place":
        """Return a schema of our own that follows from this place."""
        return self._replace(schema=schema, is_made=True)

    def key(self) -> tuple[str, str]:
        """Return a key that is equal for places with equal content."""
        return self.path, json.dumps(self.schema) if self.is_made else ""


def root_of(place: "Place", whole: Any) -> Any:
    """Return the schema from which a place's references are looked up."""
    for key in place.root.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        whole = whole[int(key)] if isinstance(whole, list) else whole[key]
    return whole


def is_root(schema: Any) -> bool:
    """Return whether a part is a schema of its own, by an `$id` that is more than a fragment."""
    name = schema.get("$id") if isinstance(schema, dict) else None
    return isinstance(name, str) and not name.startswith("#")


Alternative = tuple[Place, ...]
"""Places whose keywords all hold for a value, none of which refers to others for the same value."""


class UnmetError(GrammarError):
    """A schema that no value is valid under."""


def unmet(path: str, why: str) -> UnmetError:
    return UnmetError(f"schema at {path} cannot be met: {why}", path)


def wrong(path: str, what: str) -> GrammarError:
    return GrammarError(f"schema at {path} {what}", path)


def not_regular(path: str, why: str, *, is_recursive: bool = False) -> NotRegularError:
    return NotRegularError(f"schema at {path} has no automaton: {why}", path, is_recursive=is_recursive)


def escaped(key: str | int) -> str:
    """Return a key in the notation of a JSON pointer."""
    return str(key).replace("~", "~0").replace("/", "~1")


def count(place: Place, key: str) -> int | None:
    """Return a keyword that counts; None if it is not there. Raises `GrammarError`."""
    if key not in place.schema:
        return None
    value: Any = place.schema[key]
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not is_whole or not 0 <= value < 2**31:
        raise wrong(place.path, f"has {key}={shown(value)}, must be a whole number from 0 to 2147483647")
    return int(value)


def counts(alternative: Alternative, minimum_key: str, maximum_key: str) -> tuple[int, int | None]:
    """Return the bounds of a count that hold in all places. Raises `UnmetError` if there is no such count."""
    low = max(
        (number for place in alternative if (number := count(place, minimum_key)) is not None), default=0
    )
    high = min(
        (number for place in alternative if (number := count(place, maximum_key)) is not None), default=None
    )
    if high is not None and high < low:
        raise unmet(alternative[0].path, f"{minimum_key}={low} is more than {maximum_key}={high}")
    return low, high


def mapping(place: Place, key: str) -> dict[str, Any]:
    """Return a keyword that maps names to schemas; {} if it is not there. Raises `GrammarError`."""
    value = place.schema.get(key, {})
    if not isinstance(value, dict):
        raise wrong(place.path, f"has {key} that are not an object")
    return value


def names(place: Place, key: str) -> list[str]:
    """Return a keyword that lists names; [] if it is not there. Raises `GrammarError`."""
    value = place.schema.get(key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise wrong(place.path, f"has a {key} that is not a list of names")
    return value


def branches(place: Place, key: str) -> list[Place]:
    """Return the places of a keyword that lists schemas for the same value. Raises `GrammarError`."""
    if not isinstance(place.schema[key], list) or not place.schema[key]:
        raise wrong(place.path, f"has an {key} that is not a list of schemas")
    return [place.beside(key, i) for i in range(len(place.schema[key]))]


def types(place: Place) -> list[str]:
    """Return the types that a place allows, each once; with numbers, no integers. Raises `GrammarError`."""
    if "type" not in place.schema:
        return list(KINDS)
    value = place.schema["type"]
    names = list(value) if isinstance(value, list) else [value]
    for kind in names:
        if kind not in TYPES:
            raise wrong(place.path, f"has type={shown(kind)}, must be one of {', '.join(sorted(TYPES))}")
    return [kind for kind in dict.fromkeys(names) if kind != "integer" or "number" not in names]


def kinds(alternative: Alternative) -> list[str]:
    """Return the types that all places allow."""
    allowed = list(KINDS)
    for place in alternative:
        pairs = [(kind, other) for kind in allowed for other in types(place)]
        allowed = [
            min(kind, other)  # an integer is a number
            for kind, other in pairs
            if kind == other or {kind, other} == {"integer", "number"}
        ]
    return allowed


def has_kind(value: Any, kind: str) -> bool:
    """Return whether a value is of a type."""
    if kind == "integer":
        return type_of(value) == "number" and value == value // 1
    return type_of(value) == kind


def type_of(value: Any) -> str:
    """Return the type of a value of JSON; `number` for all numbers."""
    for types, kind in ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, types):
            return kind
    return "null" if value is None else "object"


def as_key(value: Any) -> Any:
    """Return a hashable key that is equal for values that JSON holds equal, as 1 and 1.0."""
    if isinstance(value, list):
        return ("array", *map(as_key, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, as_key(entry)) for name, entry in value.items()))
    return type_of(value), value


def distinct(values: Iterable[Any]) -> dict[Any, list[Any]]:
    """Return values by `as_key`, each with all of its forms."""
    forms: dict[Any, list[Any]] = {}
    for value in values:
        forms.setdefault(as_key(value), []).append(value)
    return forms


def item_places(alternative: Alternative, i: int) -> Alternative:
    """Return the places that an item must be valid at."""
    places = []
    for place in alternative:
        if i < len(place.schema.get("prefixItems", [])):
            places.append(place.at("prefixItems", i))
        elif "items" in place.schema:
            places.append(place.at("items"))
    return tuple(places)


def read_schema(value: str, limits: Limits) -> Any:
    """Return a schema from its text. Raises `GrammarError` for text that is long, deep or no JSON."""
    if len(value) > limits.max_spec_chars:
        raise GrammarError(f"schema has {len(value)} characters, must have at most {limits.max_spec_chars}")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as problem:
        raise GrammarError(f"schema={shown(value)} must be JSON that is not too deep: {problem}") from None
