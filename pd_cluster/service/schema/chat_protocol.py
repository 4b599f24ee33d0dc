"""Defines the schema of a conversation: messages, tools, and other input of a chat template.

Knows nothing of how a template renders them (conversation.py) or of the answer.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.completion_protocol import FAIL_FAST, Count, GenerationRequest, NumLogprobs, few
from pd_cluster.service.schema.tagged_types import unless_empty

MAX_TOOLS = 128
MAX_DESCRIPTION_NUM_CHARS = 65_536  # some agents' descriptions of tools exceed 16,384 characters
MAX_TEMPLATE_NUM_CHARS = 65_536
MAX_PLACE_NUM_CHARS = 128
MEDIA = ("image", "video")
OWN_NAME_PARTS = ("refusal", "thinking")  # types of parts whose text field has the type's name
TEXT_PARTS = ("text", "input_text", "output_text", *OWN_NAME_PARTS)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # the API's; a template may name more

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]


class Medium(NamedTuple):
    """`where`: its path in the request. `uuid`: the client's name for it; with a uuid, `url` may be ""."""

    where: str
    url: str
    kind: str
    uuid: str = ""


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]  # see conversation.py
    content: str | Annotated[list[dict[str, Any] | str], FAIL_FAST] | None = None
    refusal: str | None = None  # used as the content of a message without content
    audio: Annotated[Any, AfterValidator(unless_empty("audio is not supported; send its transcript as content"))] = None
    function_call: Annotated[Any, AfterValidator(unless_empty("calls are sent in tool_calls"))] = None

    @property
    def num_calls(self) -> int:
        calls = (self.model_extra or {}).get("tool_calls")
        return len(calls) if isinstance(calls, list) else 0

    @property
    def text(self) -> str:
        """The content's text parts, joined as for the template."""
        if self.content is None or isinstance(self.content, str):
            return self.content or self.refusal or ""
        parts = self._parts(0, takes_images=True)
        return "\n".join(part["text"] for part in parts if part["type"] == "text")

    def media(self, index: int) -> list[Medium]:
        """Returns the images and videos among the content's parts, if `to_template` accepts them.

        A part that was converted from another API keeps its `place` in that API's request.
        """
        found = []
        for at, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if isinstance(part, dict) and (medium := _medium(part)) is not None:
                kind, url, uuid = medium
                place = _own_place(part) or f"messages[{index}].content[{at}].{kind}_url"
                found.append(Medium(place, url, kind, uuid))
        return found

    def to_template(self, index: int, takes_images: bool = False, in_parts: bool = False) -> dict[str, Any]:
        """Returns the message for chat templates: its joined texts, or a list of parts if there are media or `in_parts`
        is set. With `in_parts`, parts keep all their fields.

        Raises RequestError for unsupported parts.
        """
        fields = {**(self.model_extra or {}), "role": self.role}
        message = {name: value for name, value in fields.items() if value is not None}
        # Templates test for None in messages with calls, and expect text in others.
        said = self.content if self.content is not None else self.refusal
        message["content"] = said if said is not None or message.get("tool_calls") else ""
        if isinstance(self.content, list):
            parts = self._parts(index, takes_images, in_parts)
            stay = in_parts or any(part["type"] in MEDIA for part in parts)
            message["content"] = parts if stay else "\n".join(part["text"] for part in parts)
        return message

    def _parts(self, index: int, takes_images: bool, with_fields: bool = False) -> list[dict[str, Any]]:
        """Returns the content's parts in the form for templates. `with_fields`: text parts keep their other fields.

        Raises RequestError.
        """
        found: list[dict[str, Any]] = []
        for at, part in enumerate(self.content or ()):
            if isinstance(part, str):
                found.append({"type": "text", "text": part})
                continue
            kind = part.get("type")
            text = part.get(kind if kind in OWN_NAME_PARTS else "text")
            if takes_images and (medium := _medium(part)) is not None:
                found.append({"type": medium[0]})
            elif kind in TEXT_PARTS and isinstance(text, str):
                more = (
                    {name: value for name, value in part.items() if name not in (kind, "place")} if with_fields else {}
                )
                found.append({**more, "type": "text", "text": text})
            else:
                raise _no_part(kind, _own_place(part) or f"messages[{index}].content[{at}]", takes_images)
        return found


def _no_part(kind: Any, place: str, takes_images: bool) -> RequestError:
    """Returns the error for an unsupported part."""
    name = str(kind).removesuffix("_url")
    if kind in TEXT_PARTS:
        why = f"{kind if kind in OWN_NAME_PARTS else 'text'}: must be a string"
        return RequestError(f"{place}.{why}", param="messages")
    if takes_images and name in MEDIA:
        return RequestError(f'{place}: must have {{"{name}_url": {{"url": …}}}}', param="messages")
    known = "'text', 'image_url' and 'video_url'" if takes_images else "'text'"
    why = f"only parts of type {known} are supported, not {reprlib.repr(kind)}; send its text"
    return RequestError(f"{place}: {why}", param="messages")


def _own_place(part: dict[str, Any]) -> str | None:
    """Returns the place that a converted part had in the other API's request; None if it was not converted."""
    own = part.get("place")
    return own if isinstance(own, str) and len(own) <= MAX_PLACE_NUM_CHARS else None


def _medium(part: dict[str, Any]) -> tuple[str, str, str] | None:
    """Returns the kind, URL and uuid of an image or video part; None for other parts.

    A part that has a uuid but no image or video refers to an earlier one.
    """
    kind, uuid = str(part.get("type")).removesuffix("_url"), part.get("uuid")
    given = part.get(f"{kind}_url")
    url = given.get("url") if isinstance(given, dict) else given
    uuid = uuid if isinstance(uuid, str) else ""
    url = "" if uuid and given is None else url
    return (kind, url, uuid) if kind in MEDIA and isinstance(url, str) else None


class Function(BaseModel):
    """A function that a model may call. `parameters`: a JSON schema of its arguments; None: any object is valid."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: Name
    description: str | None = Field(default=None, max_length=MAX_DESCRIPTION_NUM_CHARS)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: FunctionName


class AllowedSet(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(BaseModel):
    """Some of the request's tools, with a mode."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet


def form_of(choice: Any) -> str | None:
    """Returns the form of a tool_choice: a word, or the type of an object."""
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", "word")
    return kind if isinstance(kind, str) else None


OF_FORMS = Discriminator(
    form_of,
    custom_error_type="tool_choice",
    custom_error_message="expected 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'",
)
Word = Annotated[Literal["none", "auto", "required"], Tag("word")]
ToolChoiceField = Annotated[
    Word | Annotated[NamedTool, Tag("function")] | Annotated[AllowedTools, Tag("allowed_tools")], OF_FORMS
]


class ChatFields(BaseModel):
    """The fields that determine a conversation's prompt; /tokenize takes the same."""

    model_config = ConfigDict(strict=True, extra="allow")

    messages: Annotated[list[ChatMessage], BeforeValidator(few)] = Field(min_length=1, fail_fast=True)
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoiceField | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None
    chat_template: str | None = Field(default=None, min_length=1, max_length=MAX_TEMPLATE_NUM_CHARS)
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None

    @property
    def offered_tools(self) -> list[FunctionTool]:
        """The tools that the model sees: all of them, so that prompts share a prefix. A guide enforces the allowed
        ones.

        Raises RequestError for an allowed tool that is not in `tools`.
        """
        tools = self.tools or []
        for name in sorted((self.allowed_names or frozenset()) - {tool.function.name for tool in tools}):
            raise RequestError(f"tool_choice: no tool is called {reprlib.repr(name)}", param="tool_choice")
        return tools

    @property
    def allowed_names(self) -> frozenset[str] | None:
        """The names of tools that tool_choice allows, if it lists any."""
        if not isinstance(self.tool_choice, AllowedTools):
            return None
        return frozenset(tool.function.name for tool in self.tool_choice.allowed_tools.tools)

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends with the beginning of an assistant message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


class ChatCompletionRequest(GenerationRequest, ChatFields):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Count | None = None
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def wanted_name(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"
