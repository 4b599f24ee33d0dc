"""Converts tools of /v1/responses to functions of a chat, and back. Names of functions get their namespace as a prefix.

Every refusal is a RequestError that names the tool.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.responses.responses_protocol import NamespaceTool, ResponsesRequest, ResponseTool

Json = dict[str, Any]
MAX_NAME_NUM_CHARS = 64


def known_as(name: str, namespace: str | None) -> str:
    """Returns a function's name for the model."""
    return f"{namespace}__{name}" if namespace else name


def names_of(request: ResponsesRequest) -> dict[str, Json]:
    """Maps the model's name for each function in a namespace to the fields that name the function in calls."""
    return {
        known_as(function.name, namespace.name): {"name": function.name, "namespace": namespace.name}
        for _, function, namespace in _functions(request)
        if namespace is not None
    }


def functions_of(request: ResponsesRequest) -> list[Json]:
    """Returns all functions as a chat's tools."""
    return [_function(place, function, namespace) for place, function, namespace in _functions(request)]


def _functions(request: ResponsesRequest) -> Iterator[tuple[str, ResponseTool, NamespaceTool | None]]:
    for at, tool in enumerate(request.tools or []):
        if isinstance(tool, ResponseTool):
            yield f"tools[{at}]", tool, None
        else:
            for number, function in enumerate(tool.tools):
                yield f"tools[{at}].tools[{number}]", function, tool


def _function(place: str, tool: ResponseTool, namespace: NamespaceTool | None) -> Json:
    name = known_as(tool.name, namespace.name if namespace is not None else None)
    if len(name) > MAX_NAME_NUM_CHARS:
        raise RequestError(
            f"{place}.name: {len(name)} characters as {name}; at most {MAX_NAME_NUM_CHARS} are allowed", param="tools"
        )
    function: Json = {
        "name": name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
