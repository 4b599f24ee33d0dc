"""Defines the types of blocks in /v1/messages. Knows nothing of chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from pd_cluster.service.schema.tagged_types import Harmless, TaggedTypes, TypedFields, unless_empty

NOT_RUN = "this server runs no tools; leave it out, or send its text"
NO_TOOLSET = unless_empty("this server has no toolsets; leave it out")


class TextBlock(TypedFields):
    """A text. `citations`, which other servers add to a text, have no effect."""

    type: Literal["text"]
    text: str
    citations: Harmless = None
    cache_control: Harmless = None


class Base64Source(TypedFields):
    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(TypedFields):
    type: Literal["url"]
    url: str


SOURCES = TaggedTypes(
    "a source",
    {"base64": Base64Source, "url": UrlSource},
    {"file": "files are not kept here; send the image as base64 or by its url"},
    way_out="send the image as base64 or by its url",
)


class Transformations(TypedFields):
    """Has no effect: images are always scaled to the model's sizes."""

    oversized_image: Literal["downsize"] | None = None


class ImageBlock(TypedFields):
    type: Literal["image"]
    source: Annotated[Any, SOURCES]
    transformations: Transformations | None = None
    cache_control: Harmless = None


class ThinkingBlock(TypedFields):
    """Reasoning. Signatures are not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: Harmless = None


class RedactedThinkingBlock(TypedFields):
    """Encrypted reasoning of another server, which this server cannot read; clients must send it back."""

    type: Literal["redacted_thinking"]
    data: Harmless = None


class ToolUseBlock(TypedFields):
    """A call. `caller` has no effect, because the call has ended."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Harmless = None
    toolset_name: Annotated[Any, AfterValidator(NO_TOOLSET)] = None
    cache_control: Harmless = None


UNSUPPORTED_BLOCKS = {
    **dict.fromkeys(("document", "search_result"), "documents are not supported; send its text"),
    **dict.fromkeys(("server_tool_use", "web_search_tool_result", "web_fetch_tool_result"), NOT_RUN),
    **dict.fromkeys(("code_execution_tool_result", "bash_code_execution_tool_result"), NOT_RUN),
    **dict.fromkeys(("text_editor_code_execution_tool_result", "tool_search_tool_result"), NOT_RUN),
    **dict.fromkeys(("advisor_tool_result", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing"), NOT_RUN),
    **dict.fromkeys(
        ("tool_addition", "tool_removal", "tool_reference"), "the model has all of `tools`; leave this out"
    ),
    "browser_state": "send it as text",
    "compaction": "compaction is not supported; send the messages that it replaces, or a summary as text",
    "container_upload": "files are not kept here; send its text",
    "fallback": "this server has no fallback model; leave it out",
}


RESULT_BLOCKS = TaggedTypes(
    "a block", {"text": TextBlock, "image": ImageBlock}, UNSUPPORTED_BLOCKS, way_out="send its text"
)


class ToolResultBlock(TypedFields):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Any, RESULT_BLOCKS] = ""
    is_error: bool | None = None
    toolset_name: Annotated[Any, AfterValidator(NO_TOOLSET)] = None
    cache_control: Harmless = None


BLOCKS = TaggedTypes(
    "a block",
    {
        "text": TextBlock,
        "image": ImageBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
        "tool_result": ToolResultBlock,
    },
    UNSUPPORTED_BLOCKS,
    way_out="send its text",
)
