"""Defines the schema of /v1/messages and /v1/messages/count_tokens: Anthropic's requests.

Knows nothing of chats; messages_to_chat.py converts a request to a chat.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from pd_cluster.service.schema.chat_protocol import MAX_DESCRIPTION_NUM_CHARS, MAX_TOOLS, Name
from pd_cluster.service.schema.completion_protocol import FAIL_FAST, few
from pd_cluster.service.schema.messages.messages_blocks import BLOCKS
from pd_cluster.service.schema.tagged_types import Off, unless_empty
from pd_cluster.types import INT32_MAX

MIN_THINKING_TOKENS = 1024

Blocks = Annotated[list[dict[str, Any]], FAIL_FAST, BLOCKS]
OF_REQUEST = unless_empty("applies to all messages; give it next to messages")


class MessageTurn(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["user", "assistant", "system"]
    content: str | Blocks
    clear_at: Literal["never"] | None = None
    output_config: Annotated[Any, AfterValidator(OF_REQUEST)] = None


class MessageTool(BaseModel):
    """A tool that a model may call; the client runs it. `eager_input_streaming`: its input is streamed."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["custom"] | None = None  # first, so that errors about a server's tools name it
    name: Name
    input_schema: dict[str, Any]
    description: str | None = Field(default=None, max_length=MAX_DESCRIPTION_NUM_CHARS)
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Off | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    cache_control: dict[str, Any] | None = None  # has no effect


class MessageToolChoice(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(BaseModel):
    """`budget_tokens` has no effect: max_tokens limits thinking and answer together. `block_binding` has no effect
    either, because earlier thinking is not signed.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=MIN_THINKING_TOKENS, le=INT32_MAX)
    display: Literal["summarized", "omitted"] | None = None
    block_binding: dict[str, Any] | None = None


class OutputFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", serialize_by_alias=True)
    type: Literal["json_schema"]
    form: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: None = None


class AllThinking(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["all"]


class KeptThinking(BaseModel):
    """Has no effect: the thinking of earlier turns is always kept."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | AllThinking


class ContextManagement(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    edits: Annotated[list[KeptThinking], Field(max_length=1)] = []


class MessagesPrompt(BaseModel):
    """A request to /v1/messages; for /v1/messages/count_tokens, `max_tokens` is optional."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    messages: Annotated[list[MessageTurn], BeforeValidator(few)] = Field(min_length=1, fail_fast=True)
    system: str | Blocks | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    max_tokens: int | None = None
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    stop_sequences: Annotated[list[str], FAIL_FAST] | None = None
    stream: bool | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    container: None = None
    compaction: None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    billing_policy: None = None
    thread: dict[str, Any] | None = None
    fallbacks: Annotated[list[Any], Field(max_length=0)] | None = None
    fallback_credit_token: None = None
    inference_geo: None = None
    # vLLM's fields, with the same meaning as in a chat
    cache_salt: str | None = None
    speculative: bool | None = None  # this server's own field
    return_weight_versions: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    ec_transfer_params: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    vllm_xargs: dict[str, Any] | None = None
    watermarking: Off | None = None
    # These fields have no effect on the answer.
    mm_payload: Any = None  # vLLM's, for the form of images in rendered requests
    return_mm_kwargs: Any = None
    metadata: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None  # for a cache that this server does not have
    cache_control: dict[str, Any] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    betas: list[Any] | None = None


class MessagesRequest(MessagesPrompt):
    max_tokens: int
