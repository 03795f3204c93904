"""Cases of JSON schemas that combine others, as `schema_cases` has them of single keywords."""

COMBINED = {
    "allOf": [
        (
            {"allOf": [{"type": "number", "minimum": 3}, {"type": "integer", "maximum": 5}]},
            ["3", "5"],
            ["2", "6"],
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/base"}],
                "properties": {"b": {"const": 2}},
                "$defs": {
                    "base": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
                },
            },
            ['{"b":2,"a":1}', '{"a":1}'],
            ['{"b":2}', '{"a":1,"c":1}', '"a"'],
        ),
        (
            {"$ref": "#/$defs/s", "minLength": 2, "$defs": {"s": {"type": "string", "maxLength": 3}}},
            ['"ab"'],
            ['"a"', '"abcd"'],
        ),
    ],
    "anyOf beside others": [
        (
            {
                "type": "object",
                "properties": {"a": {"const": 1}, "b": {"const": 1}},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
            ["{}"],
        ),
    ],
    "oneOf": [
        (
            {
                "type": "object",
                "properties": {"k": {"enum": ["a", "b"]}},
                "required": ["k"],
                "oneOf": [
                    {"properties": {"k": {"const": "a"}, "x": {"const": 1}}, "required": ["x"]},
                    {"properties": {"k": {"const": "b"}, "y": {"const": 1}}},
                ],
            },
            ['{"k":"a","x":1}', '{"k":"b","y":1}', '{"k":"b"}'],
            ['{"k":"a"}', '{"k":"a","y":1}', '{"k":"b","x":1}'],
        ),
        (
            {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 10}]},
            ["-1", "11"],
            ["5", "0"],
        ),
        (
            {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "minLength": 3}]},
            ['"ab"', '"xyz"'],
            ['"abc"', '"x"'],
        ),
        (
            {
                "$ref": "#/$defs/n",
                "$defs": {
                    "n": {
                        "oneOf": [
                            {"type": "object", "properties": {"t": {"const": 0}}, "required": ["t"]},
                            {
                                "type": "object",
                                "properties": {"t": {"const": 1}, "c": {"$ref": "#/$defs/n"}},
                                "required": ["t", "c"],
                            },
                        ]
                    }
                },
            },
            ['{"t":0}', '{"t":1,"c":{"t":1,"c":{"t":0}}}'],
            ['{"t":1}', '{"t":0,"c":{"t":0}}'],
        ),
    ],
    "not": [
        ({"type": "string", "not": {"enum": ["a", "b"]}}, ['"c"', '""', '"ab"'], ['"a"', '"b"']),
        ({"type": "number", "not": {"const": 3}}, ["2", "3.1", "-3"], ["3", "3.0"]),
        ({"type": "number", "not": {"type": "integer"}}, ["2.5"], ["2", "2.0"]),
        (
            {"type": ["string", "null", "boolean"], "not": {"anyOf": [{"type": "string"}, {"const": True}]}},
            ["null", "false"],
            ["true", '"a"'],
        ),
        ({"type": "string", "not": {"pattern": "^a"}}, ['""', '"ba"'], ['"a"', '"ab"']),
    ],
    "if, then, else; dependentRequired, dependentSchemas": [
        (
            {
                "type": "object",
                "properties": {"a": {"enum": [1, 2]}, "b": {"const": 1}},
                "required": ["a"],
                "if": {"properties": {"a": {"const": 1}}},
                "then": {"required": ["b"]},
                "else": {"properties": {"b": False}},
            },
            ['{"a":1,"b":1}', '{"a":2}'],
            ['{"a":1}', '{"a":2,"b":1}'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"const": 1}, "b": {"const": 1}, "c": {"const": 1}},
                "dependentRequired": {"a": ["b"]},
                "dependentSchemas": {"c": {"properties": {"b": False}}},
            },
            ["{}", '{"a":1,"b":1}', '{"c":1}'],
            ['{"a":1}', '{"b":1,"c":1}', '{"a":1,"c":1}'],
        ),
    ],
    "patternProperties, propertyNames": [
        (
            {
                "type": "object",
                "patternProperties": {"^x-": {"const": 1}, "y$": {"type": "integer", "maximum": 1}},
            },
            ["{}", '{"x-a":1}', '{"x-y":1,"y":-1}'],
            ['{"x-a":-1}', '{"x-y":0}', '{"z":1}'],
        ),
        (
            {
                "type": "object",
                "properties": {"x-q": {"type": "integer"}},
                "patternProperties": {"^x-": {"type": "integer", "minimum": 3}},
                "additionalProperties": {"const": None},
            },
            ['{"x-q":3}', '{"x-q":3,"b":null}', '{"x-r":4}'],
            ['{"x-q":2}', '{"x-r":null}', '{"b":3}'],
        ),
        (
            {
                "type": "object",
                "propertyNames": {"pattern": "^[a-cé]$"},
                "additionalProperties": {"const": 1},
            },
            ["{}", '{"a":1,"é":1}'],
            ['{"d":1}', '{"aa":1}'],
        ),
    ],
    "uniqueItems, contains": [
        (
            {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "minItems": 1},
            ['["a"]', '["b",1,"a"]'],
            ["[]", "[1,1]", '["a","b","a"]'],
        ),
        (
            {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "maxItems": 3},
            ["[2]", "[1,1,2]", "[2,2]"],
            ["[]", "[1]", "[1,1,1,2]"],
        ),
        (
            {
                "type": "array",
                "items": {"enum": [1, 2]},
                "contains": {"const": 2},
                "minContains": 0,
                "maxContains": 2,
            },
            ["[]", "[1]", "[2,1,2]"],
            ["[2,2,2]", "[2,1,2,1,2]"],
        ),
        (
            {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "minContains": 2},
            ["[2,2]", "[2,1,2,1,2]"],
            ["[2]", "[2,1]"],
        ),
    ],
    "unevaluatedProperties": [
        (
            {
                "type": "object",
                "unevaluatedProperties": False,
                "properties": {"x": {"const": 1}},
                "$ref": "#/$defs/b",
                "$defs": {"b": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}},
            },
            ['{"x":1,"a":1}'],
            ['{"a":1,"b":1}', '{"x":1}'],
        ),
    ],
    "enum beside others": [
        ({"enum": [1, "abc", 2, [1]], "minimum": 2, "minLength": 4}, ["2", "[1]"], ["1", '"abc"']),
        (
            {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2.0, 3, 4]}], "not": {"const": 3}},
            ["2"],
            ["1", "3", "4"],
        ),
    ],
    "without a type": [
        ({"properties": {"a": {"const": 1}}}, ['{"a":1}', '"x"', "[1,{}]", "1.5"], ['{"a":2}']),
        ({"type": "object", "required": ["z"]}, ['{"z":1}', '{"z":[],"a":1}'], ['{"a":1}']),
    ],
}
