"""Alternatives of a JSON schema: its references, combinations, conditions and negations in disjunctive form.

An alternative is a list of places whose keywords all hold, and of which none refers to another schema for the
same value. A value is valid exactly if it fulfils one of the alternatives.
"""

import itertools
import math
import urllib.parse
from collections.abc import Iterable
from typing import Any

from jaxpaged.checks import shown
from jaxpaged.grammar import scalars, validity
from jaxpaged.grammar.nodes import NotRegularError
from jaxpaged.grammar.places import (
    KINDS,
    Alternative,
    Place,
    UnmetError,
    branches,
    count,
    counts,
    distinct,
    escaped,
    has_kind,
    is_root,
    kinds,
    mapping,
    names,
    not_regular,
    root_of,
    types,
    wrong,
)

MAX_DEPTH = 32
MAX_PLACES = 20_000  # where a schema is read, references followed
MAX_PROOFS = 100_000  # places that proofs read
MAX_PROVED = 3  # levels of values that are looked at for what contradicts itself
# Keywords that say nothing of what is valid.
ANNOTATIONS = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "title", "description", "default"),
    *("examples", "deprecated", "readOnly", "writeOnly", "discriminator", "contentMediaType", "$vocabulary"),
    *("contentEncoding", "contentSchema", "example", "nullable", "xml", "externalDocs"),
}
# Keywords that hold of a value without other schemas of it.
PLAIN = {
    *("type", "enum", "const"),
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "unevaluatedProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
    *("contains", "minContains", "maxContains"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
CLOSING = {"unevaluatedProperties", "unevaluatedItems"}
COMBINING = {
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    *("dependentRequired", "dependentSchemas"),
}
# Keywords of the draft that no automaton of ours follows.
BEYOND = {
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "additionalItems", "dependencies"),
}
# What holds where a bound does not.
OPPOSITE = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
COUNTS = {"Length": "string", "Items": "array", "Properties": "object"}
# Keywords that exclude nothing where they are true, or empty.
NEUTRAL = {
    *("additionalProperties", "items", "propertyNames", "patternProperties"),
    *CLOSING,
}


class Alternatives:
    """Reader of one schema that counts the places it reads.

    During a proof that a part is void, the alternatives may allow more than the schema does, never less.
    """

    def __init__(self, schema: Any, levels: int | None) -> None:
        self.whole, self.levels = schema, levels
        self.num_places, self.num_proved = 0, 0
        self.num_proving = 0  # proofs begun: what is recursive is not cut in them, and `oneOf` is `anyOf`

    def of(self, places: Alternative) -> list[Alternative]:
        """Return the alternatives of values that are valid at all these places."""
        return self.product([self.at(place, is_alone=len(places) == 1) for place in places], places[0].path)

    def at(self, place: Place, *, is_alone: bool = False) -> list[Alternative]:
        """Return the alternatives of a place. `is_alone`: no other place says anything of the value."""
        used = self.used(place)
        if used is None:
            return [()] if place.schema else []
        groups: list[list[Alternative]] = []
        if plain := used & PLAIN:
            schema = {key: place.schema[key] for key in place.schema if key in plain}
            for key in CLOSING & plain:
                if self.num_proving or (is_alone and (schema[key] is True or schema[key] == {})):
                    del schema[key]
                elif schema[key] is not False or not is_alone:
                    raise not_regular(place.path, f"{key} is only followed if it is a boolean, and outermost")
            groups.append([(place._replace(schema=schema),)] if schema else [()])
        if "$ref" in used:
            target = self.target(place)
            is_alone &= not used - {"$ref"}
            groups.append([] if target is None else self.at(target, is_alone=is_alone))
        if "allOf" in used:
            groups += map(self.at, branches(place, "allOf"))
        if "anyOf" in used:
            groups.append(
                [alternative for branch in branches(place, "anyOf") for alternative in self.at(branch)]
            )
        if "oneOf" in used:
            groups.append(self.one_of(place))
        if "not" in used:
            groups.append(self.against(place.beside("not")))
        if "if" in used and used & {"then", "else"}:
            groups.append(self.conditional(place))
        groups += self.dependent(place)
        return self.product(groups, place.path)

    def used(self, place: Place) -> set[str] | None:
        """Return the keywords that decide validity at a place; None for a boolean schema."""
        self.spend(place.path, 1)
        if place.path.count("/") > 3 * MAX_DEPTH or len(place.refs) > MAX_DEPTH:
            raise wrong(place.path, f"is more than {MAX_DEPTH} levels deep")
        if isinstance(place.schema, bool):
            return None
        if not isinstance(place.schema, dict):
            raise wrong(place.path, f"is {shown(place.schema)}, must be an object or a boolean")
        used = {key for key in place.schema if key not in ANNOTATIONS and not key.startswith("x-")}
        for key in sorted(used - PLAIN - COMBINING):
            if key in BEYOND:
                raise not_regular(place.path, f"{key} is not followed by an automaton")
            raise wrong(place.path, f"has the keyword {shown(key)}, which is not supported")
        return used

    def product(self, groups: Iterable[list[Alternative]], path: str) -> list[Alternative]:
        """Return the combinations of one alternative of each group, less those without a common type."""
        alternatives: list[Alternative] = [()]
        for group in groups:
            self.spend(path, len(alternatives) * len(group) - 1)
            alternatives = [one + other for one in alternatives for other in group]
            self.spend(path, sum(map(len, alternatives)))
            alternatives = [alternative for alternative in alternatives if kinds(alternative)]
        return alternatives

    def spend(self, path: str, places: int) -> None:
        if self.num_proving:
            self.num_proved += max(places, 0)
        else:
            self.num_places += max(places, 0)
        if self.num_places > MAX_PLACES or self.num_proved > MAX_PROOFS:
            raise wrong(path, f"has more than {MAX_PLACES} places, references followed")

    def target(self, place: Place) -> Place | None:
        """Return the place that a reference names; None where it is cut, as recursive."""
        name = place.schema["$ref"]
        if not isinstance(name, str) or not (name == "#" or name.startswith("#/")):
            raise wrong(place.path, f"has $ref={shown(name)}, must begin with #/: nothing is fetched")
        schema, path, root = self.referenced(place)
        if path in place.here:
            raise wrong(place.path, f"has $ref={shown(name)}, which refers to itself only")
        if path in place.refs and self.levels is not None and not self.num_proving:
            if not self.levels:
                raise not_regular(place.path, f"{name} refers to itself", is_recursive=True)
            if place.refs.count(path) >= self.levels:
                return None
        return Place(schema, path, (*place.refs, path), (*place.here, path), place.is_made, root)

    def referenced(self, place: Place) -> tuple[Any, str, str]:
        """Return the part that a place refers to, its path, and that of the schema that it is in."""
        name, part, path, root = place.schema["$ref"], self.whole, "#", "#"
        inside = [key.replace("~1", "/").replace("~0", "~") for key in place.root.split("/")[1:]]
        asked = [
            urllib.parse.unquote(key).replace("~1", "/").replace("~0", "~") for key in name.split("/")[1:]
        ]
        for key in (*inside, *asked):
            is_index = isinstance(part, list) and key.isdigit() and len(key) < 6 and int(key) < len(part)
            if not is_index and not (isinstance(part, dict) and key in part):
                raise wrong(place.path, f"has $ref={shown(name)}, which is not in the schema")
            part = part[int(key)] if is_index else part[key]
            path = f"{path}/{escaped(key)}"
            root = path if is_root(part) else root
        return part, path, root

    def one_of(self, place: Place) -> list[Alternative]:
        """Return the alternatives of each branch of oneOf, less those of branches that may overlap it."""
        branch_places = branches(place, "oneOf")
        if self.num_proving:
            return [alternative for branch in branch_places for alternative in self.at(branch)]
        rivals: list[list[Place]] = [[] for _ in branch_places]
        for one, other in itertools.combinations(range(len(branch_places)), 2):
            if not self.is_void((branch_places[one], branch_places[other])):
                rivals[one].append(branch_places[other])
                rivals[other].append(branch_places[one])
        alternatives = []
        for branch, others in zip(branch_places, rivals, strict=True):
            alternatives += self.product([self.at(branch), *map(self.against, others)], place.path)
        return alternatives

    def conditional(self, place: Place) -> list[Alternative]:
        ways_of_both = []
        condition = place.beside("if")
        for key, alternatives in (("then", self.at(condition)), ("else", self.against(condition))):
            rest = [self.at(place.beside(key))] if key in place.schema else []
            ways_of_both += self.product([alternatives, *rest], place.path)
        return ways_of_both

    def dependent(self, place: Place) -> list[list[Alternative]]:
        """Return a group for each property that others depend on: it is absent, or all it requires holds."""
        groups = []
        for key in ("dependentRequired", "dependentSchemas"):
            for name in mapping(place, key):
                condition = place.beside(key, name)
                if key == "dependentRequired":
                    condition = place.made({"required": names(place.beside(key), name)})
                there = (place.made({"required": [name]}),)
                without = (place.made({"properties": {name: False}}),)
                groups.append([without, *((*there, *alternative) for alternative in self.at(condition))])
        return groups

    def against(self, place: Place) -> list[Alternative]:
        """Return the alternatives of values not valid at a place.

        Raises `NotRegularError` where none are known.
        """
        if not self.num_proving:
            return self.negated(place)
        try:
            return self.negated(place)
        except NotRegularError:
            return [()]

    def negated(self, place: Place) -> list[Alternative]:
        """Return the alternatives of the negation of a place's schema; see `against`."""
        used = self.used(place)
        if used is None:
            return [] if place.schema else [()]
        negations: list[Alternative] = []

        def add(schema: dict[str, Any]) -> None:
            negations.append((place.made(schema),))

        for key in sorted(used):
            value = place.schema[key]
            kind = next((COUNTS[end] for end in COUNTS if key[3:] == end), None)
            if key == "$ref":
                if isinstance(value, str) and value[:1] == "#" and self.referenced(place)[1] in place.refs:
                    raise not_regular(place.path, f"a negation of {shown(value)} refers to itself")
                target = self.target(place)
                assert target is not None
                negations += self.against(target)
            elif key == "not":
                negations += self.at(place.beside(key)._replace(is_made=True))
            elif key == "allOf":
                negations += [
                    alternative for branch in branches(place, key) for alternative in self.against(branch)
                ]
            elif key == "anyOf":
                negations += self.product(
                    [self.against(branch) for branch in branches(place, key)], place.path
                )
            elif key == "type":
                allowed_types = types(place)
                left = [kind for kind in KINDS if kind not in allowed_types]
                if "integer" in allowed_types:
                    left.remove("number")
                    add({"type": "number", "not": {"type": "integer"}})
                if left:
                    add({"type": left})
            elif key in ("enum", "const"):
                add({"not": {key: value}})
            elif key in OPPOSITE:
                add({"type": "number", OPPOSITE[key]: value})
            elif key == "pattern":
                add({"type": "string", "not": {"pattern": value}})
            elif key == "multipleOf":
                add({"type": "number", "not": {"multipleOf": value}})
            elif kind is not None:
                number = count(place, key)
                assert number is not None
                if key.startswith("max"):
                    add({"type": kind, f"min{key[3:]}": number + 1})
                elif number:
                    add({"type": kind, f"max{key[3:]}": number - 1})
            elif key == "required":
                for name in names(place, key):
                    add({"type": "object", "properties": {name: False}})
            elif key == "properties":
                for name, subschema in mapping(place, key).items():
                    if subschema is not True:
                        other = subschema if isinstance(subschema, bool) else {"not": subschema}
                        add({"type": "object", "required": [name], "properties": {name: other or True}})
            elif not (key in NEUTRAL and (value is True or value == {})) and not (
                key in ("then", "else") and "if" not in used
            ):
                raise not_regular(place.path, f"a negation of {key} is not followed by an automaton")
        return negations

    def is_void(self, places: Alternative, depth: int = 0) -> bool:
        """Return whether it is easy to prove that no value is valid under all of some places."""
        self.num_proving += 1
        try:
            return all(self.is_void_way(alternative, depth) for alternative in self.of(places))
        finally:
            self.num_proving -= 1

    def is_void_way(self, alternative: Alternative, depth: int) -> bool:
        if not alternative:
            return False
        if (values := self.values(alternative)) is not None:
            return not values
        return all(self.is_void_kind(alternative, kind, depth) for kind in kinds(alternative))

    def is_void_kind(self, alternative: Alternative, kind: str, depth: int) -> bool:
        try:
            if kind in ("integer", "number"):
                scalars.bounds(alternative, is_integer=kind == "integer")
            elif kind == "string":
                counts(alternative, "minLength", "maxLength")
            elif kind == "array":
                counts(alternative, "minItems", "maxItems")
            elif kind == "object" and depth < MAX_PROVED:
                required = {name for place in alternative for name in names(place, "required")}
                return any(
                    self.is_void(places, depth + 1)
                    for name in required
                    if (places := named(alternative, name))
                )
        except UnmetError:
            return True
        return False

    def values(self, alternative: Alternative) -> list[Any] | None:
        """Return the values of an alternative that lists its values; None of any other."""
        listed = []
        for place in alternative:
            if "enum" in place.schema and not isinstance(place.schema["enum"], list):
                raise wrong(place.path, "has an enum that is not a list")
            listed += [place.schema["enum"]] if "enum" in place.schema else []
            listed += [[place.schema["const"]]] if "const" in place.schema else []
        if not listed:
            return None
        first, *others = map(distinct, listed)
        allowed = kinds(alternative)
        kept = [
            each
            for key, same in first.items()
            if all(key in other for other in others)
            for each in same
            if any(has_kind(each, kind) for kind in allowed)
        ]
        if any(isinstance(value, float) and not math.isfinite(value) for value in kept):
            raise wrong(alternative[0].path, "has a number that JSON has not")
        for place in alternative:
            if closing := CLOSING & set(place.schema):
                raise not_regular(place.path, f"{min(closing)} beside an enum is not followed")
            if set(place.schema) - {"enum", "const", "type"}:
                kept = [
                    value for value in kept if validity.is_valid(value, place, root_of(place, self.whole))
                ]
        return kept


def named(alternative: Alternative, name: str) -> Alternative:
    """Return the places that a property's value must be valid at."""
    places = []
    for place in alternative:
        own_places = [place.at("properties", name)] if name in mapping(place, "properties") else []
        for pattern in mapping(place, "patternProperties"):
            if validity.contains_match(name, pattern, f"{place.path}/patternProperties"):
                own_places.append(place.at("patternProperties", pattern))
        if not own_places and "additionalProperties" in place.schema:
            own_places.append(place.at("additionalProperties"))
        places += own_places
    return tuple(places)
