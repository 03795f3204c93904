"""Cases of JSON schemas by the chapters of draft 2020-12: texts that may be written, and texts that may not.

Texts that may not be written are invalid, or `NARROWER`: valid, but not in the form that we write.
"""

import numpy as np

from tests.grammar.combined_cases import COMBINED

CASES = {
    "type": [
        ({"type": "integer"}, ["0", "-0", "12", "-301"], ["01", "1.5", "+1", "", '"1"']),
        ({"type": "number"}, ["0", "-1.50", "2e9", "1E-07", "0.0"], [".5", "1.", "00", "1e", "NaN"]),
        ({"type": "boolean"}, ["true", "false"], ["True", "1", "null"]),
        ({"type": "null"}, ["null"], ["false", ""]),
        ({"type": ["string", "null"]}, ['"a"', "null"], ["nul", "1"]),
        (
            {"type": "string"},
            ['""', '"é\\n\\u00e9"', '"\\ud83d\\ude42🙂"', '"\\/"'],
            ['"\n"', '"\\x"', '"\\ud83d"', '"a'],
        ),
    ],
    "enum, const": [
        ({"enum": [1, "a", None, {"b": [1.5]}]}, ["1", '"a"', "null", '{"b": [1.5]}'], ["2", "true"]),
        ({"enum": [1, "a", True], "type": "string"}, ['"a"'], ["1", "true"]),
        ({"const": 'é"\\'}, ['"é\\"\\\\"'], ['"e"']),
        ({"enum": [0, 1.0, False], "type": "integer"}, ["0", "1.0"], ["false"]),
    ],
    "minLength, maxLength": [
        (
            {"type": "string", "minLength": 2},
            ['"ab"', '"🙂\\n"', '"abc"'],
            ['"a"', '"\\n"', '"\\ud83d\\ude42"'],
        ),
        ({"type": "string", "maxLength": 2}, ['""', '"🙂🙂"', '"\\u0041b"'], ['"abc"']),
        ({"type": "string", "minLength": 1.0, "maxLength": 1}, ['"a"'], ['""', '"ab"']),
    ],
    "$id": [
        (
            {
                "type": "array",
                "items": {
                    "$id": "of:its:own",
                    "anyOf": [{"$ref": "#/$defs/a"}],
                    "$defs": {"a": {"const": 1}},
                },
                "$defs": {"a": {"const": 2}},
            },
            ["[1]"],
            ["[2]"],
        ),
    ],
    "pattern": [
        ({"type": "string", "pattern": "^\\S+$"}, ['"ab"'], ['"\u00a0"', '"a\ufeffb"', '"a\u3000"']),
        ({"type": "string", "not": {"pattern": "\\s"}}, ['"ab"'], ['"\u00a0"', '"a b"']),
        ({"type": "string", "pattern": "^a+$"}, ['"a"', '"aaa"'], ['""', '"ab"', '"ba"']),
        ({"type": "string", "pattern": "b"}, ['"b"', '"abc"', '"\\nb"'], ['"a"', '""']),
        ({"type": "string", "pattern": '^["\\\\\\n]{2}$'}, ['"\\"\\\\"', '"\\n\\n"'], ['""\\"', '"nn"']),
        ({"type": "string", "pattern": "^\\d{3}-[^x]|y$"}, ['"123-é"', '"xy"'], ['"12-a"', '"123-x"']),
    ],
    "format": [
        (
            {"type": "string", "format": "date"},
            ['"2024-02-29"', '"2000-02-29"', '"1999-12-31"', '"2023-04-30"'],
            ['"2023-02-29"', '"1900-02-29"', '"2023-04-31"', '"2023-13-01"', '"0000-01-01"', '"0000-02-29"'],
        ),
        (
            {"type": "string", "format": "time"},
            ['"23:59:59Z"', '"00:00:00.5+01:30"'],
            ['"24:00:00Z"', '"12:00:00"'],
        ),
        (
            {"type": "string", "format": "ipv6"},
            ['"::"', '"1::8"', '"1:2:3:4:5:6:7:8"', '"::ffff:0"', '"2001:db8::1"', '"1:2:3:4:5:6:7::"'],
            ['"1:2:3"', '"1::2::3"', '"12345::"', '"1:2:3:4:5:6:7:8:9"', '":1"', '"1:2:3:4:5:6:7:8::"'],
        ),
        (
            {"type": "string", "format": "email"},
            ['"joe.bloggs@example.com"', '"te~st@a-b.c1"'],
            ['"2962"', '".test@example.com"', '"te..st@example.com"', '"a@-b"', '"a@b."', '"a b@c"'],
        ),
        (
            {"type": "string", "format": "hostname"},
            ['"www.example.com"', '"a"', '"a-b.c-1"'],
            ['"-a"', '"a-"', '"a_b"', '"a..b"', '"%s"' % ("a" * 64), '""'],
        ),
        (
            {"type": "string", "format": "duration"},
            ['"P4DT12H30M5S"', '"P4Y"', '"PT0S"', '"P1M2D"', '"P2W"', '"PT1H30M"'],
            ['"PT1D"', '"P"', '"P1YT"', '"P1D2H"', '"P1Y2W"', '"4DT1H"', '"PT1H2S"', '"P1Y2D"'],
        ),
        (
            {"type": "string", "format": "uri"},
            [
                '"https://user@example.com:80/a%20b?q=1/2#x"',
                '"mailto:a@b"',
                '"urn:x:y"',
                '"a:"',
                '"file:///x"',
            ],
            ['"//a"', '"abc"', '"https://a b"', '"a:%zz"', '"\\\\x"', '":b"'],
        ),
        (
            {"type": "string", "format": "json-pointer"},
            ['""', '"/a~1b/~0/"', '"/"'],
            ['"a"', '"/~"', '"/a~2"'],
        ),
        ({"type": "string", "format": "uuid4"}, ['"123e4567-e89b-42d3-a456-426614174000"'], ['"123e4567"']),
        ({"type": "string", "format": "date-time"}, ['"2024-02-29T12:00:00Z"'], ['"2024-02-30T12:00:00Z"']),
        ({"type": "string", "format": "uuid"}, ['"123e4567-E89b-12d3-a456-426614174000"'], ['"123e4567"']),
        ({"type": "string", "format": "ipv4"}, ['"0.10.200.255"'], ['"1.2.3"', '"1.2.3.256"', '"01.2.3.4"']),
    ],
    "minimum, maximum of integers": [
        (
            {"type": "integer", "minimum": 3, "maximum": 120},
            ["3", "9", "10", "99", "120"],
            ["2", "121", "-3", "003"],
        ),
        ({"type": "integer", "minimum": -12, "exclusiveMaximum": 5}, ["-12", "-1", "0", "4"], ["-13", "5"]),
        ({"type": "integer", "exclusiveMinimum": 9.5}, ["10", "11", "99", "1000"], ["9", "0", "-10"]),
        ({"type": "integer", "maximum": -1}, ["-1", "-10", "-999"], ["0", "1", "-0"]),
        ({"type": "integer", "maximum": 17}, ["17", "0", "-1", "-18", "9"], ["18", "20", "100"]),
        ({"type": "integer", "minimum": -3}, ["-3", "0", "5", "77"], ["-4", "-10"]),
    ],
    "multipleOf": [
        ({"type": "integer", "multipleOf": 7}, ["0", "7", "-14", "700"], ["1", "71", "07", "-"]),
        (
            {"type": "integer", "multipleOf": 300, "minimum": 1, "maximum": 3000},
            ["300", "2100", "3000"],
            ["0", "30", "3300", "310"],
        ),
        ({"type": "integer", "multipleOf": 1.5}, ["0", "3", "9"], ["1", "2"]),
        (
            {"type": "number", "multipleOf": 0.25, "maximum": 10},
            ["0.25", "-7.5", "10.00", "3", "1.250"],
            ["0.3", "10.25", "1.2", "2.251", "1."],
        ),
        ({"type": "number", "multipleOf": 4}, ["8", "-4.0", "0.00"], ["6", "4.5", "4."]),
    ],
    "minimum, maximum of numbers": [
        (
            {"type": "number", "minimum": 0, "maximum": 1},
            ["0", "1", "0.5", "1.000", "-0.0", "0.999999999999"],
            ["1.01", "-0.1", "2", "01", "0.", "10", ".5"],
        ),
        (
            {"type": "number", "exclusiveMinimum": -2.5, "exclusiveMaximum": 12.25},
            ["-2.49", "12.2499", "0", "-1", "12.1", "9.9", "11.99"],
            ["-2.5", "12.25", "12.250", "13", "-2.51", "12.3", "-3"],
        ),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.0001", "7", "10.0"], ["0", "0.0", "-1", "-0"]),
        ({"type": "number", "maximum": -0.5}, ["-0.5", "-0.50", "-3"], ["0", "-0.4", "-0.49", "-0"]),
        ({"type": "number", "minimum": 3.05, "maximum": 3.05}, ["3.05", "3.050"], ["3.0", "3.051", "3"]),
    ],
    "pattern beside a length": [
        (
            {"type": "string", "pattern": "^[a-c]+$", "minLength": 2, "maxLength": 3},
            ['"ab"', '"ccc"'],
            ['"a"', '"abca"', '"ad"', '""'],
        ),
        ({"type": "string", "pattern": "é", "maxLength": 2}, ['"é"', '"\\né"'], ['"abé"', '"a"']),
        ({"type": "string", "format": "date", "pattern": "^2"}, ['"2024-01-31"'], ['"1999-01-31"']),
    ],
    "minProperties, maxProperties": [
        (
            {"type": "object", "properties": {k: {"const": 1} for k in "abc"}, "minProperties": 2},
            ['{"a":1,"b":1}', '{"b":1,"c":1}', '{"a":1,"b":1,"c":1}'],
            ["{}", '{"b":1}', '{"b":1,}'],
        ),
        (
            {"type": "object", "properties": {k: {"const": 1} for k in "abc"}, "maxProperties": 2},
            ["{}", '{"c":1}', '{"a":1,"c":1}'],
            ['{"a":1,"b":1,"c":1}', '{,"a":1}'],
        ),
        (
            {
                "type": "object",
                "additionalProperties": {"const": 1},
                "minProperties": 1,
                "maxProperties": 2,
            },
            ['{"x":1}', '{"x":1,"":1}'],
            ["{}", '{"x":1,"y":1,"z":1}'],
        ),
    ],
    "properties, required": [
        (
            {
                "type": "object",
                "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
                "required": ["b"],
            },
            ['{"b":null}', '{ "a" : null,\n"b": null }'],
            ["{}", '{"a":null}', '{"a":null "b":null}', '{"b":null,}'],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
            ["{}", '{"a":null}', '{"b":null}', '{"a":null,"b":null}'],
            ['{,"b":null}', '{"a":null,}', '{"c":null}'],
        ),
        (
            {"type": "object", "properties": {'é"': {"const": 1}, "no": False}},
            ['{"é\\"":1}', "{}"],
            ['{"no":1}'],
        ),
    ],
    "additionalProperties": [
        (
            {"type": "object", "additionalProperties": {"type": "null"}},
            ["{}", '{"":null}', '{"x":null,"y":null}'],
            ['{"x":1}', "{x:null}"],
        ),
        (
            {"type": "object", "properties": {"ab": {"const": 1}}, "additionalProperties": {"const": 2}},
            ['{"ab":1}', '{"a":2}', '{"abc":2}', '{"ab":1,"b":2}'],
            ['{"ab":2}', '{"a":1}', '{"b":2,"ab":2}'],
        ),
        (
            {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False},
            ['{"a":1}', "{}"],
            ['{"b":1}'],
        ),
    ],
    "items, prefixItems": [
        (
            {"type": "array", "items": {"type": "null"}},
            ["[]", "[null]", "[ null , null ]"],
            ["[null,]", "[1]"],
        ),
        (
            {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False},
            ["[]", "[1]", "[1,2]"],
            ["[2]", "[1,2,3]", "[1,]"],
        ),
        (
            {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 0}, "minItems": 2},
            ["[1,0]", "[1,0,0]"],
            ["[1]", "[]", "[0,0]"],
        ),
    ],
    "minItems, maxItems": [
        (
            {"type": "array", "items": {"const": 0}, "minItems": 1, "maxItems": 3},
            ["[0]", "[0,0,0]"],
            ["[]", "[0,0,0,0]"],
        ),
        ({"type": "array", "items": {"const": 0}, "maxItems": 0}, ["[]"], ["[0]"]),
        ({"type": "array", "items": {"const": 0}, "minItems": 2}, ["[0,0]", "[0,0,0]"], ["[0]"]),
    ],
    "anyOf": [
        (
            {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 7}, {"type": "null"}]},
            ["5", "null"],
            ["4", "true"],
        ),
        ({"anyOf": [False, {"const": 1}]}, ["1"], ["2"]),
    ],
    "$ref, $defs": [
        (
            {
                "$ref": "#/$defs/a~1b",
                "$defs": {"a/b": {"type": "array", "items": {"$ref": "#/$defs/c"}}, "c": {"const": 1}},
            },
            ["[]", "[1,1]"],
            ["1", "[2]"],
        ),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
            ["[]", "[[],[[]]]"],
            ["[1]", "[[]"],
        ),
    ],
    "any value": [
        (True, ["1", '{"a":[true,null]}', "[[]]"], ["{a:1}", "[1"]),
        ({}, ['"a"', '{"a":{"b":1}}'], ["tru"]),
        ({"type": "object"}, ["{}", '{"a":1,"b":[{}]}'], ["[]", "1"]),
        ({"type": "array", "title": "x", "x-own": 1}, ["[]", '[1,"a"]'], ["{}"]),
    ],
}
CASES |= COMBINED
# Valid under the schema, and not written by us.
NARROWER = [
    ({"type": "integer"}, ["1.0", "1e3"]),
    (CASES["properties, required"][1][0], ['{"b":null,"a":null}', '{"c":1}']),
    ({"enum": ["é"]}, ['"\\u00e9"']),
    ({"type": "null"}, [" null", "null "]),
]
REFUSED = [
    (False, "#", "cannot be met"),
    ({"enum": []}, "#", "cannot be met"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "#", "no integer is from 3 to 2"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "#", "minLength=3"),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": False, "minItems": 2}, "#", "only 1 items"),
    (
        {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
        "#/properties/a",
        "is required",
    ),
    ({"type": "object", "required": ["b"], "additionalProperties": False}, "#", "requires 'b'"),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "#/items", "uniqueItems is only"),
    ({"type": "object", "properties": {"a": {"type": "string", "madeUp": 1}}}, "#/properties/a", "'madeUp'"),
    ({"anyOf": [{"const": 1}, {"not": {"items": {"const": 1}}}]}, "#/anyOf/1/not", "a negation of items"),
    ({"not": {}}, "#", "no value is valid"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "#", "no value is valid"),
    ({"allOf": [{"type": "string", "minLength": 3}, {"maxLength": 2}]}, "#/allOf/0", "minLength=3"),
    ({"oneOf": [{"const": 1}, {"const": 1}]}, "#", "no value is valid"),
    (
        {"type": "array", "items": {"enum": list(range(9))}, "uniqueItems": True},
        "#",
        "of at most 8 values",
    ),
    (
        {"type": "object", "patternProperties": {key: {"const": 1} for key in "abcde"}},
        "#",
        "more than 4 patterns",
    ),
    ({"allOf": [{"unevaluatedProperties": False}, {"type": "object"}]}, "#/allOf/0", "outermost"),
    ({"enum": ["a"], "pattern": "("}, "#/pattern", "cannot be read"),
    ({"enum": [1], "allOf": [{"$ref": "https://example.org/s"}]}, "#/allOf/0", "nothing is fetched"),
    ({"enum": [{}], "properties": {"a": {}}, "not": {"$ref": "#"}}, "#/not", "itself"),
    ({"type": "object", "dependentRequired": {"a": "b"}}, "#/dependentRequired", "not a list of names"),
    ({"type": "object", "$dynamicRef": "#a"}, "#", "$dynamicRef is not followed"),
    ({"type": "array", "items": {"type": "any"}}, "#/items", "type='any'"),
    ({"type": "number", "minimum": 1e-50}, "#", "digits in its fraction"),
    ({"type": "number", "minimum": 0.5, "maximum": 0.25}, "#", "no number is from 0.5 to 0.25"),
    ({"type": "integer", "multipleOf": 0}, "#", "multipleOf=0"),
    ({"type": "integer", "multipleOf": 99991}, "#", "too many remainders"),
    ({"type": "object", "minProperties": 2}, "#", "minProperties=2"),
    ({"type": "object", "required": [], "properties": {"a": {}}, "minProperties": 2}, "#", "only 1"),
    ({"type": "integer", "minimum": 10**500}, "#", "minimum="),
    ({"type": "string", "minLength": -1}, "#", "minLength=-1"),
    ({"type": "string", "maxLength": True}, "#", "maxLength=True"),
    ({"type": "string", "pattern": "(?=a)"}, "#/pattern", "look-around"),
    ({"type": "string", "format": "iri"}, "#", "format='iri'"),
    ({"$ref": "#/$defs/x"}, "#", "not in the schema"),
    ({"$ref": "https://example.org/s"}, "#", "nothing is fetched"),
    ({"$ref": "#"}, "#", "itself only"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "#/$defs/b",
        "itself only",
    ),
    (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}},
        },
        "#/$defs/a",
        "met",
    ),
    ([1], "#", "must be an object or a boolean"),
    ({"type": "object", "properties": []}, "#", "properties"),
    ({"type": "object", "required": "a"}, "#", "required"),
    ({"anyOf": []}, "#", "anyOf"),
    ({"enum": 3}, "#", "enum"),
]


def deep(levels: int) -> dict:
    schema: dict = {"const": 1}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def doubling(levels: int) -> dict:
    """Make a schema whose references double what they stand for, `levels` times."""
    defs: dict = {"a0": {"const": 1}}
    for i in range(levels):
        defs[f"a{i + 1}"] = {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i}"}] * 2, "items": False}
    return {"$ref": f"#/$defs/a{levels}", "$defs": defs}


BOMBS = [
    {"type": "object", "properties": {"a" * 50_000: {"const": 1}}, "additionalProperties": {"const": 1}},
    deep(60),
    deep(500),
    doubling(30),
    {"type": "string", "maxLength": 2**30},
    {"type": "array", "items": {"type": "array", "items": {"const": 1}, "maxItems": 999}, "maxItems": 999},
    {"type": "string", "pattern": "((a{0,999}){0,999}){0,999}"},
    {"type": "string", "pattern": "(a|b)*a(a|b){30}"},
    {"enum": [f"{i}" * 40 for i in range(9999)]},
    {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(1, 20)], "type": "integer"},
    {"oneOf": [{"type": "object", "properties": {str(i): {"type": "string"}}} for i in range(50)]},
    {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(5, 14, 2)]},
    {"type": "array", "items": {"enum": [f"{i}" * 400 for i in range(8)]}, "uniqueItems": True},
    {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"properties": {"b": {"$ref": "#/$defs/a"}}}] * 9}}},
    {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"oneOf": [{"items": {"$ref": "#/$defs/a"}}, {"not": {"$ref": "#/$defs/a"}}]}},
    },
    {"type": "object", "dependentRequired": {f"p{i}": [f"q{i}"] for i in range(20)}},
    {"enum": ["a" * 40 + "!"], "pattern": "^(a|a)*$"},
]


def random_schema(rng: np.random.Generator, levels: int = 3):
    """Return a schema of the supported part that some value is valid under."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "format"]
    kind = str(rng.choice([*kinds, *(["object", "object", "array", "anyOf"] if levels else [])]))
    low, more = (int(x) for x in rng.integers(0, 3, 2))
    match kind:
        case "string":
            return {"type": "string", "minLength": low, **({"maxLength": low + more} if more else {})}
        case "integer":
            bounds = sorted(int(x) for x in rng.integers(-300, 300, 2))
            sides = {"minimum": bounds[0], "maximum": bounds[1], "exclusiveMaximum": bounds[1] + 1}
            return {"type": "integer", **{key: sides[key] for key in sides if rng.random() < 0.5}}
        case "enum":
            values = [1, -2.5, "a", 'é"', None, True, [], {"k": [0]}, "漢", 10**12]
            return {"enum": [values[i] for i in rng.choice(len(values), 1 + more, replace=False)]}
        case "pattern":
            return {
                "type": "string",
                "pattern": str(rng.choice(["^a{1,3}$", "^[^a]b?", "x|y$", "é+|\\d{2}"])),
            }
        case "format":
            return {
                "type": "string",
                "format": str(rng.choice(["date", "time", "uuid", "ipv4", "date-time"])),
            }
        case "object":
            names = [
                str(name) for name in rng.choice(["name", "id", "é", 'q"', "", "ab"], more + 1, replace=False)
            ]
            made = {"type": "object", "properties": {name: random_schema(rng, levels - 1) for name in names}}
            made["required"] = [name for name in names if rng.random() < 0.5]
            rest = [{}, {"additionalProperties": False}, {"additionalProperties": random_schema(rng, 0)}]
            return made | rest[int(rng.integers(3))]
        case "array":
            made = {"type": "array", "items": random_schema(rng, levels - 1), "minItems": low}
            first = {"prefixItems": [random_schema(rng, 0) for _ in range(more)]} if more else {}
            return made | first | ({"maxItems": low + more} if rng.random() < 0.5 else {})
        case "anyOf":
            return {"anyOf": [random_schema(rng, levels - 1) for _ in range(more + 1)]}
    return {"type": kind}
