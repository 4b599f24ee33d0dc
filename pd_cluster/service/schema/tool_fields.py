"""Reads the tools that a chat's answer may call. Every refusal is a RequestError.

Knows nothing of the format of calls (parsers/).
"""

from __future__ import annotations

import reprlib
from typing import NamedTuple

from pd_cluster.errors import RequestError
from pd_cluster.parsers.reply_format import Tool, ToolChoice
from pd_cluster.service.schema.chat_protocol import AllowedTools, ChatCompletionRequest, NamedTool
from pd_cluster.service.schema.structured_outputs.guide_fields import MAX_SCHEMA_DEPTH, is_deeper
from pd_cluster.service.schema.structured_outputs.json_schemas import without_remarks


class RequestedTools(NamedTuple):
    """`most_calls` None: any number. `are_some`: the model also sees tools that it must not call."""

    tools: list[Tool]
    choice: ToolChoice
    most_calls: int | None = None
    are_some: bool = False


NO_TOOLS = RequestedTools([], "none")


def tools_of(request: ChatCompletionRequest, has_parser: bool) -> RequestedTools:
    """Returns the tools. `has_parser`: the server can find calls in free text. Raises RequestError."""
    tools = _tools(request)
    are_some = False
    choice = request.tool_choice if request.tool_choice is not None else "auto" if tools else "none"
    if isinstance(choice, AllowedTools):
        allowed, num_shown = request.allowed_names or (), len(tools)
        tools = [tool for tool in tools if tool.name in allowed]
        are_some = len(tools) < num_shown
        choice = choice.allowed_tools.mode
    if not tools and choice not in ("none", "auto"):
        raise RequestError("tool_choice: needs tools to choose from; give tools", param="tool_choice")
    if not tools or choice == "none":
        return NO_TOOLS
    if request.use_beam_search:
        raise RequestError("tools: a beam search cannot make calls; leave out one of the two", param="tools")
    if choice == "auto" and not has_parser:
        raise RequestError(
            'tools: tool_choice "auto" needs a server that was started with --tool-call-parser; use "required", "none" '
            "or a named function",
            param="tool_choice",
        )
    most_calls = 1 if request.parallel_tool_calls is False else None
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if all(tool.name != name for tool in tools):
            raise RequestError(f"tool_choice: no tool is called {reprlib.repr(name)}", param="tool_choice")
        return RequestedTools([tool for tool in tools if tool.name == name], "named", 1)
    return RequestedTools(tools, choice, most_calls, are_some)


def _tools(request: ChatCompletionRequest) -> list[Tool]:
    found: dict[str, Tool] = {}
    for at, tool in enumerate(request.offered_tools):
        function = tool.function
        if function.name in found:
            raise RequestError(f"tools[{at}]: another tool is also called {function.name!r}", param="tools")
        parameters = function.parameters or {}
        if is_deeper(parameters, MAX_SCHEMA_DEPTH):
            raise RequestError(
                f"tools[{at}].function.parameters: nested more than {MAX_SCHEMA_DEPTH} deep", param="tools"
            )
        found[function.name] = Tool(function.name, without_remarks(parameters), bool(function.strict))
    return list(found.values())
