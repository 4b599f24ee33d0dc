"""Guides for calls whose arguments are nested elements. Raises RequestError for schemas that they cannot express."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from pd_cluster.parsers.guide_nodes import FREE, Node, Tool
from pd_cluster.parsers.nested_tags import ITEM, NestedTags
from pd_cluster.parsers.schema_types import resolved, types_in
from pd_cluster.parsers.tool_schema import DEFINITIONS, FOLLOWED, REMARKS, must_be_plain, refused, schema_of
from pd_cluster.parsers.xml_guides import text_nodes
from pd_cluster.parsers.xml_tags import TEXT

MAX_DEPTH = 16  # nested elements in one argument; a recursive schema has no limit of its own
FOLLOWED_IN_ARRAYS = {"type", "items", "minItems", "maxItems"}
NESTED = {"array", "object"}
SIGNS = f"{string.ascii_letters}{string.digits}_.$-"  # characters in element names that no schema lists


def required_elements(tags: NestedTags, given: Sequence[Tool], most: int) -> Node:
    """Returns the node of one or more calls without other text."""
    return ["seq", ["marker", tags.begin], ["repeat", 1, most, _one(tags, given)], ["marker", tags.end]]


def optional_elements(tags: NestedTags, given: Sequence[Tool], most: int | None) -> Node:
    """Returns the node of free text with calls; text that begins like a call must be one."""
    many: Node = ["repeat", 1, most, _one(tags, given)]
    return ["seq", ["repeat", 0, most, ["seq", ["until", tags.begin], many, ["marker", tags.end]]], FREE]


def _one(tags: NestedTags, given: Sequence[Tool]) -> Node:
    return ["seq", ["marker", tags.call], ["any", *(_tool(tags, tool) for tool in given)]]


def _tool(tags: NestedTags, tool: Tool) -> Node:
    head: list[Node] = [["text", tool.name], ["exact", '">']]
    if not tool.parameters:  # any arguments are valid
        return ["seq", *head, *_free(tags, "/invoke>", {"invoke"})]
    must_be_plain(tool)
    return ["seq", *head, *_members(tags, tool, tool.parameters, 1), ["marker", tags.close]]


def _members(tags: NestedTags, tool: Tool, schema: Mapping[str, Any], depth: int) -> list[Node]:
    required, properties = schema.get("required", []), schema.get("properties", {})
    found: list[Node] = []
    for name in dict.fromkeys((*properties, *required)):
        one = _element(tags, tool, name, properties.get(name, True), depth)
        found.append(one if name in required else ["repeat", 0, 1, one])
    return found


def _element(tags: NestedTags, tool: Tool, name: str, given: Any, depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise refused(tool, f"{name} within {MAX_DEPTH} others")
    return ["seq", ["marker", f"{tags.tag}{name}>"], *_inside(tags, tool, name, given, depth)]


def _inside(tags: NestedTags, tool: Tool, name: str, given: Any, depth: int) -> list[Node]:
    """Returns the nodes of an element's content and of its end."""
    schema, end = resolved(given, tool.parameters), f"{tags.tag}/{name}>"
    types = types_in(given, tool.parameters)
    if types == TEXT:
        return text_nodes(tool, name, schema, "", end) or [["until", end]]
    if not types:
        _must_follow(tool, name, schema, set())
        return _free(tags, f"/{name}>", {"invoke", name})
    if types == {"array"}:
        _must_follow(tool, name, schema, FOLLOWED_IN_ARRAYS)
        item = _element(tags, tool, ITEM, schema.get("items", True), depth + 1)
        return [["repeat", schema.get("minItems", 0), schema.get("maxItems"), item], ["marker", end]]
    if types == {"object"}:
        _must_follow(tool, name, schema, FOLLOWED)
        if not schema.get("properties"):
            return _free(tags, f"/{name}>", {"invoke", name})
        return [*_members(tags, tool, schema, depth + 1), ["marker", end]]
    if types & NESTED or "string" in types:
        raise refused(tool, f"{name} of several types")
    return [["json", schema_of(tool, given)], ["exact", end]]


def _free(tags: NestedTags, end: str, names: set[str]) -> list[Node]:
    """Returns the nodes of any text and elements, and of the tag that ends them. `names`: the enclosing elements."""
    closing, opening = other_than({"", *names, tags.section}), other_than({"", tags.section})
    inner: Node = ["seq", ["until", tags.mark], ["pattern", rf"<({opening}|\/{closing})>"]]
    return [["repeat", 0, None, inner], ["until", tags.mark], ["exact", f"<{end}"]]


def other_than(names: set[str]) -> str:
    """Returns a pattern of all names except these."""
    found = []
    for first in sorted({name[0] for name in names if name}):
        rest = other_than({name[1:] for name in names if name[:1] == first})
        found.append(f"{re.escape(first)}{rest}")
    others = "".join(sign for sign in SIGNS if sign not in {name[:1] for name in names})
    found.append(f"[{re.escape(others)}][{re.escape(SIGNS)}]*")
    return f"({'|'.join(found)}){'' if '' in names else '?'}"


def _must_follow(tool: Tool, name: str, schema: Mapping[str, Any], followed: set[str]) -> None:
    if others := sorted(set(schema) - followed - REMARKS - {*DEFINITIONS, "default", "examples"}):
        raise refused(tool, f"{others[0]} of {name}")
