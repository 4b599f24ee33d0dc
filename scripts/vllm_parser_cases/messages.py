"""Requests and messages with the field names of vLLM's protocol. Knows nothing of formats.

Texts that differ only in leading or trailing blanks are equal, and so are arguments with the same JSON value, because
vLLM's formats disagree about both. `loose` counts such comparisons.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from pd_cluster.parsers.guide_nodes import Tool

loose = {"blanks": 0, "JSON": 0}


class Text(str):
    """Content or reasoning."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str) or str.__eq__(self, other):
            return isinstance(other, str)
        is_same = str(self).strip() == str(other).strip()
        loose["blanks"] += is_same
        return is_same

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Arguments(str):
    """A call's arguments: JSON, or the beginning of JSON."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str) or str.__eq__(self, other):
            return isinstance(other, str)
        try:
            is_same = json.loads(str(self)) == json.loads(str(other))
        except ValueError:
            return False
        loose["JSON"] += is_same
        return bool(is_same)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __iadd__(self, other: str) -> Arguments:
        return Arguments(str(self) + str(other))

    __add__ = __iadd__
    __hash__ = str.__hash__


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", arbitrary_types_allowed=True)


class FunctionCall(Model):
    id: str | None = None
    name: str | None = None
    arguments: Any = None

    def model_post_init(self, context: Any) -> None:
        if isinstance(self.arguments, str):
            self.arguments = Arguments(self.arguments)


class DeltaFunctionCall(FunctionCall):
    pass


_numbers = itertools.count()


class ToolCall(Model):
    id: str = pydantic.Field(default_factory=lambda: f"call_{next(_numbers):024x}")
    type: str = "function"
    function: FunctionCall

    @property
    def name(self) -> str | None:
        return self.function.name

    @property
    def arguments(self) -> Any:
        return self.function.arguments


class DeltaToolCall(Model):
    id: str | None = None
    type: str | None = None
    index: int = 0
    function: DeltaFunctionCall | None = None


class DeltaMessage(Model):
    role: str | None = None
    content: Any = None
    reasoning: Any = None
    tool_calls: list[DeltaToolCall] = []


class ExtractedToolCallInformation(Model):
    tools_called: bool
    tool_calls: list[ToolCall]
    content: Any = None


class FunctionDefinition(Model):
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatCompletionToolsParam(Model):
    type: str = "function"
    function: FunctionDefinition


class ChatCompletionNamedFunction(Model):
    name: str


class ChatCompletionNamedToolChoiceParam(Model):
    function: ChatCompletionNamedFunction
    type: str = "function"


class ChatCompletionRequest(Model):
    messages: list[Any] = []
    model: str | None = None
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: Any = None
    skip_special_tokens: bool = True
    include_reasoning: bool = True
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: Any = None
    response_format: Any = None
    spaces_between_special_tokens: bool = True

    def model_post_init(self, context: Any) -> None:
        choice = self.tool_choice or ("auto" if self.tools else "none")
        is_named = isinstance(choice, dict) and "function" in choice
        self.tool_choice = ChatCompletionNamedToolChoiceParam(**choice) if is_named else choice

    def to_sampling_params(self, *others: Any, **more: Any) -> ChatCompletionRequest:
        return self


class StructuredOutputsParams(Model):
    pass


class ResponsesRequest(Model):
    input: Any = None
    text: Any = None
    structured_outputs: Any = None
    model: str | None = None
    tools: list[Any] = []
    tool_choice: Any = "auto"
    skip_special_tokens: bool = True
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


def tools_of(*places: Any) -> Sequence[Tool]:
    """Returns the tools of the first place that has any: models, or dicts with or without `function`."""
    for given in places:
        if isinstance(given, (list, tuple)) and given:
            return [_tool(each) for each in given]
    return []


def _tool(given: Any) -> Tool:
    inner = _field(given, "function") or given
    parameters = _field(inner, "parameters")
    return Tool(_field(inner, "name"), parameters if isinstance(parameters, dict) else {})


def _field(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)
