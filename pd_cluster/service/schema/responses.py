"""The server's answers as models for the OpenAPI document, which tests compare with real answers.

Answers are not made with them (answers.py writes them by hand, a stream's chunks byte by byte). A field with a default
is not in every answer.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length", "tool_calls"]


class RequestTimings(BaseModel):
    time_to_first_token_ms: float
    generation_time_ms: float = Field(description="From the first token until the last.")
    queue_time_ms: float | None = Field(description="Until a prefill instance had room; null: not reported.")
    mean_itl_ms: float | None = Field(description="Between two tokens; null if there is one.")
    tokens_per_second: float | None = Field(description="After the first token.")


OF_TIMES = Field(default=None, description="With include_metrics; null for more than one answer.")


class KVHandle(BaseModel):
    """Send it back unchanged, with the same prompt."""

    do_remote_prefill: Literal[True]
    handle: str = Field(description="For the KV cache of the prompt; opaque.")
    expires_at: int = Field(description="Unix time, in seconds.")


OF_HANDLE = Field(default=None, description="With kv_transfer_params: {do_remote_decode: true}.")


class ErrorDetails(BaseModel):
    message: str = Field(description="What is wrong, with names and numbers.")
    type: str = Field(description="The kind of error, such as invalid_request_error or service_unavailable.")
    param: str | None = Field(description="The field of the request that is wrong.")
    code: str | None = Field(description="For programs, such as context_length_exceeded or invalid_api_key.")


class Error(BaseModel):
    error: ErrorDetails


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Tokens of the prompt whose KV cache was there already.")


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = Field(description="Those of the text before the answer, tokenized by itself.")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int = Field(description="Of all choices together.")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = Field(
        default=None, description="Of a chat whose answers are read for reasoning or calls."
    )


class PromptLogprob(BaseModel):
    logprob: float
    rank: int = Field(description="1 is the most likely token.")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
OF_PROMPT = Field(default=None, description="By token id; null for the first token, which has none.")


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] = Field(description="Of the token's text in UTF-8; a token may be half a character.")


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="A JSON object as text. The model wrote it: check it before use.")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    role: str
    content: str | None
    reasoning: str | None = Field(default=None, description="What the model wrote before its answer.")
    reasoning_content: str | None = Field(default=None, description="The same, under its older name.")
    tool_calls: list[ToolCall] | None = Field(default=None, description="Absent without calls.")


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(default=None, description="The stop string or stop token that ended it.")
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="Unix time, in seconds.")
    model: str
    choices: list[ChatChoice]
    usage: Usage
    kv_transfer_params: KVHandle | None = OF_HANDLE
    metrics: RequestTimings | None = OF_TIMES
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = OF_PROMPT


class FunctionDelta(BaseModel):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(BaseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class Delta(BaseModel):
    """The new part of a message. The first of a choice has the role."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = Field(default=None, description="The stop string or stop token that ended it.")
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a stream. The one with the usage, if that was asked for, is the last and has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: RequestTimings | None = OF_TIMES
    prompt_token_ids: list[int] | None = Field(default=None, description="In a choice's first event.")


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Where each token's text begins, in characters.")


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(default=None, description="The stop string or stop token that ended it.")
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = OF_PROMPT


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int = Field(description="Unix time, in seconds.")
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: KVHandle | None = OF_HANDLE
    metrics: RequestTimings | None = OF_TIMES


class CompletionChunkChoice(BaseModel):
    index: int
    text: str = Field(description="What is new.")
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = Field(default=None, description="The stop string or stop token that ended it.")
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = Field(default=None, description="In a choice's first event.")


class CompletionChunk(BaseModel):
    """One event of a stream. The one with the usage, if that was asked for, is the last and has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    metrics: RequestTimings | None = OF_TIMES


class Generated(BaseModel):
    """In a stream each frame has the whole text so far, and the last one the logprobs and ids."""

    text: list[str] = Field(description="Of each sequence: the prompt and what the model wrote after it.")
    logprobs: list[CompletionLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = OF_PROMPT
    token_ids: list[list[int]] | None = Field(default=None, description="Of each sequence, without the prompt.")
    prompt_token_ids: list[int] | None = None


class TokensChoice(BaseModel):
    index: int
    logprobs: ChatLogprobs | None = Field(description='Tokens are named "token_id:5".')
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int]
    stop_reason: str | int | None = Field(default=None, description="The stop string or stop token that ended it.")


class GeneratedTokens(BaseModel):
    request_id: str
    model: str
    created: int = Field(description="Unix time, in seconds.")
    choices: list[TokensChoice]
    usage: Usage
    metrics: RequestTimings | None = OF_TIMES
    prompt_logprobs: PromptLogprobs | None = OF_PROMPT
    kv_transfer_params: KVHandle | None = OF_HANDLE


class GeneratedTokensChunk(BaseModel):
    """One event of a stream. The one with the usage, if that was asked for, is the last and has no choices."""

    request_id: str
    choices: list[TokensChoice]
    usage: Usage | None = None
    metrics: RequestTimings | None = OF_TIMES


class RenderedPrompt(BaseModel):
    """A body of /inference/v1/generate."""

    request_id: str | None
    token_ids: list[int]
    features: None
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, bool | None] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int = Field(description="Since when it is served; Unix time, in seconds.")
    owned_by: str
    root: str = Field(description="The model folder, as the server was told.")
    max_model_len: int = Field(description="Tokens of prompt and output together.")
    unproven: bool = Field(default=False, description="Its model_type is not listed; --try-unlisted serves it.")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(default=None, description="Each token's text; U+FFFD for half a character.")


class Detokenized(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ok", "degraded", "unavailable", "draining"]
    instances: dict[str, str] = Field(description="The state of each prefill and decode instance.")
    links: list[str] = Field(description="Pairs of instances that cannot exchange KV cache, with the reason.")
    reason: str | None = Field(default=None, description="Why requests cannot be served now.")


class Alive(BaseModel):
    status: Literal["alive"]


class Version(BaseModel):
    version: str


class ServerLoad(BaseModel):
    server_load: int = Field(description="In all API processes together.")
