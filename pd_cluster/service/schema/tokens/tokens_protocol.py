"""Defines the schema of vLLM's /inference/v1/generate (tokens in, tokens out), of rendered requests, and of batches of
chats.

A request of tokens becomes a completion with the same parameters, so that one place checks them all.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest, ChatMessage
from pd_cluster.service.schema.completion_protocol import (
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_SALT_NUM_CHARS,
    REQUEST_ID,
    CacheRetention,
    GenerationRequest,
    SessionId,
    StreamOptions,
    TokensCompletionRequest,
    few,
)
from pd_cluster.service.schema.error_field_names import with_field_names
from pd_cluster.service.schema.request_parsing import HANDLE, checked
from pd_cluster.service.schema.structured_outputs.guide_fields import structured_outputs_of
from pd_cluster.types import INT32_MAX, Sampling

# Fields of GenerationRequest that belong to the request rather than to its sampling.
OF_REQUEST = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "include_metrics",
        "kv_transfer_params",
        "user",
        "request_id",
        "cache_salt",
        "prompt_cache_key",
        "prompt_cache_retention",
        "session_id",
        "priority",
    }
    | {"return_token_ids", "return_tokens_as_token_ids", "return_token_offsets", "truncation_side", "output_mode"}
)
OF_GUIDE = frozenset(
    {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"}
    | {"guided_whitespace_pattern", "structured_outputs", "response_format"}
)
OF_PROMPT = frozenset({"prompt", "messages", "echo", "add_special_tokens", "tools", "chat_template"})
WITHOUT_MEANING = frozenset({"detokenize", "output_kind", "flat_logprobs"})  # vLLM's options for its engine's output
RENDERED = frozenset(GenerationRequest.model_fields) - OF_REQUEST - OF_GUIDE - {"max_tokens", "truncate_prompt_tokens"}
NAMES = {name: f"sampling_params.{name}" for name in {*TokensCompletionRequest.model_fields} - OF_REQUEST} | {
    "prompt": "token_ids",
    "vllm_xargs": "sampling_params.extra_args",
}


class TokensRequest(BaseModel):
    """A request of tokens. `sampling_params`: vLLM's, with the field names of a completion."""

    model_config = ConfigDict(strict=True, extra="allow")

    token_ids: Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(min_length=1, fail_fast=True)]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: str | None = Field(default=None, pattern=REQUEST_ID)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_NUM_CHARS)
    prompt_cache_key: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_NUM_CHARS)
    prompt_cache_retention: CacheRetention | None = None
    session_id: SessionId | None = None
    priority: int | None = Field(default=None, ge=-INT32_MAX, le=INT32_MAX)
    include_metrics: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    # vLLM's renderers add these.
    content_parts: Annotated[list[Any], Field(max_length=0)] | None = None
    ec_transfer_params: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    output_mode: Literal["tokens", "text", "derender"] | None = None
    return_token_ids: bool | None = None  # no effect: every answer has them
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    token_offsets: list[Any] | None = None
    parse_context: dict[str, Any] | None = None

    def completion(self) -> TokensCompletionRequest:
        """Returns a completion request for these tokens. Without max_tokens, it may fill the context. Raises
        RequestError.
        """
        if (self.model_extra or {}).get("features") is not None:
            raise RequestError("features: images, audio and video are not supported; leave it out", param="features")
        name = "prompt_logprob_token_ids"
        if self.stream and self.sampling_params.get(name):
            raise RequestError(f"{name}: not available with stream; leave out one of the two", param=name)
        if self.output_mode == "derender":
            raise RequestError(
                'output_mode: "derender" is not supported; give "tokens", and the answer to '
                "/v1/chat/completions/derender",
                param="output_mode",
            )
        if self.reasoning_ended is False and self.sampling_params.get("structured_outputs") is not None:
            raise RequestError(
                "reasoning_ended: false: structured_outputs applies from the first token; leave out one of the two",
                param="reasoning_ended",
            )
        for name in self.sampling_params:
            if name in OF_REQUEST or name in OF_PROMPT:
                raise RequestError(
                    f"sampling_params.{name}: is not a sampling parameter; give it next to sampling_params, or leave "
                    f"it out",
                    param="sampling_params",
                )
        sampling = {name: value for name, value in self.sampling_params.items() if name not in WITHOUT_MEANING}
        if sampling.get("extra_args"):
            sampling["vllm_xargs"] = sampling.pop("extra_args")
        if sampling.get("logprob_token_ids"):
            sampling.setdefault("logprobs", 0)
        own = self.model_dump(include=set(OF_REQUEST) - {"return_token_ids"}, exclude_unset=True, exclude_none=True)
        with with_field_names(NAMES):
            whole = {"max_tokens": None, **sampling, **own, "prompt": self.token_ids, "return_token_ids": True}
            return checked(whole, TokensCompletionRequest, takes=(HANDLE,))


class BatchChatRequest(ChatCompletionRequest):
    """Several conversations with the same parameters, each with one answer."""

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]],
        Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
        BeforeValidator(few),
    ]

    def chats(self) -> list[ChatCompletionRequest]:
        """Returns one chat for each conversation. Raises RequestError."""
        for name, value, why in (
            ("stream", bool(self.stream), "a batch cannot be streamed"),
            ("n", self.num_choices > 1, "a batch has one answer for each conversation"),
            ("prompt_logprobs", self.prompt_logprobs is not None, "a batch's answer cannot carry them"),
            ("prediction", self.prediction is not None, "a batch's conversations have different answers"),
        ):
            if value:
                raise RequestError(f"{name}: {why}; leave it out, or use /v1/chat/completions", param=name)
        if len(self.messages) * self.num_sequences > MAX_CHOICES:
            raise RequestError(
                f"messages: {len(self.messages)} conversations with {self.num_sequences} sequences each are more than "
                f"{MAX_CHOICES} sequences; send fewer in a request",
                param="messages",
            )
        return [self.model_copy(update={"messages": each}) for each in self.messages]


Place = Annotated[
    list[int], Meta(min_length=2, max_length=2, description="The first character, and the end after the last one.")
]


class RenderedPrompt(msgspec.Struct):
    """A body of /inference/v1/generate."""

    request_id: str | None
    token_ids: list[int]
    token_offsets: Annotated[
        list[Place] | None, Meta(description="With return_token_offsets: each token's range in the text.")
    ]
    features: None
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, bool | None] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None


def rendered(
    request: GenerationRequest,
    token_ids: list[int],
    sampling: Sampling,
    name: str,
    prefix: str,
    offsets: list[list[int]] | None = None,
) -> RenderedPrompt:
    """Returns the body for /inference/v1/generate that gets the same answer as this request.

    Without a request id, makes one that begins with `prefix`. `offsets`: the tokens' ranges in the text.

    Raises RequestError for a guide that the body cannot express.
    """
    params = request.model_dump(include=set(RENDERED), exclude_none=True)
    params["max_tokens"] = sampling.max_tokens
    if extra := params.pop("vllm_xargs", None):
        params["extra_args"] = extra
    if request.num_logprobs is not None:
        params["logprobs"] = request.num_logprobs
    if sampling.guide is not None:
        params["structured_outputs"] = structured_outputs_of(sampling.guide)
    return RenderedPrompt(
        request_id=request.request_id or f"{prefix}-{secrets.token_hex(12)}",
        token_ids=token_ids,
        token_offsets=offsets,
        features=None,
        sampling_params=params,
        model=name,
        stream=bool(request.stream),
        stream_options=None if request.stream_options is None else request.stream_options.model_dump(),
        cache_salt=request.cache_salt,
        priority=request.priority or 0,
        kv_transfer_params=None,
    )
