"""Guides for values in Gemma's markup: bare keys, strings between quotes of its own, other values bare.

A schema is followed through objects, lists, references and alternatives; what else narrows it is refused by name. A
value of any kind has a limited depth, because these guides cannot repeat within themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pd_cluster.parsers.guide_nodes import Node, Tool
from pd_cluster.parsers.schema_types import resolved
from pd_cluster.parsers.tool_schema import (
    FOLLOWED,
    REMARKS,
    listed,
    must_be_plain,
    refused,
    schema_of,
    text_between,
)

MAX_FREE_DEPTH = 3  # of objects and lists where anything goes
MAX_DEPTH = 12  # of objects and lists in a schema
OBJECT_KEYS = FOLLOWED | REMARKS | {"default", "examples"}
LIST_KEYS = {"type", "items", "minItems", "maxItems", "default", "examples"} | REMARKS
SCALARS = ("number", "boolean", "null")
_COMMA: Node = ["pattern", ", ?"]
_KEY: Node = ["pattern", r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"]
_SCALAR: Node = ["json", {"type": list(SCALARS)}]


class BraceGuides:
    """Guides for one format's calls. `quote`: the text around a string."""

    def __init__(self, quote: str) -> None:
        self._quote = quote

    def call_of(self, given: Sequence[Tool]) -> Node:
        """Returns the node of a call's name and arguments. Raises RequestError."""
        free = [["text", tool.name] for tool in given if not tool.parameters]
        calls: list[Node] = [["seq", ["any", *free], self._any_object(MAX_FREE_DEPTH)]] if free else []
        for tool in given:
            if tool.parameters:
                must_be_plain(tool)
                calls.append(["seq", ["text", tool.name], self._object(tool, "", tool.parameters, 0)])
        return ["any", *calls]

    # ---- values that a schema describes

    def _value(self, tool: Tool, name: str, given: Any, depth: int) -> Node:
        schema = resolved(given, tool.parameters)
        if depth > MAX_DEPTH:
            raise refused(tool, f"{name}, which is more than {MAX_DEPTH} deep,")
        fixed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if fixed is not None:
            return ["any", *(self._constant(tool, name, value) for value in fixed)]
        if others := schema.get("anyOf", schema.get("oneOf")):
            self._must_have(tool, name, schema, {"anyOf", "oneOf", "default", "examples"} | REMARKS)
            return ["any", *(self._value(tool, name, each, depth + 1) for each in others)]
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not kinds:
            self._must_have(tool, name, schema, {"default", "examples"} | REMARKS)
            return self._any(max(MAX_FREE_DEPTH - depth, 1))
        return ["any", *(self._of_kind(tool, name, {**schema, "type": kind}, depth) for kind in kinds)]

    def _of_kind(self, tool: Tool, name: str, schema: dict[str, Any], depth: int) -> Node:
        match schema["type"]:
            case "string":
                return ["seq", ["exact", self._quote], *text_between(tool, name, schema, self._quote)]
            case "object":
                self._must_have(tool, name, schema, OBJECT_KEYS)
                return self._object(tool, name, schema, depth)
            case "array":
                self._must_have(tool, name, schema, LIST_KEYS)
                item = self._value(tool, f"the items of {name}", schema.get("items", {}), depth + 1)
                return self._list(item, schema.get("minItems", 0), schema.get("maxItems"))
        return ["json", schema_of(tool, schema)]

    def _object(self, tool: Tool, name: str, schema: dict[str, Any], depth: int) -> Node:
        properties = schema.get("properties", {})
        required = list(dict.fromkeys(schema.get("required", [])))
        others = schema.get("additionalProperties", True)
        if not properties and not required and others is not False:
            if not isinstance(others, dict) or not others:
                return self._any_object(max(MAX_FREE_DEPTH - depth, 1))
            return self._braces(_many(["seq", _KEY, ["text", ":"], self._value(tool, name, others, depth + 1)]))
        by_key: dict[str, Node] = {
            key: ["seq", ["text", f"{key}:"], self._value(tool, key, properties.get(key, True), depth + 1)]
            for key in dict.fromkeys((*required, *properties))
        }
        needed = [by_key[key] for key in required]
        return self._braces(listed(needed, [node for key, node in by_key.items() if key not in required], _COMMA))

    def _constant(self, tool: Tool, name: str, value: Any) -> Node:
        if isinstance(value, dict | list):
            raise refused(tool, f"an object or a list among the values of {name}")
        if not isinstance(value, str):
            return ["text", json.dumps(value)]
        if self._quote in value:
            raise refused(tool, f"{self._quote} among the values of {name}")
        return ["seq", ["exact", self._quote], ["text", value], ["exact", self._quote]]

    def _must_have(self, tool: Tool, name: str, schema: dict[str, Any], known: set[str]) -> None:
        if others := sorted(set(schema) - known):
            raise refused(tool, f"{others[0]} of {name}")

    # ---- values of any kind

    def _any(self, depth: int) -> Node:
        kinds: list[Node] = [["seq", ["exact", self._quote], ["until", self._quote]], _SCALAR]
        if depth:
            kinds += [self._any_object(depth), self._list(self._any(depth - 1), 0, None)]
        return ["any", *kinds]

    def _any_object(self, depth: int) -> Node:
        return self._braces(_many(["seq", _KEY, ["text", ":"], self._any(depth - 1)]))

    def _list(self, item: Node, least: int, most: int | None) -> Node:
        if most == 0:
            return ["text", "[]"]
        more: Node = ["repeat", max(least - 1, 0), None if most is None else most - 1, ["seq", _COMMA, item]]
        items: Node = ["seq", item, more]
        return ["seq", ["text", "["], items if least else ["repeat", 0, 1, items], ["text", "]"]]

    def _braces(self, inner: list[Node]) -> Node:
        return ["seq", ["text", "{"], *inner, ["text", "}"]]


def _many(one: Node) -> list[Node]:
    return [["repeat", 0, 1, ["seq", one, ["repeat", 0, None, ["seq", _COMMA, one]]]]]
