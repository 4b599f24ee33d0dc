"""The nodes of a reply's guide, and the JSON schemas of the calls in it.

A guide of kind "reply" is a JSON tree of these nodes:

- ["seq", node…], ["any", node…], ["repeat", least, most or null, node]
- ["marker", text], which blanks may precede, and ["exact", text], before which there are no blanks
- ["until", marker…]: any text, up to and including the first of the markers
- ["text", text], ["pattern", regex], ["json", schema], ["guide", kind, text]
- ["rules", {name: node}, node], in which ["rule", name] refers to a node that may contain itself

Markers are given as text, whether or not the tokenizer has a token for them. Knows nothing of the library that enforces
guides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Node = list[Any]

MAX_CALLS = 16  # maximum number of calls if a request requires calls without a limit, so that the answer ends
FREE: Node = ["pattern", r"(.|\n)*"]
BLANK: Node = ["repeat", 0, 1, ["pattern", r"[ \n]{1,4}"]]


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters`: the JSON schema of the arguments. `strict`: even optional calls must follow the schema."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False


def array_schema(given: Sequence[Tool], key: str, most: int, name: str = "name", call_id: str = "") -> dict[str, Any]:
    return {"type": "array", "items": call_schema(given, key, name, call_id), "minItems": 1, "maxItems": most}


def call_schema(given: Sequence[Tool], key: str, name: str = "name", call_id: str = "") -> dict[str, Any]:
    """Returns the schema of one call of any of the tools. The arguments are in the member `key`, or in a member named
    after the tool if `key` is empty. `name`: the member with the tool's name. `call_id`: the member with the call's
    number, if any. An `$id` keeps a schema's references local.
    """
    numbered: dict[str, Any] = {call_id: {"type": "string", "pattern": "^[0-9]{1,3}$"}} if call_id else {}
    found: list[dict[str, Any]] = []
    for at, tool in enumerate(given):
        named: dict[str, Any] = {**numbered, name: {"const": tool.name}} if key else {}
        members = {**named, key or tool.name: {**object_of(tool), "$id": f"tool:{at}"}}
        found.append({"type": "object", "properties": members, "required": [*members], "additionalProperties": False})
    return {"anyOf": found}


def object_of(tool: Tool) -> dict[str, Any]:
    """Returns the arguments' schema. Arguments are always an object, even if the schema does not say so."""
    return {**tool.parameters, "type": "object"}
