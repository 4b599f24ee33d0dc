"""Rewrites clients' JSON schemas so that a guide can follow them. Knows nothing of requests."""

from __future__ import annotations

from typing import Any

# Formats that state the purpose of a text without constraining it; pydantic writes some of them.
REMARKS = frozenset({"password", "binary", "path", "file-path", "directory-path"})
OTHER_NAMES = {"float": "number", "double": "number", "int": "integer", "bool": "boolean", "str": "string"}
OTHER_NAMES |= {"dict": "object", "list": "array"}  # names that some programs write for JSON schema's types
OF_SCHEMA = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("contains", "propertyNames", "not", "if", "then", "else"),
)
OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
OF_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def without_remarks(schema: Any) -> Any:
    """Removes formats without effect, and replaces other names of types by their JSON schema names.

    Values, such as a `const`, are not schemas and stay unchanged.
    """
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    if isinstance(found.get("format"), str) and found["format"] in REMARKS:
        del found["format"]
    if isinstance(kind := found.get("type"), str) and kind in OTHER_NAMES:
        found["type"] = OTHER_NAMES[kind]
    elif isinstance(kind, list):
        found["type"] = [OTHER_NAMES.get(each, each) if isinstance(each, str) else each for each in kind]
    for name in OF_SCHEMA:
        if isinstance(found.get(name), dict):
            found[name] = without_remarks(found[name])
    for name in OF_SCHEMAS:
        if isinstance(found.get(name), list):
            found[name] = [without_remarks(each) for each in found[name]]
    for name in OF_NAMED_SCHEMAS:
        if isinstance(found.get(name), dict):
            found[name] = {key: without_remarks(each) for key, each in found[name].items()}
    return found
