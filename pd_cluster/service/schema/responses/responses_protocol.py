"""Defines the schema of /v1/responses: OpenAI's requests.

Fields of unsupported features accept only values without effect.
Knows nothing of chats; responses_to_chat.py converts a request to a chat.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from pd_cluster.service.schema.chat_protocol import MAX_DESCRIPTION_NUM_CHARS, MAX_TOOLS, Effort, Name, form_of
from pd_cluster.service.schema.completion_protocol import FAIL_FAST, MAX_SALT_NUM_CHARS, NumLogprobs, SessionId, few
from pd_cluster.service.schema.responses.responses_item_types import ITEMS
from pd_cluster.service.schema.tagged_types import Off
from pd_cluster.types import INT32_MAX

MAX_METADATA = 16

Items = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True), ITEMS]
Value = Annotated[str, Field(max_length=512)]


class ResponseTool(BaseModel):
    """A function that the model may call; the client runs it. `output_schema` has no effect."""

    model_config = ConfigDict(strict=True, extra="allow", serialize_by_alias=True)
    type: Literal["function"]
    name: Name
    description: str | None = Field(default=None, max_length=MAX_DESCRIPTION_NUM_CHARS)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Off | None = None
    is_async: Off | None = Field(default=None, alias="async")
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: dict[str, Any] | None = None


class NamespaceTool(BaseModel):
    """Functions under a common name: see responses_tools.py."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["namespace"]
    name: Name
    description: str | None = Field(default=None, max_length=MAX_DESCRIPTION_NUM_CHARS)
    tools: Annotated[list[ResponseTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


OF_TYPES = Discriminator(
    form_of,
    custom_error_type="tool",  # pydantic's message would repeat the value, at any length
    custom_error_message="expected a tool of type 'function' or 'namespace'",
)
AnyTool = Annotated[Annotated[ResponseTool, Tag("function")] | Annotated[NamespaceTool, Tag("namespace")], OF_TYPES]


class ResponseToolChoice(BaseModel):
    """A function by its name, or some of the tools with a mode."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", serialize_by_alias=True)
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    form: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextConfig(BaseModel):
    """`verbosity` has no effect."""

    model_config = ConfigDict(strict=True, extra="allow")
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseReasoning(BaseModel):
    """Reasoning is shown as the model wrote it, never summarized. `context` has no effect: the chat template decides
    which turns' reasoning the model sees.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    include_obfuscation: bool | None = None


LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    input: Annotated[str | Items | None, BeforeValidator(few)] = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(default=None, ge=1, le=INT32_MAX)
    text: TextConfig | None = None
    reasoning: ResponseReasoning | None = None
    include: (
        Annotated[list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]], FAIL_FAST] | None
    ) = None
    metadata: Annotated[dict[Name, Value], Field(max_length=MAX_METADATA)] | None = None
    client_metadata: dict[str, Any] | None = None  # sent by Codex
    prompt_cache_key: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_NUM_CHARS)
    safety_identifier: str | None = None
    user: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: NumLogprobs | None = None
    background: Off | None = None
    background_options: None = None
    image: None = None
    conversation: None = None
    prompt: None = None
    personality: None = None
    context_management: None = None
    moderation: None = None
    access_programs: None = None
    prompt_cache_options: dict[str, Any] | None = None  # for a cache that this server does not have
    prompt_cache_retention: str | None = None
    # vLLM's fields, with the meanings and limits of a chat's
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | Annotated[list[str], FAIL_FAST] | None = None
    stop_token_ids: Annotated[list[int], FAIL_FAST] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    request_id: str | None = Field(
        default=None,
        description="In logs and timelines the request is named resp_ and this value. The response has another id.",
    )
    cache_salt: str | None = None
    session_id: SessionId | None = None
    priority: int | None = None
    speculative: bool | None = None  # this server's own field
    return_weight_versions: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    enable_response_messages: bool | None = None
    previous_input_messages: Annotated[list[Any], Field(max_length=0)] | None = None
    kv_transfer_params: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    ec_transfer_params: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    media_io_kwargs: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    vllm_xargs: dict[str, Any] | None = None
    watermarking: Off | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())
