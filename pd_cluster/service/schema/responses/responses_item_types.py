"""Defines the types of items in /v1/responses and of the parts of their contents. Knows nothing of chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from pd_cluster.service.schema.tagged_types import Harmless, Off, TaggedTypes, TypedFields, unless_empty

NOT_RUN = "this server runs no tools; leave it out, or send its result as a message"
NOT_A_FUNCTION = "only functions are supported; send a function_call or a function_call_output"
NOT_ENCRYPTED = "this server cannot read encrypted or compacted items; send the original items, or a summary"
NO_FILES = "files are not kept or read here; send its text"


class TextPart(TypedFields):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Harmless = None  # the sources of a text that another server wrote
    logprobs: Harmless = None
    prompt_cache_breakpoint: Harmless = None  # has no effect: prompts are always cached


class RefusalPart(TypedFields):
    type: Literal["refusal"]
    refusal: str


class InputImagePart(TypedFields):
    """An image. `detail` has no effect: the model's folder decides the size of images."""

    type: Literal["input_image"]
    file_id: Annotated[Any, AfterValidator(unless_empty("files are not kept here; send an image_url"))] = None
    image_url: str
    detail: Harmless = None
    prompt_cache_breakpoint: Harmless = None


TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
PARTS = TaggedTypes(
    "a part",
    {**dict.fromkeys(TEXT_PARTS, TextPart), "refusal": RefusalPart, "input_image": InputImagePart},
    {"input_file": NO_FILES, "input_audio": "audio is not supported; send its text"},
    way_out="send its text",
)


class MessageItem(TypedFields):
    """A message. `phase` is a client's label, which has no effect."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Any, PARTS] = None
    id: Harmless = None
    status: Harmless = None
    phase: Harmless = None


class ReasoningItem(TypedFields):
    """Reasoning. `encrypted_content` comes from another server, and is ignored; `content` may have the same reasoning
    as text. Clients return it in every turn, so a conversation that began at another server can continue here.
    """

    type: Literal["reasoning"]
    summary: Annotated[Any, PARTS] = None
    content: Annotated[Any, PARTS] = None
    encrypted_content: Harmless = None
    id: Harmless = None
    status: Harmless = None


class FunctionCallItem(TypedFields):
    type: Literal["function_call"]
    name: str
    arguments: str
    call_id: str
    namespace: str | None = None
    caller: Harmless = None  # has no effect: the call has ended
    is_async: Off | None = Field(default=None, alias="async")
    id: Harmless = None
    status: Harmless = None


class FunctionOutputItem(TypedFields):
    """The output of a call. `name` and `namespace` are the same as the call's."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[Any, PARTS] = None
    name: Harmless = None
    namespace: Harmless = None
    caller: Harmless = None
    id: Harmless = None
    status: Harmless = None


ITEMS = TaggedTypes(
    "an item",
    {
        "message": MessageItem,
        "reasoning": ReasoningItem,
        "function_call": FunctionCallItem,
        "function_call_output": FunctionOutputItem,
    },
    {
        **dict.fromkeys(("file_search_call", "web_search_call", "code_interpreter_call"), NOT_RUN),
        **dict.fromkeys(("computer_call", "computer_call_output", "image_generation_call"), NOT_RUN),
        **dict.fromkeys(("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call"), NOT_RUN),
        **dict.fromkeys(("program", "program_output", "tool_search_call", "tool_search_output"), NOT_RUN),
        **dict.fromkeys(("local_shell_call", "local_shell_call_output"), NOT_A_FUNCTION),
        **dict.fromkeys(("shell_call", "shell_call_output"), NOT_A_FUNCTION),
        **dict.fromkeys(("apply_patch_call", "apply_patch_call_output"), NOT_A_FUNCTION),
        **dict.fromkeys(("custom_tool_call", "custom_tool_call_output"), NOT_A_FUNCTION),
        **dict.fromkeys(("compaction", "compaction_trigger"), NOT_ENCRYPTED),
        "item_reference": "send the item itself, or a previous_response_id",
        "additional_tools": "give them in tools",
        "configuration_update": "give its fields next to input",
    },
)


def kind_of(item: dict[str, Any]) -> Any:
    """Returns an item's type, which clients may leave out for messages and references."""
    kind = item.get("type")
    if kind is None:
        return "item_reference" if "id" in item and "role" not in item else "message"
    return kind
