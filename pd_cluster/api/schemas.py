"""JSON schemas as clients send them, made such as a guide can follow. Knows nothing of requests."""

from __future__ import annotations

from typing import Any

# Formats that say what a text is for, and leave open what it may be; pydantic writes some of them.
REMARKS = frozenset({"password", "binary", "path", "file-path", "directory-path"})
OF_SCHEMA = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("contains", "propertyNames", "not", "if", "then", "else"),
)
OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
OF_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def without_remarks(schema: Any) -> Any:
    """Without formats that constrain nothing. What stands in a value, such as a `const`, is no schema and stays."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    if isinstance(found.get("format"), str) and found["format"] in REMARKS:
        del found["format"]
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
