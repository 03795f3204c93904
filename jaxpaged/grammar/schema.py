"""JSON schemas of draft 2020-12 as nodes, where they are regular: bounded, and without conditions.

A keyword's meaning is exact, or `NotRegularError` names what has no automaton. Narrower than a schema on
purpose: properties come in their order; where `properties` is given, others must be declared by
`additionalProperties`; an integer has no fraction and no exponent.
"""

import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

from jaxpaged.checks import shown
from jaxpaged.grammar import json_values, numbers
from jaxpaged.grammar.formats import FORMATS
from jaxpaged.grammar.nodes import (
    EMPTY,
    NOTHING,
    Either,
    GrammarError,
    Limits,
    Members,
    Node,
    NotRegularError,
    Repeat,
    Then,
    both,
    chars,
    optional,
    text,
)

MAX_DEPTH = 32
MAX_PLACES = 10_000  # where a schema is read, references followed
# Keywords that say nothing of what is valid.
ANNOTATIONS = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "title", "description", "default"),
    *("examples", "deprecated", "readOnly", "writeOnly", "discriminator", "contentMediaType", "$vocabulary"),
    *("contentEncoding", "contentSchema", "example", "nullable", "xml", "externalDocs"),
}
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
# Each type's own keywords that are regular here.
KEYWORDS = {
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
FREE_FORMATS = {"path", "file-path", "directory-path", "password"}  # any string is one
# Keywords of some type or other that no automaton of ours follows.
BEYOND = {
    *("allOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "contains"),
    *("minContains", "maxContains", "patternProperties", "propertyNames"),
    *(
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
    ),
    *("additionalItems", "dependencies"),
}
KNOWN = {"type", "enum", "const", "anyOf", "$ref", *ANNOTATIONS, *BEYOND}.union(*KEYWORDS.values())


class Style(NamedTuple):
    """Choice of what is written between and beside the parts of JSON."""

    is_compact: bool = False  # one space behind commas and colons, and no other
    space: Node | None = None  # between any two parts; None: any white space
    only_declared: bool = False  # no properties but those of `properties`


def schema_node(schema: Any, style: Style = Style(), levels: int = 0) -> Node:  # noqa: B008
    """Return the JSON texts that are valid under a schema.

    What is recursive, and values of any kind, go `levels` levels deep. Raises `NotRegularError`, with
    `is_recursive` where more levels could help, or `GrammarError` for a schema that cannot be met or is none.
    """
    reader = _Reader(schema, style, levels)
    node = reader.node(schema, "#", ())
    if node == NOTHING:
        raise GrammarError("schema at # cannot be met: no value is valid under it", "#")
    return node


class _Reader:
    """A reader of one schema."""

    def __init__(self, schema: Any, style: Style, levels: int) -> None:
        self.whole, self.levels, self.num_places = schema, levels, 0
        self.only_declared = style.only_declared
        space = EMPTY if style.is_compact else style.space or Repeat(chars(" \n\r\t"))
        self.space = space
        self.comma = text(", ") if style.is_compact else Then((space, chars(","), space))
        self.colon = text(": ") if style.is_compact else Then((space, chars(":"), space))

    def node(self, schema: Any, path: str, refs: tuple[str, ...]) -> Node:
        """Return the values of a schema; `NOTHING` if there are none."""
        self.num_places += 1
        if self.num_places > MAX_PLACES:
            raise _error(path, f"has more than {MAX_PLACES} places, references followed")
        if path.count("/") > 3 * MAX_DEPTH or len(refs) > MAX_DEPTH:
            raise _error(path, f"is more than {MAX_DEPTH} levels deep")
        if schema is False:
            return NOTHING
        if schema is True:
            return self.any_value(path)
        if not isinstance(schema, dict):
            raise _error(path, f"is {shown(schema)}, must be an object or a boolean")
        used = {key for key in schema if key not in ANNOTATIONS and not key.startswith("x-")}
        for key in sorted(used):
            if key not in KNOWN:
                raise _error(path, f"has the keyword {shown(key)}, which is not supported")
        if beyond := used & BEYOND:
            raise _not_regular(path, f"{min(beyond)} is not followed by an automaton")
        if "$ref" in used:
            return self.reference(schema, used, path, refs)
        if "anyOf" in used:
            return self.any_of(schema, used, path, refs)
        if "enum" in used or "const" in used:
            return self.fixed(schema, used, path)
        return self.typed(schema, used, path, refs)

    def any_value(self, path: str) -> Node:
        """Return values of any kind, in so many levels of lists and objects."""
        if not self.levels:
            raise _not_regular(path, "it allows any value", is_recursive=True)
        plain = [json_values.string(), json_values.NUMBER, *map(text, ("true", "false", "null"))]
        made: Node = Either(tuple(plain))
        for _ in range(self.levels - 1):
            member = Then((json_values.string(), self.colon, made))
            some = optional(Then((made, Repeat(Then((self.comma, made))))))
            made = Either((*plain, self.brackets(some), self.braces(Members((), self.comma, member))))
        return made

    def braces(self, inside: Node) -> Node:
        return Then((chars("{"), self.space, inside, self.space, chars("}")))

    def brackets(self, inside: Node) -> Node:
        return Then((chars("["), self.space, inside, self.space, chars("]")))

    def reference(self, schema: dict[str, Any], used: set[str], path: str, refs: tuple[str, ...]) -> Node:
        name = schema["$ref"]
        if used != {"$ref"}:
            raise _not_regular(path, "$ref has other keywords beside it")
        if not isinstance(name, str) or not (name == "#" or name.startswith("#/")):
            raise _error(path, f"has $ref={shown(name)}, must begin with #/: nothing is fetched")
        if name in refs:
            if self.only_refs(name):
                raise _error(path, f"has $ref={shown(name)}, which refers to itself only")
            if not self.levels:
                raise _not_regular(path, f"{name} refers to itself", is_recursive=True)
            if refs.count(name) >= self.levels:
                return NOTHING
        return self.node(self.found(name, path), name, (*refs, name))

    def found(self, name: str, path: str) -> Any:
        """Return the part of the whole schema that a reference names."""
        part = self.whole
        for key in name.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            is_index = isinstance(part, list) and key.isdigit() and len(key) < 6 and int(key) < len(part)
            if not is_index and not (isinstance(part, dict) and key in part):
                raise _error(path, f"has $ref={shown(name)}, which is not in the schema")
            part = part[int(key)] if is_index else part[key]
        return part

    def only_refs(self, name: str) -> bool:
        """Return whether a chain of references beginning here never comes to anything else."""
        seen: set[str] = set()
        while name not in seen:
            seen.add(name)
            part = self.found(name, name)
            if not isinstance(part, dict) or not isinstance(part.get("$ref"), str):
                return False
            name = part["$ref"]
        return True

    def any_of(self, schema: dict[str, Any], used: set[str], path: str, refs: tuple[str, ...]) -> Node:
        branches = schema["anyOf"]
        if used != {"anyOf"}:
            raise _not_regular(path, "anyOf has other keywords beside it")
        if not isinstance(branches, list) or not branches:
            raise _error(path, "has an anyOf that is not a list of schemas")
        nodes = [self.node(branch, f"{path}/anyOf/{i}", refs) for i, branch in enumerate(branches)]
        return _either(nodes)

    def fixed(self, schema: dict[str, Any], used: set[str], path: str) -> Node:
        values = [schema["const"]] if "const" in used else schema["enum"]
        if not isinstance(values, list):
            raise _error(path, "has an enum that is not a list")
        if {"const", "enum"} <= used or used - {"const", "enum", "type"}:
            raise _not_regular(path, "enum and const have other keywords beside them")
        types = self.types(schema, path) if "type" in used else None
        kept = [value for value in values if types is None or any(_has_type(value, kind) for kind in types)]
        if any(isinstance(value, float) and not math.isfinite(value) for value in kept):
            raise _error(path, "has a number that JSON has not")
        return _either([json_values.literal(value) for value in kept])

    def types(self, schema: dict[str, Any], path: str) -> list[str]:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        for kind in types:
            if kind not in TYPES:
                raise _error(path, f"has type={shown(kind)}, must be one of {', '.join(TYPES)}")
        return types

    def typed(self, schema: dict[str, Any], used: set[str], path: str, refs: tuple[str, ...]) -> Node:
        if not used:
            return self.any_value(path)
        if "type" not in used:
            raise _not_regular(path, "without a type it allows values of any")
        types = self.types(schema, path)
        makers: dict[str, Callable[[], Node]] = {
            "object": lambda: self.object(schema, path, refs),
            "array": lambda: self.array(schema, path, refs),
            "string": lambda: self.string(schema, path),
            "integer": lambda: self.number(schema, path, is_integer=True),
            "number": lambda: self.number(schema, path, is_integer=False),
            "boolean": lambda: Either((text("true"), text("false"))),
            "null": lambda: text("null"),
        }
        return _either([makers[kind]() for kind in types])

    def object(self, schema: dict[str, Any], path: str, refs: tuple[str, ...]) -> Node:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        rest = False if self.only_declared else schema.get("additionalProperties", not properties)
        if not isinstance(properties, dict):
            raise _error(path, "has properties that are not an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _error(path, "has a required that is not a list of names")
        if undeclared := [name for name in required if name not in properties]:
            if self.only_declared or schema.get("additionalProperties") is False:
                why = f"requires {shown(undeclared[0])}, which additionalProperties does not allow"
                raise _error(path, f"cannot be met: it {why}")
            raise _not_regular(path, f"{shown(undeclared[0])} is required and not declared")
        parts = []
        for name, its in properties.items():
            where = f"{path}/properties/{name.replace('~', '~0').replace('/', '~1')}"
            node = self.node(its, where, refs)
            if node == NOTHING:
                if name in required:
                    raise _error(where, "cannot be met, and is required")
                continue
            parts.append((Then((json_values.literal(name), self.colon, node)), name in required))
        rest_node = None
        if rest is not False:
            value = self.node(rest, f"{path}/additionalProperties", refs)
            if value != NOTHING:
                rest_node = Then((json_values.other_string(list(properties)), self.colon, value))
        least, most = _count(schema, "minProperties", path) or 0, _count(schema, "maxProperties", path)
        num_required = sum(is_required for _, is_required in parts)
        if rest_node is not None and least > max(1, num_required):
            # A name that is not declared may be written twice, and is one property then.
            raise _not_regular(path, f"minProperties={least} counts names that are not declared")
        if least > len(parts) and rest_node is None:
            raise _error(path, f"cannot be met: minProperties={least}, and only {len(parts)} are declared")
        if most is not None and most < max(least, num_required):
            raise _error(path, f"cannot be met: maxProperties={most} is less than must be there")
        least = 0 if least <= num_required else least
        return self.braces(Members(tuple(parts), self.comma, rest_node, least, most))

    def array(self, schema: dict[str, Any], path: str, refs: tuple[str, ...]) -> Node:
        first = schema.get("prefixItems", [])
        least, most = _count(schema, "minItems", path) or 0, _count(schema, "maxItems", path)
        if schema.get("uniqueItems", False) is not False:
            raise _error(path, "has the keyword 'uniqueItems', which is not supported")
        if not isinstance(first, list):
            raise _error(path, "has prefixItems that are not a list of schemas")
        if most is not None and most < least:
            raise _error(path, f"cannot be met: minItems={least} is more than maxItems={most}")
        nodes = []
        for i, its in enumerate(first[:most]):
            nodes.append(self.node(its, f"{path}/prefixItems/{i}", refs))
            if nodes[-1] == NOTHING:
                nodes, most = nodes[:-1], i
                break
        item = None
        if most is None or most > len(nodes):
            item = self.node(schema.get("items", True), f"{path}/items", refs)
            if item == NOTHING:
                most = len(nodes)
        if most is not None and most < least:
            raise _error(path, f"cannot be met: minItems={least}, and only {most} items can be valid")
        return self.brackets(self.items(nodes, item, least, most))

    def items(self, nodes: list[Node], item: Node | None, least: int, most: int | None) -> Node:
        """Return items in a row: the first ones of their own kind, more of another."""
        if most == 0:
            return EMPTY
        made: Node = EMPTY  # what follows the items before
        if item is not None and (most is None or most > len(nodes)):
            left = None if most is None else most - len(nodes)
            made = Repeat(Then((self.comma, item)), max(least - len(nodes), 0), left)
            if not nodes:
                fewer = None if left is None else left - 1
                some = Then((item, Repeat(Then((self.comma, item)), max(least - 1, 0), fewer)))
                return some if least else optional(some)
        for i in reversed(range(len(nodes))):
            made = Then((*((self.comma,) if i else ()), nodes[i], made))
            made = made if i < least else optional(made)
        return made

    def string(self, schema: dict[str, Any], path: str) -> Node:
        least, most = _count(schema, "minLength", path) or 0, _count(schema, "maxLength", path)
        if most is not None and most < least:
            raise _error(path, f"cannot be met: minLength={least} is more than maxLength={most}")
        for key in ("pattern", "format"):
            if not isinstance(schema.get(key, ""), str):
                raise _error(path, f"has a {key} that is not a string")
        texts = []
        if "pattern" in schema:
            texts.append(json_values.pattern_text(schema["pattern"], f"{path}/pattern"))
        if "format" in schema and schema["format"] not in FREE_FORMATS:
            if schema["format"] not in FORMATS:
                raise _not_regular(path, f"format={shown(schema['format'])} has no automaton")
            texts += json_values.format_texts(schema["format"])
        if not texts:
            return json_values.string(least, most)
        if least or most is not None:
            texts.append(json_values.length_text(least, most))
        return json_values.quoted(both(map(json_values.encoded, texts)))

    def number(self, schema: dict[str, Any], path: str, *, is_integer: bool) -> Node:
        bounds = {key: schema[key] for key in BOUNDS if key in schema}
        for key, bound in bounds.items():
            is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
            if not is_number or not abs(bound) < 10**json_values.MAX_DIGITS:
                raise _error(
                    path, f"has {key}={shown(bound)}, must be a number below 1e{json_values.MAX_DIGITS}"
                )
        multiple = None
        if "multipleOf" in schema:
            multiple = _multiple(schema["multipleOf"], path, is_integer=is_integer)
        if not is_integer:
            return self.decimal(bounds, multiple, path)
        lows = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
        lows += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
        highs = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
        highs += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
        low, high = max(lows, default=None), min(highs, default=None)
        if low is not None and high is not None and low > high:
            raise _error(path, f"cannot be met: no integer is from {low} to {high}")
        found = json_values.integer(low, high)
        return found if multiple is None else both([found, multiple])

    def decimal(self, bounds: dict[str, float], multiple: Node | None, path: str) -> Node:
        """Return numbers that are no integers by their type, with their bounds and multiples."""
        if not bounds and multiple is None:
            return json_values.NUMBER
        lows = [numbers.bound(bounds["minimum"])] if "minimum" in bounds else []
        if "exclusiveMinimum" in bounds:
            lows.append(numbers.bound(bounds["exclusiveMinimum"], is_open=True))
        highs = [numbers.bound(bounds["maximum"])] if "maximum" in bounds else []
        if "exclusiveMaximum" in bounds:
            highs.append(numbers.bound(bounds["exclusiveMaximum"], is_open=True, is_low=False))
        low, high = max(lows, default=None), min(highs, default=None)
        for value in (low, high):
            if value is not None and -int(value.normalize().as_tuple().exponent) > numbers.MAX_PLACES:
                raise _error(path, f"has a bound with more than {numbers.MAX_PLACES} digits in its fraction")
        if low is not None and high is not None and low > high:
            raise _error(path, f"cannot be met: no number is from {low} to {high}")
        found = numbers.decimal(low, high)
        return found if multiple is None else both([found, multiple])


def _multiple(value: Any, path: str, *, is_integer: bool) -> Node:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 1e-18 <= value < 10**json_values.MAX_DIGITS:
        raise _error(path, f"has multipleOf={shown(value)}, must be a number above 0 and below 1e18")
    found = numbers.multiples(Decimal(repr(value)), is_whole=is_integer)
    if found is None:
        raise _not_regular(path, f"multipleOf={shown(value)} has too many remainders")
    return found


def read_schema(value: str, limits: Limits) -> Any:
    """Return a schema from its text. Raises `GrammarError` for text that is long, deep or no JSON."""
    if len(value) > limits.max_spec_chars:
        raise GrammarError(f"schema has {len(value)} characters, must have at most {limits.max_spec_chars}")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as problem:
        raise GrammarError(f"schema={shown(value)} must be JSON that is not too deep: {problem}") from None


def _either(nodes: list[Node]) -> Node:
    kept = [node for node in nodes if node != NOTHING]
    return kept[0] if len(kept) == 1 else Either(tuple(kept))


def _count(schema: dict[str, Any], key: str, path: str) -> int | None:
    if key not in schema:
        return None
    value: Any = schema[key]
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not is_whole or not 0 <= value < 2**31:
        raise _error(path, f"has {key}={shown(value)}, must be a whole number from 0")
    return int(value)


def _has_type(value: Any, kind: str) -> bool:
    match value:
        case bool():
            return kind == "boolean"
        case None:
            return kind == "null"
        case int():
            return kind in ("integer", "number")
        case float():
            return kind == "number" or (kind == "integer" and value.is_integer())
        case str():
            return kind == "string"
        case list():
            return kind == "array"
    return kind == "object"


def _error(path: str, what: str) -> GrammarError:
    return GrammarError(f"schema at {path} {what}", path)


def _not_regular(path: str, why: str, *, is_recursive: bool = False) -> NotRegularError:
    return NotRegularError(f"schema at {path} has no automaton: {why}", path, is_recursive=is_recursive)
