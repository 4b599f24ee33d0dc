"""Guides for whole replies: reasoning first, then calls in the markup that the tool parser reads, or an answer.

A guide of kind "reply" is a JSON tree: ["seq", node…], ["any", node…], ["repeat", least, most or null, node],
["marker", text] (blanks may come before it), ["until", marker] (anything up to and with it), ["text", text],
["pattern", regex], ["json", schema], ["guide", kind, text]. Markers are given as text, whether or not the model's
tokenizer has a token for them. Knows nothing of the library that follows guides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.parsers import reasoning, tools
from pd_cluster.parsers.reasoning import Start
from pd_cluster.types import MAX_GUIDE_NUM_CHARS, Guide

MAX_CALLS = 16  # for required calls without a limit in the request, so that the model must come to an end

ToolChoice = Literal["none", "auto", "required", "named"]
Node = list[Any]

FREE: Node = ["pattern", r"(.|\n)*"]
BLANK: Node = ["repeat", 0, 1, ["pattern", r"[ \n]{1,4}"]]
_NO_OBJECT: Node = ["pattern", r"[ \t\r\n]*([^ \t\r\n{](.|\n)*)?"]


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters` is the JSON schema of the arguments. `strict`: optional calls must follow it, too."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False


def guide_of(
    parser: str,
    start: Start,
    given: Sequence[Tool],
    choice: ToolChoice,
    most_calls: int | None,
    answer: Guide | None,
) -> Guide | None:
    """Builds the guide for a whole reply; None: anything goes. Raises RequestError."""
    if choice in ("required", "named") and answer is not None:
        raise RequestError(
            f"tool_choice: {choice} leaves no room for an answer, which response_format or guided_* constrain",
            param="tool_choice",
        )
    content = _content(parser, given, choice, most_calls, answer)
    if content is None or (start == "content" and answer is not None and content == _of(answer)):
        return answer
    text = msgspec.json.encode(["seq", *_thinking(start), content]).decode()
    if len(text) > MAX_GUIDE_NUM_CHARS:
        field = "tools" if given else "response_format"
        raise RequestError(
            f"{field}: a guide of {len(text)} characters; at most {MAX_GUIDE_NUM_CHARS} are allowed", param=field
        )
    return Guide("reply", text)


def _content(
    parser: str, given: Sequence[Tool], choice: ToolChoice, most_calls: int | None, answer: Guide | None
) -> Node | None:
    """Returns the node for the content after the reasoning; None: anything goes."""
    if choice in ("required", "named") and given:
        return _calls(parser, given, 1 if choice == "named" else most_calls or MAX_CALLS)
    if choice == "auto" and parser and given:
        lenient = [tool if tool.strict else Tool(tool.name, {}) for tool in given]
        if answer is not None:
            return ["any", _calls(parser, lenient, most_calls or MAX_CALLS), _of(answer)]
        return _perhaps_calls(parser, lenient, most_calls) if any(tool.strict for tool in given) else None
    return None if answer is None else _of(answer)


def _of(answer: Guide) -> Node:
    return ["guide", answer.kind, answer.text]


def _thinking(start: Start) -> list[Node]:
    opening: Node = ["marker", reasoning.OPEN]
    thought: list[Node] = [["until", reasoning.CLOSE], BLANK]
    match start:
        case "content":
            return []
        case "perhaps":
            return [["repeat", 0, 1, ["seq", opening, *thought]]]
        case "reasoning":
            return [["repeat", 0, 1, opening], *thought]


# ---- calls, format by format


def _calls(parser: str, given: Sequence[Tool], most: int) -> Node:
    """Requires at least one call, and allows nothing else."""
    match parser:
        case "hermes" | "qwen3":
            return ["repeat", 1, most, ["seq", ["marker", tools.CALL], *_hermes_call(given)]]
        case "llama3_json":
            return _llama3_calls(given, most)
        case "mistral":
            one = ["seq", ["marker", tools.TOOL_CALLS], ["any", *_named_calls(given)]]
            return ["any", ["seq", ["marker", tools.TOOL_CALLS], *_array(given, most)], ["repeat", 1, most, one]]
    return ["json", _array_schema(given, "parameters", most)]


def _perhaps_calls(parser: str, given: Sequence[Tool], most: int | None) -> Node:
    """Allows free text; anything that begins like a call must be one."""
    if parser == "llama3_json":
        return ["any", _llama3_calls(given, most or MAX_CALLS), _NO_OBJECT]
    if parser == "mistral":
        array: Node = ["seq", *_array(given, most or MAX_CALLS)]
        call: Node = ["seq", ["until", tools.TOOL_CALLS], ["any", array, *_named_calls(given)]]
    else:
        call = ["seq", ["until", tools.CALL], *_hermes_call(given)]
    return ["seq", ["repeat", 0, most, call], FREE]


def _hermes_call(given: Sequence[Tool]) -> list[Node]:
    return [BLANK, ["json", _call_schema(given, "arguments")], ["marker", tools.CALL_END]]


def _llama3_calls(given: Sequence[Tool], most: int) -> Node:
    call: Node = ["json", _call_schema(given, "parameters")]
    more: Node = ["repeat", 0, most - 1, ["seq", ["pattern", r";[ \n]?|\n"], call]]
    tag: Node = ["repeat", 0, 1, ["marker", tools.PYTHON_TAG]]
    return ["seq", tag, call, more] if most > 1 else ["seq", tag, call]


def _array(given: Sequence[Tool], most: int) -> list[Node]:
    return [BLANK, ["json", _array_schema(given, "arguments", most)]]


def _named_calls(given: Sequence[Tool]) -> list[Node]:
    args: Node = ["repeat", 0, 1, ["marker", tools.ARGS]]
    return [["seq", ["text", tool.name], args, ["json", _object(tool)]] for tool in given]


def _array_schema(given: Sequence[Tool], key: str, most: int) -> dict[str, Any]:
    return {"type": "array", "items": _call_schema(given, key), "minItems": 1, "maxItems": most}


def _call_schema(given: Sequence[Tool], key: str) -> dict[str, Any]:
    """Returns the schema of one call of any of the tools. An `$id` keeps a schema's references local to it."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, key: {**_object(tool), "$id": f"tool:{at}"}},
                "required": ["name", key],
                "additionalProperties": False,
            }
            for at, tool in enumerate(given)
        ]
    }


def _object(tool: Tool) -> dict[str, Any]:
    """Returns the arguments' schema. Arguments are always an object, even if the schema does not say so."""
    return {**tool.parameters, "type": "object"}
