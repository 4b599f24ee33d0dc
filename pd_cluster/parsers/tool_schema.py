"""Reads the schema of a tool for markup that has a separate element for each argument.

Knows nothing of the markup around arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pd_cluster.errors import RequestError
from pd_cluster.parsers.guide_nodes import Node, Tool
from pd_cluster.parsers.schema_types import as_object, plain_texts

FOLLOWED_IN_TEXT = {"type", "enum", "const", "minLength", "maxLength", "pattern", "format", "default", "examples"}
FOLLOWED = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
DEFINITIONS = ("$defs", "definitions")
REMARKS = {"title", "description"}


def must_be_plain(tool: Tool) -> None:
    """Raises RequestError unless the schema is only a list of arguments with their schemas."""
    if others := sorted(set(tool.parameters) - FOLLOWED - REMARKS):
        raise refused(tool, others[0])


def refused(tool: Tool, what: str) -> RequestError:
    return RequestError(
        f"tools: parameters of {tool.name!r}: {what} cannot be followed in this model's markup; leave it out, or use "
        f'tool_choice "auto" and strict: false',
        param="tools",
    )


def schema_of(tool: Tool, given: Any) -> dict[str, Any]:
    """Returns one argument's schema with the definitions that it may reference."""
    definitions = {name: tool.parameters[name] for name in DEFINITIONS if name in tool.parameters}
    return {**as_object(given), **definitions}


def listed(needed: Sequence[Node], others: Sequence[Node], comma: Node) -> list[Node]:
    """Returns the nodes of all required and any optional entries, in order."""
    if needed:
        more: list[Node] = [["seq", comma, node] for node in needed[1:]]
        return [needed[0], *more, *(["repeat", 0, 1, ["seq", comma, node]] for node in others)]
    if not others:
        return []
    firsts: list[Node] = [["seq", *listed(others[at : at + 1], others[at + 1 :], comma)] for at in range(len(others))]
    return [["repeat", 0, 1, ["any", *firsts]]]


def text_between(tool: Tool, name: str, schema: dict[str, Any], end: str) -> list[Node]:
    """Returns the nodes of a string that follows its schema, and of its end marker. Raises RequestError."""
    if others := sorted(set(schema) - FOLLOWED_IN_TEXT - REMARKS):
        raise refused(tool, f"{others[0]} of {name}")
    if (texts := plain_texts(schema)) is not None:
        return [["any", *(["text", text] for text in texts)], ["exact", end]]
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if pattern := schema.get("pattern"):
        if least or most is not None or not (pattern.startswith("^") and pattern.endswith("$")):
            raise refused(tool, f"pattern of {name}, unless it is from ^ to $ and without lengths,")
        return [["pattern", pattern[1:-1].replace("/", r"\/")], ["exact", end]]
    if least or most is not None:
        return [["pattern", f"[^<\\n]{{{least},{'' if most is None else most}}}"], ["exact", end]]
    return [["until", end]]
