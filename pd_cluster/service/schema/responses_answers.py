"""The answers of /v1/responses as models for the OpenAPI document, which tests compare with real answers.

Answers are not made with them. A field with a default is not in every answer.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from pd_cluster.service.schema.responses import ChatTokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponsePart(BaseModel):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[ChatTokenLogprob] | None = Field(
        default=None, description="Of its tokens, with include message.output_text.logprobs; otherwise empty."
    )


class ResponseItem(BaseModel):
    """A message, reasoning, or a call of a function."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: ItemStatus
    role: Literal["assistant"] | None = None
    content: list[ResponsePart] | None = None
    summary: list[Any] | None = Field(default=None, description="Always empty: `content` has the reasoning itself.")
    call_id: str | None = Field(default=None, description="The output of the call names it.")
    name: str | None = None
    namespace: str | None = Field(default=None, description="Of the function, if it has one.")
    arguments: str | None = Field(default=None, description="The model wrote it: check it before use.")


class InputTokens(BaseModel):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokens(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseFailure(BaseModel):
    code: str
    message: str


class Incomplete(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int = Field(description="Unix time, in seconds.")
    completed_at: float | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(BaseModel):
    """One event of a stream, under its `type` as its name. The last one has the whole response."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    item: ResponseItem | None = None
    part: ResponsePart | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    logprobs: list[dict[str, Any]] | None = Field(default=None, description="As in a part, without bytes.")


class ResponseInputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseDeleted(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool = Field(description="Ask again with `after`: the last_id.")
