"""Guides for values in Gemma's markup: bare keys, strings between Gemma's own quotes, other values bare.

Supports a schema's objects, lists, references and alternatives; the error for any other constraint names it. Keys are
in alphabetical order, as the chat templates write them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from pd_cluster.parsers.guide_nodes import Node, Tool
from pd_cluster.parsers.schema_types import resolved
from pd_cluster.parsers.tool_schema import FOLLOWED, REMARKS, must_be_plain, refused, text_between

UNCHECKED = {"default", "examples"} | REMARKS
OBJECT_KEYS = FOLLOWED | UNCHECKED
LIST_KEYS = {"type", "items", "minItems", "maxItems"} | UNCHECKED
_COMMA: Node = ["pattern", ", ?"]
_KEY: Node = ["pattern", r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"]
_SCALAR: Node = ["json", {"type": ["number", "boolean", "null"]}]
_NOTHING: Node = ["text", ""]


class BraceGuides:
    """Guides for the calls of one request. `quote`: the text around a string."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._rules: dict[str, Node] = {}  # rule name -> node
        self._names: dict[str, str] = {}  # a rule's purpose -> its name

    def call_of(self, given: Sequence[Tool]) -> Node:
        """Returns the node of a call's name and arguments. Raises RequestError."""
        calls: list[Node] = []
        for tool in given:
            if tool.parameters:
                must_be_plain(tool)
            arguments = self._object(tool, "", tool.parameters) if tool.parameters else self._any_object()
            calls.append(["seq", ["text", tool.name], arguments])
        return ["rules", self._rules, ["any", *calls]]

    def _rule(self, purpose: str, make: Callable[[], Node]) -> Node:
        """Returns a reference to the rule for a purpose, which is built on first use and may refer to itself."""
        if purpose not in self._names:
            name = self._names[purpose] = f"value_{len(self._names)}"
            self._rules[name] = make()
        return ["rule", self._names[purpose]]

    # ---- values with a schema

    def _value(self, tool: Tool, name: str, given: Any) -> Node:
        schema = resolved(given, tool.parameters)
        text = json.dumps(schema, sort_keys=True)
        owner = tool.name if '"$ref"' in text else ""
        return self._rule(f"{owner} {text}", lambda: self._described(tool, name, schema))

    def _described(self, tool: Tool, name: str, schema: dict[str, Any]) -> Node:
        fixed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if fixed is not None:
            return ["any", *(self._constant(tool, name, value) for value in fixed)]
        if others := schema.get("anyOf", schema.get("oneOf")):
            _must_have(tool, name, schema, {"anyOf", "oneOf"} | UNCHECKED)
            return ["any", *(self._value(tool, name, each) for each in others)]
        kinds = schema.get("type", [])
        if not kinds:
            _must_have(tool, name, schema, UNCHECKED)
            return self._any()
        if isinstance(kinds, list):
            return ["any", *(self._value(tool, name, {**schema, "type": kind}) for kind in kinds)]
        match kinds:
            case "string":
                return ["seq", ["exact", self._quote], *text_between(tool, name, schema, self._quote)]
            case "object":
                _must_have(tool, name, schema, OBJECT_KEYS)
                return self._object(tool, name, schema)
            case "array":
                _must_have(tool, name, schema, LIST_KEYS)
                item = self._value(tool, f"the items of {name}", schema.get("items", {}))
                return _list(item, schema.get("minItems", 0), schema.get("maxItems"))
        return ["json", schema]

    def _object(self, tool: Tool, name: str, schema: dict[str, Any]) -> Node:
        properties = schema.get("properties", {})
        required = set(schema.get("required", []))
        others = schema.get("additionalProperties", True)
        if not properties and not required and others is not False:
            if not isinstance(others, dict) or not others:
                return self._any_object()
            return _braces(_many(["seq", _KEY, ["text", ":"], self._value(tool, name, others)]))
        after, first = _NOTHING, _NOTHING  # nodes of the keys from here on: after an earlier key, or as the first keys
        for key in sorted({*properties, *required}, key=lambda key: (key.lower(), key), reverse=True):
            value = self._value(tool, key, properties.get(key, True))
            one: Node = ["seq", ["text", f"{key}:"], value]
            more: Node = ["seq", _COMMA, one]
            found: Node = ["seq", one, after]
            first = self._part(found if key in required else ["any", found, first])
            after = self._part(["seq", more if key in required else ["repeat", 0, 1, more], after])
        return _braces(first)

    def _part(self, node: Node) -> Node:
        return self._rule(json.dumps(node), lambda: node)

    def _constant(self, tool: Tool, name: str, value: Any) -> Node:
        if isinstance(value, dict | list):
            raise refused(tool, f"an object or a list among the values of {name}")
        if not isinstance(value, str):
            return ["text", json.dumps(value)]
        if self._quote in value:
            raise refused(tool, f"{self._quote} among the values of {name}")
        return ["seq", ["exact", self._quote], ["text", value], ["exact", self._quote]]

    # ---- values of any kind

    def _any(self) -> Node:
        return self._rule("any", self._made_any)

    def _made_any(self) -> Node:
        text: Node = ["seq", ["exact", self._quote], ["until", self._quote]]
        return ["any", text, _SCALAR, self._any_object(), _list(self._any(), 0, None)]

    def _any_object(self) -> Node:
        return _braces(_many(["seq", _KEY, ["text", ":"], self._any()]))


def _must_have(tool: Tool, name: str, schema: dict[str, Any], known: set[str]) -> None:
    """Raises RequestError for an unsupported member."""
    if others := sorted(set(schema) - known):
        raise refused(tool, f"{others[0]} of {name}")


def _list(item: Node, least: int, most: int | None) -> Node:
    if most == 0:
        return ["text", "[]"]
    more: Node = ["repeat", max(least - 1, 0), None if most is None else most - 1, ["seq", _COMMA, item]]
    items: Node = ["seq", item, more]
    return ["seq", ["text", "["], items if least else ["repeat", 0, 1, items], ["text", "]"]]


def _many(one: Node) -> Node:
    return ["repeat", 0, 1, ["seq", one, ["repeat", 0, None, ["seq", _COMMA, one]]]]


def _braces(inner: Node) -> Node:
    return ["seq", ["text", "{"], inner, ["text", "}"]]
