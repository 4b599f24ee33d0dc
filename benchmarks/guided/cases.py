"""Schemas and other guides for benches: common ones, feature by feature, and hostile ones.

Pure data; knows no library.
"""

from __future__ import annotations

import json
from typing import Any

Schema = dict[str, Any]
Case = tuple[str, str, str]  # name, kind of guide, text


def _object(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


RECORD = _object(
    {
        "id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "name": {"type": "string", "maxLength": 20},
        "email": {"type": "string", "pattern": "^[a-z]{1,10}@[a-z]{1,10}\\.com$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4},
        "address": _object(
            {
                "street": {"type": "string", "maxLength": 20},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["DE", "FR", "US", "CN"]},
            }
        ),
        "active": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string", "maxLength": 30}, {"type": "null"}]},
    }
)
NODE = {"$ref": "#/$defs/node"}
TREE = {
    **NODE,
    "$defs": {"node": _object({"value": {"type": "integer"}, "next": {"anyOf": [NODE, {"type": "null"}]}})},
}
CALL = {
    "anyOf": [
        _object({"tool": {"const": f"tool_{i}"}, "arguments": _object({f"a{j}": {"type": "string"} for j in range(4)})})
        for i in range(12)
    ]
}

MID_SIZE: dict[str, Schema] = {
    "record": RECORD,
    "list of records": {"type": "array", "items": RECORD, "minItems": 1, "maxItems": 10},
    "tree": TREE,
    "tool call": CALL,
    "thirty fields": _object({f"field_{i}": {"type": ["string", "integer", "null"]} for i in range(30)}),
    "thirty optional fields": _object({f"field_{i}": {"type": "string"} for i in range(30)}, required=[]),
    "map of numbers": {"type": "object", "additionalProperties": {"type": "number"}},
    "two hundred choices": {"enum": [f"category {i}" for i in range(200)]},
}
FEATURES: dict[str, Schema] = {
    "any": {},
    "any object": {"type": "object"},
    "const": {"const": {"a": [1, "é"]}},
    "enum of many types": {"enum": [1, "a", None, [1], {"a": 1}]},
    "definitions": {"$ref": "#/definitions/a", "definitions": {"a": {"type": "string"}}},
    "allOf": {"allOf": [_object({"a": {"type": "integer"}}), {"required": ["a"]}]},
    "oneOf, distinct": {"oneOf": [_object({"k": {"const": "a"}}), _object({"k": {"const": "b"}})]},
    "oneOf, overlapping": {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    "not": {"not": {"type": "string"}},
    "if then else": {"if": {"type": "string"}, "then": {"maxLength": 3}, "else": {"type": "null"}},
    "minimum and maximum": {"type": "integer", "minimum": -3, "maximum": 1234},
    "number between": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "multipleOf": {"type": "integer", "multipleOf": 5},
    "minLength and maxLength": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]+$"},
    "pattern without anchors": {"type": "string", "pattern": "ab+"},
    "format date-time": {"type": "string", "format": "date-time"},
    "format email": {"type": "string", "format": "email"},
    "format uuid": {"type": "string", "format": "uuid"},
    "format uri": {"type": "string", "format": "uri"},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
    "minItems and maxItems": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3},
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "patternProperties": {"type": "object", "patternProperties": {"^x-": {"type": "string"}}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
    "minProperties": {"type": "object", "minProperties": 1, "maxProperties": 3},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
}

COUNTEREXAMPLES = {  # text that a feature forbids: a library that accepts it has not understood the feature
    "const": '{"a":[1,"e"]}',
    "enum of many types": "2",
    "allOf": "{}",
    "oneOf, overlapping": "3",
    "not": '"a"',
    "if then else": '"abcd"',
    "minimum and maximum": "1235",
    "number between": "1.5",
    "multipleOf": "7",
    "minLength and maxLength": '"abcdef"',
    "pattern": '"AB-1"',
    "format date-time": '"today"',
    "format email": '"me"',
    "format uuid": '"1"',
    "format uri": '"a b"',
    "prefixItems": '["a"]',
    "minItems and maxItems": "[null]",
    "uniqueItems": "[1,1]",
    "contains": "[2]",
    "patternProperties": '{"x-a":1}',
    "propertyNames": '{"A":1}',
    "minProperties": "{}",
    "dependentRequired": '{"a":1}',
}


def _chain(length: int) -> Schema:
    defs: Schema = {"d0": {"type": "integer"}}
    for i in range(1, length):
        below = {"$ref": f"#/$defs/d{i - 1}"}
        defs[f"d{i}"] = {"anyOf": [_object({"a": below, "b": below}), {"type": "array", "items": below}]}
    return {"$defs": defs, "$ref": f"#/$defs/d{length - 1}"}


MULTIPLES = {"type": "string", "allOf": [{"pattern": f"^({'.' * i})*$"} for i in (3, 5, 7, 11, 13, 17, 19)]}
HOSTILE: list[Case] = [
    ("a million repetitions", "regex", "a{1000000}"),
    ("nested repetitions", "regex", "((a{1,100}){1,100}){1,100}"),
    ("a choice of equals, starred", "regex", "(a|a)*(a|aa)+b{1,1000}"),
    ("a large automaton", "regex", "(.*a){200}.{500}b"),
    ("five thousand parentheses", "regex", "(" * 5000 + "a" + ")" * 5000),
    ("a hundred thousand choices", "json", json.dumps({"enum": [f"v{i}" for i in range(100_000)]})),
    ("a reference to itself", "json", json.dumps({"$ref": "#"})),
    ("references that double", "json", json.dumps(_chain(200))),
    ("five thousand optional fields", "json", json.dumps(_object({f"p{i}": {} for i in range(5000)}, []))),
    ("divisible by a large prime", "json", json.dumps({"type": "integer", "multipleOf": 99999989})),
    ("many patterns at once", "json", json.dumps(MULTIPLES)),
    ("left recursion", "grammar", 'root ::= root root | root "a" | "a"'),
    ("rules in a circle", "grammar", "root ::= a\na ::= b\nb ::= a"),
    ("a repeated literal", "grammar", 'root ::= "a"{1000000}'),
]
