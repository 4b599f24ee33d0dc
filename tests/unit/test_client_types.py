"""Every field that OpenAI's and Anthropic's clients can send is honoured, refused by name, or listed as irrelevant to
the answer, at any depth. Our schemas accept unknown fields, so a missing one would be ignored silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pd_cluster.errors import RequestError
from pd_cluster.service.prompts.conversation import conversation_of
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest, ChatMessage
from pd_cluster.service.schema.completion_protocol import HARMLESS, NOT_YET, CompletionRequest
from pd_cluster.service.schema.messages.messages_blocks import BLOCKS
from pd_cluster.service.schema.messages.messages_protocol import MessagesPrompt, MessagesRequest
from pd_cluster.service.schema.messages.messages_to_chat import chat_of as chat_of_messages
from pd_cluster.service.schema.pooling.pooling_protocol import EmbeddingRequest
from pd_cluster.service.schema.request_parsing import checked
from pd_cluster.service.schema.responses.responses_item_types import ITEMS, PARTS
from pd_cluster.service.schema.responses.responses_protocol import ResponsesRequest
from pd_cluster.service.schema.responses.responses_to_chat import chat_of as chat_of_response
from pd_cluster.service.schema.tagged_types import TaggedTypes

REQUESTS: dict[str, type[BaseModel]] = {  # names of the clients' types, because importing the packages takes seconds
    "openai.types.completion_create_params.CompletionCreateParamsBase": CompletionRequest,
    "openai.types.chat.completion_create_params.CompletionCreateParamsBase": ChatCompletionRequest,
    "openai.types.responses.response_create_params.ResponseCreateParamsBase": ResponsesRequest,
    "openai.types.responses.input_token_count_params.InputTokenCountParams": ResponsesRequest,
    "openai.types.embedding_create_params.EmbeddingCreateParams": EmbeddingRequest,
    "anthropic.types.message_create_params.MessageCreateParamsBase": MessagesRequest,
    "anthropic.types.beta.message_create_params.MessageCreateParamsBase": MessagesRequest,
    "anthropic.types.message_count_tokens_params.MessageCountTokensParams": MessagesPrompt,
    "anthropic.types.beta.message_count_tokens_params.MessageCountTokensParams": MessagesPrompt,
}
TO_TEMPLATES = r"messages\.\w+\.(name|tool_call_id|tool_calls)"  # fields of messages that are passed to chat templates
OBFUSCATION = "include_obfuscation"  # requests padding, which clients discard


def leaves(hint: Any) -> Iterator[Any]:
    """Yields all types that a value or its elements may have."""
    if get_origin(hint) is Literal or not get_args(hint):
        yield hint
    else:
        for each in get_args(hint):
            yield from leaves(each)


def types_of(hint: Any) -> set[str]:
    """Returns the values that a field called `type` may have."""
    return {value for leaf in leaves(hint) if get_origin(leaf) is Literal for value in get_args(leaf)}


def missed(theirs: Any, ours: type[BaseModel], place: str, seen: frozenset[Any] = frozenset()) -> Iterator[str]:
    """Yields the fields of a client's type that our schema lacks, including nested ones.

    `seen`: the enclosing client types, because types may be recursive.
    """
    known = {field.alias or name: field for name, field in ours.model_fields.items()}
    for name, hint in get_type_hints(theirs).items():
        where = f"{place}.{name}"
        if name not in known:
            yield where
            continue
        kinds = kinds_in(known[name])
        models = [leaf for leaf in leaves(known[name].annotation) if isinstance(leaf, type)]
        schemas: list[type[BaseModel]] = [model for model in models if issubclass(model, BaseModel)]
        for inner in leaves(hint):
            if not hasattr(inner, "__total__") or inner in seen:
                continue
            within = f"{where}.{inner.__name__}"
            types = types_of(get_type_hints(inner).get("type"))
            if kinds is not None:
                yield from missed_kinds(inner, kinds, types, within, seen | {inner})
            for model in schemas:
                field = model.model_fields.get("type")
                if field is None or not types or types & types_of(field.annotation):  # others are refused by `type`
                    yield from missed(inner, model, within, seen | {inner})


def missed_kinds(theirs: Any, kinds: TaggedTypes, types: set[str], place: str, seen: frozenset[Any]) -> Iterator[str]:
    """Like `missed`, for an object that is selected by `type`; also yields types that the schema does not know."""
    for each in sorted(types):
        if each in kinds.served:
            yield from missed(theirs, kinds.served[each], place, seen)
        elif each not in kinds.refused:
            yield f"{place}: {each}"


def kinds_in(field: FieldInfo) -> TaggedTypes | None:
    """Returns the annotation, on a field's type or within it, that lists the objects in the field by type."""
    found = (*field.metadata, *marks(field.annotation))
    return next((each for each in found if isinstance(each, TaggedTypes)), None)


def marks(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    for each in get_args(hint):
        yield from marks(each)


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_of_the_clients_is_known(name: str) -> None:
    ours = REQUESTS[name]
    harmless = {*HARMLESS, *(NOT_YET if ours in (CompletionRequest, ChatCompletionRequest) else ())}
    found = [place.removeprefix("request.") for place in missed(resolve_name(name), ours, "request")]
    if ours is ChatCompletionRequest:
        found = [place for place in found if not re.fullmatch(TO_TEMPLATES, place)]
    assert [place for place in found if place not in harmless and not place.endswith(OBFUSCATION)] == []


def members(union: str) -> dict[str, Any]:
    """Returns the types of a client's union by their values of `type`."""
    sent = [each for each in leaves(resolve_name(union)) if hasattr(each, "__total__")]  # others occur only in answers
    return {kind: each for each in sent for kind in types_of(get_type_hints(each).get("type"))}


def test_an_item_that_is_not_served_is_refused_by_its_type() -> None:
    items = members("openai.types.responses.response_input_param.ResponseInputItemParam")
    for kind in sorted(items.keys() - ITEMS.served):
        refused([{"type": "message", "role": "user", "content": "a"}, {"type": kind}], kind, 1)


def test_a_part_that_is_not_served_is_refused_by_its_type() -> None:
    parts = members("openai.types.responses.response_input_message_content_list_param.ResponseInputContentParam")
    for kind in sorted(parts.keys() - PARTS.served):
        refused([{"role": "user", "content": [{"type": kind}]}], kind, 0)


def refused(items: list[Any], kind: str, place: int) -> None:
    with pytest.raises(RequestError, match=rf"^input\[{place}\].*{kind}.* is not supported here; \w+") as caught:
        chat_of_response(ResponsesRequest(input=items), [], frozenset())
    assert caught.value.param == "input"


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_block_that_is_not_served_is_refused_by_its_type(role: str) -> None:
    blocks = members("anthropic.types.beta.beta_content_block_param.BetaContentBlockParam")
    blocks |= members("anthropic.types.content_block_param.ContentBlockParam")
    for kind in sorted(blocks.keys() - BLOCKS.served):
        turns: list[Any] = [{"role": role, "content": [{"type": "text", "text": "a"}, {"type": kind}]}]
        with pytest.raises(RequestError, match=rf"^messages\[0\].content\[1\]: .*{kind}.* is not supported here; \w+"):
            chat_of_messages(MessagesPrompt(messages=turns), frozenset(), False)


CHAT_PARTS: dict[str, set[str]] = {  # served type -> fields that are read or known to be irrelevant
    "text": {"type", "text", "prompt_cache_breakpoint"},
    "refusal": {"type", "refusal"},
    "image_url": {"type", "image_url", "prompt_cache_breakpoint"},
}


def test_a_part_of_a_chat_is_known_or_refused_by_its_type() -> None:
    parts = members("openai.types.chat.chat_completion_content_part_param.ChatCompletionContentPartParam")
    parts |= members("openai.types.chat.ChatCompletionContentPartRefusalParam")
    assert parts.keys() > CHAT_PARTS.keys()
    for kind, theirs in parts.items():
        if kind in CHAT_PARTS:
            assert {*get_type_hints(theirs)} <= CHAT_PARTS[kind]
            continue
        message = ChatMessage.model_validate({"role": "user", "content": [{"type": kind}]})
        with pytest.raises(RequestError, match=rf"^messages\[3\].content\[0\]: .*, not '{kind}'; send its text$"):
            message.to_template(3, takes_images=True)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"audio": {"id": "a"}}, "audio: .*send its transcript"),
        ({"function_call": {"name": "f", "arguments": "{}"}}, "function_call: .*tool_calls"),
        ({"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f"}}]}, r"tool_calls\[0\]: must"),
    ],
)
def test_what_an_assistants_message_has_no_place_for_is_refused(fields: dict[str, Any], said: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **fields}]}
    with pytest.raises(RequestError, match=rf"^messages[.\[]1\]?\.{said}") as caught:
        conversation_of(checked(body, ChatCompletionRequest), frozenset())
    assert caught.value.param == "messages"


def test_a_refusal_is_what_the_assistant_said() -> None:
    turns: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "refusal": "No."}]
    found = conversation_of(ChatCompletionRequest(messages=turns), frozenset())
    assert found.messages[1] == {"role": "assistant", "content": "No."}
    turns[1] |= {"content": "Yes.", "refusal": None, "audio": None, "function_call": None, "annotations": []}
    assert conversation_of(ChatCompletionRequest(messages=turns), frozenset()).messages[1]["content"] == "Yes."
