"""Every field that OpenAI's and Anthropic's own clients can send is honoured, refused by name, or known to say nothing
about the answer. At any depth: our schemas let unknown fields pass, so one that is missing there is missed silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_message_count_tokens_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import BaseModel

from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest, ChatMessage
from pd_cluster.service.schema.messages_protocol import MessagesPrompt, MessagesRequest, MessageTurn
from pd_cluster.service.schema.pooling_protocol import EmbeddingRequest
from pd_cluster.service.schema.protocol import HARMLESS, NOT_YET, CompletionRequest
from pd_cluster.service.schema.responses_protocol import ResponsesRequest

REQUESTS: list[tuple[Any, type[BaseModel]]] = [
    (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest),
    (response_create_params.ResponseCreateParamsBase, ResponsesRequest),
    (input_token_count_params.InputTokenCountParams, ResponsesRequest),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
    (message_create_params.MessageCreateParamsBase, MessagesRequest),
    (beta_message_create_params.MessageCreateParamsBase, MessagesRequest),
    (message_count_tokens_params.MessageCountTokensParams, MessagesPrompt),
    (beta_message_count_tokens_params.MessageCountTokensParams, MessagesPrompt),
]
OF_ITEMS = (ChatMessage, MessageTurn)  # templates get the fields of the first; the second's blocks are read one by one
OBFUSCATION = "include_obfuscation"  # asks for padding, which clients drop


def leaves(hint: Any) -> Iterator[Any]:
    """Yields the types that a value, or what is in it, may have."""
    if get_origin(hint) is Literal or not get_args(hint):
        yield hint
    else:
        for each in get_args(hint):
            yield from leaves(each)


def kinds_of(hint: Any) -> set[str]:
    """Returns the values that a field called `type` may have."""
    return {value for leaf in leaves(hint) if get_origin(leaf) is Literal for value in get_args(leaf)}


def missed(theirs: Any, ours: type[BaseModel], place: str) -> Iterator[str]:
    """Yields the fields of a client's type that a schema of ours does not have, and those within its fields."""
    known = {field.alias or name: field for name, field in ours.model_fields.items()}
    for name, hint in get_type_hints(theirs).items():
        where = f"{place}.{name}"
        if name not in known:
            yield where
            continue
        models = [leaf for leaf in leaves(known[name].annotation) if isinstance(leaf, type)]
        models = [model for model in models if issubclass(model, BaseModel) and model not in OF_ITEMS]
        for inner in leaves(hint):
            if not hasattr(inner, "__total__"):
                continue
            kinds = kinds_of(get_type_hints(inner).get("type"))
            for model in models:
                field = model.model_fields.get("type")
                if field is None or not kinds or kinds & kinds_of(field.annotation):  # others are refused by type
                    yield from missed(inner, model, f"{where}.{inner.__name__}")


@pytest.mark.parametrize(("theirs", "ours"), REQUESTS, ids=[f"{a.__module__}" for a, _ in REQUESTS])
def test_every_field_of_the_clients_is_known(theirs: Any, ours: type[BaseModel]) -> None:
    harmless = {*HARMLESS, *(NOT_YET if ours in (CompletionRequest, ChatCompletionRequest) else ())}
    found = [place.removeprefix("request.") for place in missed(theirs, ours, "request")]
    assert [place for place in found if place not in harmless and not place.endswith(OBFUSCATION)] == []


class Effort(BaseModel):
    effort: str | None = None


class Hollow(BaseModel):
    """A schema that lacks nearly everything."""

    reasoning: list[Effort] | Effort | None = None


def test_what_is_missing_is_found() -> None:
    found = {*missed(response_create_params.ResponseCreateParamsBase, Hollow, "request")}
    assert {"request.access_programs", "request.reasoning.Reasoning.mode"} <= found
    assert not {"request.reasoning", "request.reasoning.Reasoning.effort"} & found
