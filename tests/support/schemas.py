"""Random JSON schemas with short values only, so that a model with random weights finishes."""

from __future__ import annotations

import random
from typing import Any

MAX_DEPTH = 3


def random_schema(seed: int) -> dict[str, Any]:
    """Returns a schema with an object at the top and any types below, including `$ref` into `$defs`."""
    rng = random.Random(seed)
    schema = _object(rng, MAX_DEPTH)
    schema["$defs"] = {"shared": _value(rng, 0)}
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _string, _integer, _fixed, _simple]
    if depth:
        makers += [_object, _array, _either, _reference]
    maker = rng.choice(makers)
    return maker(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["id", "name", "größe", "a b", 'q"q', "tags", "note", "x-1"], rng.randint(0, 4))
    return {
        "type": "object",
        "title": "some words",
        "properties": {name: _value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if rng.random() < 0.3:
        return {**schema, "minItems": 0, "maxItems": 2, "prefixItems": [_value(rng, 0)], "items": _value(rng, depth)}
    return {**schema, "items": _value(rng, depth)}


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth) for _ in range(rng.randint(1, 3))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": "#/$defs/shared", "description": "elsewhere"}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return rng.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 4)},
            {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^(ab|cd)+x?$", "^[0-9]{3}-[A-Z]{2}$"])}
            | {"maxLength": 12},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
        ]
    )


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(-1000, 1000)
    extra = rng.choice([{}, {"multipleOf": rng.randint(2, 9)}])
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(20, 5000), **extra}


def _fixed(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [1, -2.5, "one", "zwei\n", None, True, ["a", 1], {"k": []}]
    return rng.choice([{"const": rng.choice(values)}, {"enum": rng.sample(values, rng.randint(1, 4))}])


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])


def random_value(schema: dict[str, Any], rng: random.Random, top: dict[str, Any]) -> Any:
    """Returns a value that satisfies such a schema; an object's properties are in the schema's order."""
    if "$ref" in schema:
        return random_value(top["$defs"]["shared"], rng, top)
    if "anyOf" in schema:
        return random_value(rng.choice(schema["anyOf"]), rng, top)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else rng.choice(schema["enum"])
    match schema["type"]:
        case "object":
            chosen = [name for name in schema["properties"] if name in schema["required"] or rng.random() < 0.5]
            return {name: random_value(schema["properties"][name], rng, top) for name in chosen}
        case "array":
            length = rng.randint(schema["minItems"], schema["maxItems"])
            first = [random_value(each, rng, top) for each in schema.get("prefixItems", [])][:length]
            return first + [random_value(schema["items"], rng, top) for _ in range(length - len(first))]
        case "integer":
            step = schema.get("multipleOf", 1)
            return rng.randint(-(-schema["minimum"] // step), schema["maximum"] // step) * step
        case "string":
            return _random_text(schema, rng)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case _:
            return rng.choice([True, None])


def _random_text(schema: dict[str, Any], rng: random.Random) -> str:
    examples = {
        "date": ["2024-02-29", "1999-12-31"],
        "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
        "ipv4": ["127.0.0.1", "255.255.255.255"],
        "^[a-z]{2,5}$": ["ab", "vwxyz"],
        "^(ab|cd)+x?$": ["ab", "abcdcdx"],
        "^[0-9]{3}-[A-Z]{2}$": ["123-AB"],
    }
    key = schema.get("format", schema.get("pattern"))
    if key is not None:
        return rng.choice(examples[key])
    return "".join(rng.choices('aé"\\\n🙂 /', k=rng.randint(schema["minLength"], schema["maxLength"])))
