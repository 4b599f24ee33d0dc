"""Converts prompts or conversations and their parameters to the API's requests, before any work.

Errors that do not depend on the model are raised here, with the API's messages. Errors that depend on the model and its
limits are found when a request begins (llm_answers.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.offline.llm_adapters import LoRARequest
from pd_cluster.offline.llm_prompts import Prompt, named_pictures, pictures_of
from pd_cluster.offline.llm_sampling import SamplingParams, plain
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.schema.request_parsing import checked
from pd_cluster.service.schema.tool_fields import tools_of


@dataclass(frozen=True, slots=True)
class LLMRequest:
    """`prompt` is None for a conversation. `most_together`: the limit of prompt and output tokens, if any."""

    request_id: str
    request: CompletionRequest | ChatCompletionRequest
    prompt: Prompt | None
    most_together: int | None = None
    shows_text: bool = True
    allows_control_tokens: bool | None = None  # of a conversation; None: the service's setting
    lora_request: LoRARequest | None = None
    variant: str = ""  # the digest of its adapter
    pictures: tuple[Any, ...] = ()  # in the order of the prompt's placeholders; messages refer to them by index


def with_adapters(
    asks: list[LLMRequest], requests: Sequence[LoRARequest | None], variants: Sequence[str]
) -> list[LLMRequest]:
    """Returns the requests, each with its adapter."""
    pairs = zip(asks, requests, variants, strict=True)
    return [replace(ask, lora_request=request, variant=variant) for ask, request, variant in pairs]


def named(ask: LLMRequest, request_id: str, priority: int) -> LLMRequest:
    """Returns the request with the id and priority that its caller gave. Raises RequestError."""
    given = {"prompt": "", "priority": priority}
    request = ask.request.model_copy(update={"priority": checked(given, CompletionRequest).priority})
    return replace(ask, request_id=request_id, request=request)


def requests_for_prompts(
    prompts: list[Prompt],
    params: list[SamplingParams],
    guided: dict[str, Any],
    new_seed: Callable[[], int],
    has_text: bool = True,
) -> list[LLMRequest]:
    """Makes a request for each prompt. `guided` applies to all of them. Raises RequestError."""
    check_have_text(prompts, has_text)
    parsed: dict[int, CompletionRequest] = {}  # id() of the parameters, which prompts may share -> the parsed request
    asks = []
    for prompt, each in zip(prompts, params, strict=True):
        request = parsed.get(id(each))
        if request is None:
            _check_together(each)
            fields = _with_guide(each.fields(), guided)
            request = parsed[id(each)] = checked({"prompt": "", **fields}, CompletionRequest)
            _check_numbers(request)
        own = request if request.own_seed is not None else request.model_copy(update={"seed": new_seed()})
        name, pictures = f"cmpl-{secrets.token_hex(12)}", pictures_of(prompt)
        asks.append(LLMRequest(name, own, prompt, _most_together(each), has_text, pictures=pictures))
    return asks


def check_have_text(prompts: list[Prompt], has_text: bool) -> None:
    """Raises RequestError for a text if there is no tokenizer."""
    if not has_text and any(isinstance(prompt, str) for prompt in prompts):
        raise RequestError(
            "prompts: text, but skip_tokenizer_init is set; give prompt_token_ids, or leave skip_tokenizer_init out",
            param="prompts",
        )


class ChatAbilities(NamedTuple):
    has_tool_parser: bool
    takes_images: bool


def requests_for_chats(
    conversations: list[list[dict[str, Any]]],
    params: list[SamplingParams],
    template: dict[str, Any],
    new_seed: Callable[[], int],
    able: ChatAbilities,
    allows_control_tokens: bool | None = None,
) -> list[LLMRequest]:
    """Makes a request for each conversation. `template`: the chat's other fields, for all. Raises RequestError."""
    shared = {name: plain(name, value) for name, value in template.items() if value is not None}
    asks = []
    for messages, each in zip(conversations, params, strict=True):
        _check_together(each)
        fields = _for_chat(each.fields())
        messages, pictures = named_pictures(messages)
        request = checked({"messages": plain("messages", messages), **fields, **shared}, ChatCompletionRequest)
        _check_numbers(request)
        for at, message in enumerate(request.messages):
            message.to_template(at, able.takes_images)
        tools_of(request, able.has_tool_parser)
        if request.own_seed is None:
            request = request.model_copy(update={"seed": new_seed()})
        name, most = f"chatcmpl-{secrets.token_hex(12)}", _most_together(each)
        more: dict[str, Any] = {"allows_control_tokens": allows_control_tokens, "pictures": tuple(pictures)}
        asks.append(LLMRequest(name, request, None, most, **more))
    return asks


def _for_chat(fields: dict[str, Any]) -> dict[str, Any]:
    """Converts a completion's validated `logprobs` to a chat's switch and number."""
    checked({"prompt": "", **fields}, CompletionRequest)
    if (number := fields.pop("logprobs", None)) is not None:
        fields |= {"logprobs": True, "top_logprobs": number}
    return fields


def _with_guide(fields: dict[str, Any], guided: dict[str, Any]) -> dict[str, Any]:
    for name in guided:
        if name in fields:
            raise RequestError(
                f"guided_options_request: sampling_params also has {name}; give one of the two",
                param="guided_options_request",
            )
    return fields | guided


def _check_numbers(request: CompletionRequest | ChatCompletionRequest) -> None:
    """Checks values that the service would refuse only after work on other prompts has begun."""
    most, least = request.max_tokens, request.min_tokens or 0
    if most is not None and most < 1:
        raise RequestError(f"max_tokens: {most}; must be at least 1", param="max_tokens")
    if most is not None and least > most:
        raise RequestError(
            f"min_tokens: {least} is more than max_tokens, {most}; raise max_tokens or lower min_tokens",
            param="min_tokens",
        )


def _check_together(params: SamplingParams) -> None:
    if params.max_tokens_includes_prompt and params.max_tokens is msgspec.UNSET:
        raise RequestError(
            "max_tokens_includes_prompt: needs max_tokens; give both", param="max_tokens_includes_prompt"
        )


def _most_together(params: SamplingParams) -> int | None:
    includes = params.max_tokens_includes_prompt and isinstance(params.max_tokens, int)
    return params.max_tokens if includes and isinstance(params.max_tokens, int) else None
