"""The schema of a tool whose arguments are written one by one, each in a place of its own.

Knows nothing of the markup around arguments.
"""

from __future__ import annotations

from typing import Any

from pd_cluster.errors import RequestError
from pd_cluster.parsers.guide_nodes import Tool
from pd_cluster.parsers.schema_types import as_object

FOLLOWED = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
DEFINITIONS = ("$defs", "definitions")
REMARKS = {"title", "description"}


def must_be_plain(tool: Tool) -> None:
    """Raises RequestError for a schema that is more than a list of arguments with their schemas."""
    if others := sorted(set(tool.parameters) - FOLLOWED - REMARKS):
        raise refused(tool, others[0])


def refused(tool: Tool, what: str) -> RequestError:
    return RequestError(
        f"tools: parameters of {tool.name!r}: {what} cannot be followed in this model's markup; leave it out, or use "
        f'tool_choice "auto" and strict: false',
        param="tools",
    )


def schema_of(tool: Tool, given: Any) -> dict[str, Any]:
    """Returns one argument's schema with the definitions that it may refer to."""
    definitions = {name: tool.parameters[name] for name in DEFINITIONS if name in tool.parameters}
    return {**as_object(given), **definitions}
