"""JSON schemas of draft 2020-12 as nodes, where they are regular: bounded, and without conditions.

A keyword's meaning is exact, or `NotRegularError` names what has no automaton. Narrower than a schema on
purpose: properties come in their order; where `properties` is given, others must be declared by
`additionalProperties`; an integer has no fraction and no exponent.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxpaged.checks import shown
from jaxpaged.grammar import json_values, scalars, validity
from jaxpaged.grammar.alternatives import Alternatives, named
from jaxpaged.grammar.nodes import (
    EMPTY,
    NOTHING,
    Distinct,
    Either,
    GrammarError,
    Members,
    Minus,
    Node,
    Ref,
    Repeat,
    Then,
    both,
    chars,
    either,
    optional,
    text,
)
from jaxpaged.grammar.places import (
    Alternative,
    Place,
    UnmetError,
    count,
    counts,
    distinct,
    escaped,
    item_places,
    kinds,
    mapping,
    names,
    not_regular,
    root_of,
    unmet,
    wrong,
)

MAX_PATTERNS = 4  # of names, for the properties of one object
REST = "/additionalProperties"
MAX_DISTINCT = 8  # values of items that must differ


class Style(NamedTuple):
    """Style of the white space and separators between the parts of JSON."""

    is_compact: bool = False  # one space behind commas and colons, and no other
    space: Node | None = None  # between any two parts; None: any white space
    only_declared: bool = False  # no properties but those of `properties`


def schema_node(schema: Any, style: Style = Style(), levels: int = 0) -> Node:  # noqa: B008
    """Return the JSON texts that are valid under a schema.

    What is recursive, and values of any kind, go `levels` levels deep. Raises `NotRegularError`, with
    `is_recursive` where more levels could help, or `GrammarError` for a schema that cannot be met or is none.
    """
    return _Reader(schema, style, levels, None).whole_node()


def schema_rules(schema: Any, style: Style, named: dict[str, Node]) -> Node:
    """Return the JSON texts that are valid under a schema, to any depth: by rules that are added to `named`.

    Raises `GrammarError`, as `schema_node` does.
    """
    return _Reader(schema, style, None, named).whole_node()


class _Reader:
    """A reader of one schema.

    levels: of what is recursive; None: it goes to any depth, by references to `named`.
    """

    def __init__(self, schema: Any, style: Style, levels: int | None, named: dict[str, Node] | None) -> None:
        self.alternatives, self.whole, self.levels = Alternatives(schema, levels), schema, levels
        self.named, self.prefix = named, str(len(named or ()))
        self.strings: dict[str, Node] = {}
        self.only_declared = style.only_declared
        space = EMPTY if style.is_compact else style.space or Repeat(chars(" \n\r\t"))
        self.space = space
        self.comma = text(", ") if style.is_compact else Then((space, chars(","), space))
        self.colon = text(": ") if style.is_compact else Then((space, chars(":"), space))

    def whole_node(self) -> Node:
        """Return the values that are valid under the schema."""
        node = self.node((Place(self.whole, "#"),), "#")
        if node == NOTHING:
            raise unmet("#", "no value is valid under it")
        return node

    def node(self, places: Alternative, path: str) -> Node:
        """Return the values that are valid at all places; `NOTHING` or an `UnmetError` if none is."""
        if self.named is None:
            return self.valid(places, path)
        by_key = {place.key(): place._replace(refs=(), here=()) for place in places}
        return self.rule(json.dumps([*by_key]), lambda: self.valid(tuple(by_key.values()), path))

    def rule(self, key: str, make: Callable[[], Node]) -> Node:
        """Return a reference to a rule that `make` builds at the first use, and that may refer to itself."""
        assert self.named is not None
        name = self.prefix + key
        if name not in self.named:
            self.named[name] = Ref(name)
            try:
                self.named[name] = make()
            except GrammarError:
                del self.named[name]
                raise
        return NOTHING if self.named[name] == NOTHING else Ref(name)

    def valid(self, places: Alternative, path: str) -> Node:
        """Build the node of the values that are valid at all these places."""
        if not places:
            return self.any_value(path)
        nodes: list[Node] = []
        problem = None
        for alternative in self.alternatives.of(places):
            if not alternative:
                return self.any_value(path)
            if (values := self.alternatives.values(alternative)) is not None:
                nodes += map(json_values.literal, values)
                continue
            for kind in kinds(alternative):
                try:
                    nodes.append(self.of_kind(alternative, kind))
                except UnmetError as error:
                    problem = problem or error
        made = either(nodes)
        if made == NOTHING and problem is not None:
            raise problem
        return made

    def if_any(self, places: Alternative, path: str) -> Node:
        """Return the values that are valid at all places; `NOTHING` if there are none."""
        try:
            return self.node(places, places[0].path if places else path)
        except UnmetError:
            return NOTHING

    def of_kind(self, alternative: Alternative, kind: str) -> Node:
        makers: dict[str, Callable[[], Node]] = {
            "object": lambda: self.object(alternative),
            "array": lambda: self.array(alternative),
            "string": lambda: self.string(alternative),
            "integer": lambda: scalars.number(alternative, is_integer=True),
            "number": lambda: scalars.number(alternative, is_integer=False),
            "boolean": lambda: self.listed(alternative, kind, {"true": True, "false": False}),
            "null": lambda: self.listed(alternative, kind, {"null": None}),
        }
        return makers[kind]()

    def string(self, alternative: Alternative) -> Node:
        """Return the node of JSON strings; equal schemas share one node, which is compiled once."""
        said = [
            {key: value for key, value in place.schema.items() if key in scalars.OF_STRINGS}
            for place in alternative
        ]
        key = json.dumps(said)
        if key not in self.strings:
            self.strings[key] = scalars.string(alternative)
        return self.strings[key]

    def listed(self, alternative: Alternative, kind: str, values: dict[str, Any]) -> Node:
        """Return the texts of a few values, without values that an alternative excludes."""
        barred = scalars.excluded(alternative, kind)
        return either(text(written) for written, value in values.items() if value not in barred)

    def any_value(self, path: str) -> Node:
        """Return values of any kind, in so many levels of lists and objects."""
        if self.levels is None:
            return self.rule("any", self.any_depth)
        if not self.levels:
            raise not_regular(path, "it allows any value", is_recursive=True)
        made: Node = Either(_scalars())
        for _ in range(self.levels - 1):
            made = self.around(made)
        return made

    def any_depth(self) -> Node:
        return self.around(self.rule("any", self.any_depth))

    def around(self, value: Node) -> Node:
        """Return scalars, and lists and objects of a value."""
        member = Then((json_values.string(), self.colon, value))
        some = optional(Then((value, Repeat(Then((self.comma, value))))))
        return Either((*_scalars(), self.brackets(some), self.braces(Members((), self.comma, member))))

    def braces(self, inside: Node) -> Node:
        return self.between("{", inside, "}")

    def brackets(self, inside: Node) -> Node:
        return self.between("[", inside, "]")

    def between(self, begin: str, inside: Node, end: str) -> Node:
        """Return something between two marks; where it may be empty, with one white space between them."""
        alternatives: list[Node] = []
        if (
            isinstance(inside, Members)
            and inside.minimum == 0
            and not any(is_required for _, is_required in inside.parts)
        ):
            alternatives, inside = [EMPTY], dataclasses.replace(inside, minimum=1)
        elif isinstance(inside, Either) and inside.parts[:1] == (EMPTY,):
            alternatives, inside = [EMPTY], either(inside.parts[1:])
        some = Then((inside, self.space, chars(end)))
        return Then(
            (
                chars(begin),
                self.space,
                either([*(Then((alternative, chars(end))) for alternative in alternatives), some]),
            )
        )

    def object(self, alternative: Alternative) -> Node:
        path = alternative[0].path
        if scalars.excluded(alternative, "object"):
            raise not_regular(path, "an object that is not a certain one has no automaton")
        if self.only_declared:
            alternative = tuple(_without(place, "additionalProperties") for place in alternative)
        is_closed = self.only_declared or self.is_closed(alternative)
        required = {name for place in alternative for name in names(place, "required")}
        parts: list[tuple[Node, bool]] = []
        for name in self.declared(alternative, required, is_closed=is_closed):
            value_places = named(alternative, name)
            where = value_places[0].path if value_places else f"{path}/properties/{escaped(name)}"
            if name in required and any(
                each.schema is False for each in value_places if each.path.endswith(REST)
            ):
                raise unmet(path, f"it requires {shown(name)}, which additionalProperties does not allow")
            is_named = all(
                validity.is_valid(name, place.at("propertyNames"), root_of(place, self.whole))
                for place in alternative
                if "propertyNames" in place.schema
            )
            node = self.if_any(value_places, where) if is_named else NOTHING
            if node == NOTHING and name in required:
                raise unmet(where, "it has no valid value, and is required")
            if node != NOTHING:
                parts.append((Then((json_values.literal(name), self.colon, node)), name in required))
        rest = either(self.others(alternative, is_closed=is_closed))
        return self.braces(self.members(alternative, parts, None if rest == NOTHING else rest))

    def is_closed(self, alternative: Alternative) -> bool:
        """Return whether only declared properties are allowed: some are declared, and no keyword describes
        further ones.
        """
        if any("additionalProperties" in place.schema for place in alternative):
            return False
        keys = ("properties", "patternProperties", "unevaluatedProperties")
        return any(
            key in place.schema and (place.schema[key] != {} or key == "properties")
            for place in alternative
            if not place.is_made
            for key in keys
        )

    def declared(self, alternative: Alternative, required: set[str], *, is_closed: bool) -> list[str]:
        """Return the names that have parts of their own, in order. Raises `UnmetError`."""
        declared: dict[str, None] = {}
        for place in sorted(alternative, key=lambda place: place.is_made):
            place_names = [*mapping(place, "properties"), *names(place, "required")]
            if not is_closed or (not place.is_made and not self.only_declared):
                declared |= dict.fromkeys(place_names)
                continue
            for name in place_names:
                is_there = any(
                    name in mapping(other, "properties")
                    or any(
                        validity.contains_match(name, pattern, f"{other.path}/patternProperties")
                        for pattern in mapping(other, "patternProperties")
                    )
                    for other in alternative
                    if not other.is_made
                )
                if is_there:
                    declared[name] = None
                elif name in required:
                    raise unmet(place.path, f"it requires {shown(name)}, which is not declared")
        return list(declared)

    def others(self, alternative: Alternative, *, is_closed: bool) -> Iterator[Node]:
        """Yield members whose names have no part of their own, by the patterns that they contain."""
        patterns = list(
            dict.fromkeys(pattern for place in alternative for pattern in mapping(place, "patternProperties"))
        )
        if len(patterns) > MAX_PATTERNS:
            raise not_regular(
                alternative[0].path, f"an object has more than {MAX_PATTERNS} patterns of names"
            )
        required = {name for place in alternative for name in names(place, "required")}
        its_names = self.declared(alternative, required, is_closed=is_closed)
        for is_in in itertools.product((False, True), repeat=len(patterns)):
            inside = {pattern for pattern, holds in zip(patterns, is_in, strict=True) if holds}
            if is_closed and not inside:
                continue
            places = []
            for place in alternative:
                place_patterns = [key for key in mapping(place, "patternProperties") if key in inside]
                places += [place.at("patternProperties", key) for key in place_patterns]
                if not place_patterns and "additionalProperties" in place.schema:
                    places.append(place.at("additionalProperties"))
            if any(place.schema is False for place in places):
                continue
            value = self.if_any(tuple(places), alternative[0].path + REST)
            if value == NOTHING:
                continue
            name: Node = json_values.other_string(its_names)
            for place in alternative:
                if "propertyNames" in place.schema:
                    name_place = place.at("propertyNames")
                    name = both(
                        [
                            name,
                            self.if_any((name_place, name_place.made({"type": "string"})), name_place.path),
                        ]
                    )
            for pattern in patterns:
                where, is_wide = f"{alternative[0].path}/patternProperties", pattern not in inside
                matching = json_values.pattern_text(pattern, where, is_wide=is_wide)
                matching = json_values.quoted(json_values.encoded(matching))
                name = both([name, matching]) if pattern in inside else Minus(name, matching)
            if name != NOTHING:
                yield Then((name, self.colon, value))

    def members(self, alternative: Alternative, parts: list[tuple[Node, bool]], rest: Node | None) -> Node:
        """Return the inside of an object, by the counts of its properties. Raises `UnmetError`."""
        path = alternative[0].path
        minimum, maximum = counts(alternative, "minProperties", "maxProperties")
        num_required = sum(is_required for _, is_required in parts)
        if rest is not None and minimum > max(1, num_required):
            # A name that is not declared may be written twice, and is one property then.
            raise not_regular(path, f"minProperties={minimum} counts names that are not declared")
        if minimum > len(parts) and rest is None:
            raise unmet(path, f"minProperties={minimum}, and only {len(parts)} are declared")
        if maximum is not None and maximum < num_required:
            raise unmet(path, f"maxProperties={maximum} is less than must be there")
        return Members(tuple(parts), self.comma, rest, 0 if minimum <= num_required else minimum, maximum)

    def array(self, alternative: Alternative) -> Node:
        path = alternative[0].path
        if scalars.excluded(alternative, "array"):
            raise not_regular(path, "a list that is not a certain one has no automaton")
        minimum, maximum = counts(alternative, "minItems", "maxItems")
        for place in alternative:
            if not isinstance(place.schema.get("prefixItems", []), list):
                raise wrong(place.path, "has prefixItems that are not a list of schemas")
        given_schemas = [place.schema for place in alternative if not place.is_made]
        num_first = max((len(schema.get("prefixItems", [])) for schema in given_schemas), default=0)
        closes = False
        if any("unevaluatedItems" in schema for schema in given_schemas):
            closes = not any("items" in schema for schema in given_schemas)
            if any("contains" in place.schema for place in alternative):
                raise not_regular(path, "contains beside unevaluatedItems is not followed by an automaton")
        nodes: list[Node] = []
        for i in range(num_first if maximum is None else min(num_first, maximum)):
            nodes.append(self.if_any(item_places(alternative, i), f"{path}/prefixItems/{i}"))
            if nodes[-1] == NOTHING:
                nodes, maximum = nodes[:-1], i
                break
        if any(place.schema.get("uniqueItems", False) is not False for place in alternative):
            return self.brackets(self.unlike(alternative, num_first, minimum, maximum))
        item = None
        if maximum is None or maximum > len(nodes):
            item = NOTHING if closes else self.if_any(item_places(alternative, num_first), f"{path}/items")
            if item == NOTHING:
                maximum = len(nodes)
        if maximum is not None and maximum < minimum:
            raise unmet(path, f"minItems={minimum}, and only {maximum} items can be valid")
        conditions = [self.items(nodes, item, minimum, maximum)]
        for place in alternative:
            if "contains" in place.schema:
                if num_first:
                    raise not_regular(path, "contains beside prefixItems is not followed by an automaton")
                conditions.append(self.containing(place, item_places(alternative, 0), item))
        return self.brackets(both(conditions))

    def unlike(self, alternative: Alternative, num_first: int, minimum: int, maximum: int | None) -> Node:
        """Return items that all differ, of few values."""
        path = alternative[0].path
        values: list[Any] | None = None
        if not num_first and not any("contains" in place.schema for place in alternative):
            values = self.finite(item_places(alternative, 0))
        if values is None or len(distinct(values)) > MAX_DISTINCT:
            raise not_regular(
                path, f"uniqueItems is only followed for items of at most {MAX_DISTINCT} values"
            )
        parts = [either(map(json_values.literal, same)) for same in distinct(values).values()]
        maximum = len(parts) if maximum is None else min(maximum, len(parts))
        if maximum < minimum:
            raise unmet(path, f"minItems={minimum}, and only {len(parts)} items can differ")
        return Distinct(tuple(parts), self.comma, minimum, maximum)

    def finite(self, places: Alternative) -> list[Any] | None:
        """Return all values that are valid at some places; None if they are not listed."""
        values_listed: list[Any] = []
        if not places:
            return None
        few: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
        for alternative in self.alternatives.of(places):
            values = self.alternatives.values(alternative)
            if values is None:
                if not all(kind in few for kind in kinds(alternative)):
                    return None
                for kind in kinds(alternative):
                    barred = scalars.excluded(alternative, kind)
                    values_listed += [value for value in few[kind] if value not in barred]
            else:
                values_listed += values
        return values_listed

    def containing(self, place: Place, items: Alternative, item: Node | None) -> Node:
        """Return items of which as many are valid under `contains` as must be."""
        minimum, maximum = count(place, "minContains"), count(place, "maxContains")
        minimum = 1 if minimum is None else minimum
        there = self.if_any((*items, place.at("contains")), place.path)
        other = item or NOTHING
        if maximum is not None:
            if maximum < minimum:
                raise unmet(place.path, f"minContains={minimum} is more than maxContains={maximum}")
            other = self.if_any((*items, place.at().made({"not": place.schema["contains"]})), place.path)
        before, behind = Repeat(Then((other, self.comma))), Repeat(Then((self.comma, other)))
        more: Node = behind  # what may come behind the last that must be there
        if maximum is not None:
            more = Then(
                (Repeat(Then((behind, self.comma, there)), 0, max(maximum - max(minimum, 1), 0)), behind)
            )
        parts: list[Node] = [before, there]
        for _ in range(minimum - 1):
            parts += [behind, self.comma, there]
        some = Then((*parts, more)) if maximum != 0 else NOTHING
        return some if minimum else either([self.items([], other, 0, None), some])

    def items(self, nodes: list[Node], item: Node | None, minimum: int, maximum: int | None) -> Node:
        """Return items in a row: the first ones of their own kind, more of another."""
        if maximum == 0:
            return EMPTY
        made: Node = EMPTY  # what follows the items before
        if item is not None and (maximum is None or maximum > len(nodes)):
            left = None if maximum is None else maximum - len(nodes)
            made = Repeat(Then((self.comma, item)), max(minimum - len(nodes), 0), left)
            if not nodes:
                fewer = None if left is None else left - 1
                some = Then((item, Repeat(Then((self.comma, item)), max(minimum - 1, 0), fewer)))
                return some if minimum else optional(some)
        for i in reversed(range(len(nodes))):
            made = Then((*((self.comma,) if i else ()), nodes[i], made))
            made = made if i < minimum else optional(made)
        return made


def _scalars() -> tuple[Node, ...]:
    return (json_values.string(), json_values.NUMBER, *map(text, ("true", "false", "null")))


def _without(place: Place, key: str) -> Place:
    return place._replace(schema={name: value for name, value in place.schema.items() if name != key})
