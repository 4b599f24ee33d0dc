"""The types that a JSON schema allows for a tool's parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Types = frozenset[str]
ANY: Types = frozenset()
MAX_DEPTH = 8  # nested references and alternatives
# Some clients' names for JSON schema's types.
NAMES = {"str": "string", "bool": "boolean", "int": "integer", "float": "number", "list": "array", "dict": "object"}
PYTHON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def types_of(parameters: Mapping[str, Any], name: str) -> Types:
    """Returns the types that a parameter may have; empty: unknown, or any."""
    properties = parameters.get("properties")
    return types_in(properties.get(name) if isinstance(properties, dict) else None, parameters)


def types_in(given: Any, root: Mapping[str, Any]) -> Types:
    """Returns the types of a schema's values. `root`: the schema that it may refer to."""
    return _types(given, root, 0)


def _types(given: Any, root: Mapping[str, Any], depth: int) -> Types:
    schema = resolved(given, root)
    if not schema or depth == MAX_DEPTH:
        return ANY
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset([NAMES.get(named, named)])
    if isinstance(named, list):
        return frozenset(NAMES.get(str(each), str(each)) for each in named)
    fixed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(fixed, list):
        return frozenset("null" if value is None else PYTHON_TYPES.get(type(value), "object") for value in fixed)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [_types(each, root, depth + 1) for each in schema[key]]
            return ANY if ANY in found else frozenset().union(*found)
    return ANY


def resolved(given: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Follows references into the root's own definitions; {} for anything else."""
    for _ in range(MAX_DEPTH):
        if not isinstance(given, dict):
            return {}
        reference = given.get("$ref")
        if not isinstance(reference, str):
            return given
        at: Any = root
        for part in reference.removeprefix("#/").split("/"):
            at = at.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(at, dict) else None
        given = at if reference.startswith("#/") else None
    return {}


def plain_texts(schema: Mapping[str, Any]) -> list[str] | None:
    """Returns a string's allowed values; None: any."""
    fixed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return [value for value in fixed if isinstance(value, str)] if isinstance(fixed, list) else None


def as_object(given: Any) -> dict[str, Any]:
    """Returns a schema as an object; the schema `true` becomes {}."""
    return dict(given) if isinstance(given, dict) else {}
