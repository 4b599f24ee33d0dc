"""The answers of /v1/messages as models for the OpenAPI document, which tests compare with real answers.

Answers are not made with them. A field with a default is not in every answer.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageBlock(BaseModel):
    """Text, thinking, or a call of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = Field(default=None, description="Not checked when the block is sent back.")
    id: str | None = Field(default=None, description="A call's, which its result names.")
    name: str | None = None
    input: dict[str, Any] | None = Field(
        default=None, description="The model wrote it. What is no JSON object is shown under the key `unreadable`."
    )


class OutputTokensDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    input_tokens: int = Field(description="Of the prompt, those whose KV cache was not there already.")
    cache_read_input_tokens: int = Field(description="Of the prompt, the others.")
    cache_creation_input_tokens: Literal[0]
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageAnswer(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageDelta(BaseModel):
    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class MessageErrorDetails(BaseModel):
    type: str = Field(description="The kind of error, such as invalid_request_error or overloaded_error.")
    message: str


class MessageEvent(BaseModel):
    """One event of a stream, under its `type` as its name."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: MessageAnswer | None = None
    index: int | None = None
    content_block: MessageBlock | None = None
    delta: MessageDelta | None = None
    usage: MessageUsage | None = None
    error: MessageErrorDetails | None = None
    request_id: None = None


class MessageError(BaseModel):
    type: Literal["error"]
    error: MessageErrorDetails
    request_id: None


class TokensCount(BaseModel):
    input_tokens: int
