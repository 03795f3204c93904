"""Random JSON schemas that combine others over few values, and values to try them with."""

import numpy as np

VALUES = [
    *(0, 1, 2, 3, -1, 2.5, "", "a", "b", "ab", "ba", "aab", None, True, False),
    *(
        {},
        {"a": 1},
        {"a": "a"},
        {"b": 2},
        {"a": 1, "b": 1},
        {"a": "b", "b": 3},
        {"c": 0},
        {"ab": 1, "b": "a"},
    ),
    *([], [1], [1, 1], [1, 2], ["a", 1], [2, 2, 1], [None]),
]
SCALARS = ["integer", "number", "string", "null", "boolean"]


def leaf(rng: np.random.Generator) -> dict:
    """Return a schema of scalars, by one or two keywords."""
    low, high = sorted(int(x) for x in rng.integers(-1, 4, 2))
    choices = [
        {"type": str(rng.choice(SCALARS))},
        {"type": "integer", "minimum": low, "exclusiveMaximum": high + 1},
        {"type": "number", "exclusiveMinimum": low},
        {"type": "integer", "multipleOf": 2},
        {"type": "string", "pattern": str(rng.choice(["^a", "b$", "a", "^(a|ab)$"]))},
        {"type": "string", "minLength": max(low, 0), "maxLength": max(high, 0)},
        {"enum": [VALUES[i] for i in rng.choice(15, 3, replace=False)]},
        {"const": VALUES[rng.integers(15)]},
        {"type": ["string", "integer"]},
    ]
    return choices[rng.integers(len(choices))]


def combined(rng: np.random.Generator, levels: int = 2) -> dict:
    """Return a schema of types, objects or arrays, with others combined beside its own keywords."""
    made: dict = leaf(rng)
    kind = rng.integers(4)
    if kind == 0:
        names = [str(name) for name in rng.choice(["a", "b", "ab"], rng.integers(1, 3), replace=False)]
        made = {"type": "object", "properties": {name: leaf(rng) for name in names}}
        made["additionalProperties"] = leaf(rng) if rng.random() < 0.5 else False
        made["required"] = [name for name in names if rng.random() < 0.3]
        extra = [
            {"patternProperties": {str(rng.choice(["^a", "b"])): leaf(rng)}},
            {"propertyNames": {"pattern": str(rng.choice(["^a", "b"]))}},
            {"maxProperties": int(rng.integers(3))},
            {"dependentRequired": {"a": ["b"]}},
            {"dependentSchemas": {"b": {"properties": {"a": leaf(rng)}}}},
        ]
        made |= extra[rng.integers(len(extra))] if rng.random() < 0.5 else {}
    elif kind == 1:
        made = {"type": "array", "items": leaf(rng), "maxItems": int(rng.integers(1, 4))}
        extra = [
            {"contains": leaf(rng), "minContains": int(rng.integers(3))},
            {"contains": leaf(rng), "maxContains": int(rng.integers(1, 3))},
            {"prefixItems": [leaf(rng)]},
            {"items": {"enum": [1, 2, "a"]}, "uniqueItems": True},
        ]
        made |= extra[rng.integers(len(extra))] if rng.random() < 0.7 else {}
    if not levels or rng.random() < 0.2:
        return made
    for key in rng.choice(["allOf", "anyOf", "oneOf", "not", "if"], rng.integers(1, 3), replace=False):
        if key == "not":
            made["not"] = part(rng, levels - 1)
        elif key == "if":
            made |= {
                word: part(rng, levels - 1)
                for word in ("if", "then", "else")
                if word == "if" or rng.random() < 0.7
            }
        else:
            made[str(key)] = [part(rng, levels - 1) for _ in range(rng.integers(1, 4))]
    if rng.random() < 0.5 and "type" in made:  # what stands beside may allow more types
        made["type"] = (
            [*SCALARS, "object", "array"] if made["type"] not in ("object", "array") else made["type"]
        )
    return made


def part(rng: np.random.Generator, levels: int) -> dict:
    """Return a part of a combination: a schema, or keywords without a type."""
    if rng.random() < 0.5:
        return combined(rng, levels)
    low = int(rng.integers(0, 3))
    choices = [
        *({"minimum": low}, {"maximum": low}, {"minLength": low}, {"pattern": "a"}, {"multipleOf": 2}),
        *({"required": ["a"]}, {"properties": {"a": leaf(rng)}}, {"minItems": low}, {"maxProperties": low}),
        *({"properties": {"a": leaf(rng)}, "required": ["a"]}, {"items": leaf(rng)}, {"not": leaf(rng)}),
    ]
    return choices[rng.integers(len(choices))]
