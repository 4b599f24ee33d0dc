"""vLLM's derender routes, which convert token ids from /inference/v1/generate to a chat's or completion's answer.

Each route prepares the prompt again, as the render routes do, and then reads the tokens as if they had just been
generated. No instance is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster.api.middleware.direct_routes import PlainRoute
from pd_cluster.api.middleware.http_bodies import json_response, read_request
from pd_cluster.api.middleware.http_callers import caller_of
from pd_cluster.api.openapi.operations import READ_FAILURES, Operation
from pd_cluster.api.openapi.request_examples import DERENDER_CHAT, DERENDER_COMPLETION
from pd_cluster.errors import RequestError
from pd_cluster.service.answers.chat_answer import ChatAnswer, ChatCompletion
from pd_cluster.service.answers.completion_answer import Completion, CompletionAnswer
from pd_cluster.service.answers.derendered_pieces import check_token_ids, pieces_of
from pd_cluster.service.generation.prompt_generation import Generation, Usage
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.schema.request_parsing import HANDLE, OFFSETS, checked, parse
from pd_cluster.service.schema.tokens.derender_protocol import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderedAnswer,
    DerenderRequest,
)
from pd_cluster.service.text_service import TextService

MAX_TOKENS = 1 << 18  # the tokens of all answers in a request, as for /detokenize
NUM_CHARS_PER_TOKEN = 4  # an estimate, from which the duration of the work is derived
UNSUPPORTED_FIELDS: Mapping[str, Any] = {  # fields of the request that token ids alone cannot satisfy
    **dict.fromkeys(("stream", "stream_options", "best_of", "prompt_logprobs", "include_metrics")),
    **dict.fromkeys(("kv_transfer_params", "return_token_offsets", "use_beam_search", "prediction")),
}

DerenderT = TypeVar("DerenderT", bound=DerenderRequest)


def derender_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=PlainRoute)
    of_chat, of_text = "Convert token ids to a chat's answer.", "Convert token ids to a completion's answer."
    chats = Operation(of_chat, ChatCompletion, DerenderChatRequest, DERENDER_CHAT, READ_FAILURES)
    texts = Operation(of_text, Completion, DerenderCompletionRequest, DERENDER_COMPLETION, READ_FAILURES)

    @routes.post("/v1/chat/completions/derender", openapi_extra=chats)
    async def derender_chat(http: Request) -> Response:
        request = await read_request(http, lambda body: _whole(body, DerenderChatRequest))
        name, given = service.names.check(request.model, caller_of(http)), request.generate_response
        num_tokens = _check(service, [given])
        chat = checked(request.chat_request, ChatCompletionRequest, takes=(HANDLE, OFFSETS))
        chat = chat.model_copy(update={**UNSUPPORTED_FIELDS, "n": len(given.choices)})
        generation = await service.chat(chat, caller=caller_of(http))
        if generation.order.images:
            raise RequestError("chat_request: token ids alone cannot carry images", param="chat_request")
        _follow(generation, request.prompt_token_ids or given.prompt_token_ids, service.vocab_size)

        def work() -> ChatCompletion:
            answer = ChatAnswer(chat, name, service, generation)
            whole = answer.whole(pieces_of(generation, given.in_order()))
            whole.usage = _with_prompt(whole.usage, request.prompt_tokens)
            return msgspec.structs.replace(whole, id=given.request_id or whole.id)

        found = await service.intake.encoder.run(work, NUM_CHARS_PER_TOKEN * num_tokens, caller_of(http))
        return await json_response(lambda: found, large=num_tokens > MAX_TOKENS >> 4)

    @routes.post("/v1/completions/derender", openapi_extra=texts)
    async def derender_completion(http: Request) -> Response:
        request = await read_request(http, lambda body: _whole(body, DerenderCompletionRequest))
        name, given = service.names.check(request.model, caller_of(http)), request.generate_responses
        num_tokens = _check(service, given)
        generations, asked = await _completions(http, service, request)

        def work() -> Completion:
            answer = CompletionAnswer(asked, name, service, generations)
            pieces = [pieces_of(each, one.in_order()) for each, one in zip(generations, given, strict=True)]
            whole = answer.whole([piece for each in pieces for piece in each])
            told = None if request.prompt_tokens is None else sum(request.prompt_tokens)
            whole.usage = _with_prompt(whole.usage, told)
            return msgspec.structs.replace(whole, id=given[0].request_id or whole.id)

        found = await service.intake.encoder.run(work, NUM_CHARS_PER_TOKEN * num_tokens, caller_of(http))
        return await json_response(lambda: found, large=num_tokens > MAX_TOKENS >> 4)

    return routes


async def _completions(
    http: Request, service: TextService, request: DerenderCompletionRequest
) -> tuple[list[Generation], CompletionRequest]:
    """Prepares the completion again. Raises RequestError unless there is an answer for each prompt."""
    given = request.generate_responses
    asked = checked(request.completion_request, CompletionRequest, takes=(HANDLE, OFFSETS))
    if asked.echo:
        raise RequestError("echo: token ids have no text of the prompt; leave it out", param="completion_request")
    if len({len(each.choices) for each in given}) > 1:
        raise RequestError("generate_responses: each needs the same number of choices", param="generate_responses")
    asked = asked.model_copy(update={**UNSUPPORTED_FIELDS, "n": len(given[0].choices)})
    prompts = asked.prompts()
    for name, values in (("generate_responses", given), *_lists(request)):
        if values is not None and len(values) != len(prompts):
            raise RequestError(f"{name}: {len(values)} for {len(prompts)} prompts; give one for each", param=name)
    generations = await service.completions(asked, caller=caller_of(http))
    for at, generation in enumerate(generations):
        own = request.prompt_token_ids[at] if request.prompt_token_ids is not None else None
        _follow(generation, own or given[at].prompt_token_ids, service.vocab_size)
    return generations, asked


def _lists(request: DerenderCompletionRequest) -> tuple[tuple[str, list[Any] | None], ...]:
    return ("prompt_tokens", request.prompt_tokens), ("prompt_token_ids", request.prompt_token_ids)


def _whole(body: bytes, kind: type[DerenderT]) -> DerenderT:
    """Raises RequestError for an invalid request or a stream."""
    request = parse(body, kind, has_own_names=True)
    request.check_whole()
    return request


def _check(service: TextService, answers: list[DerenderedAnswer]) -> int:
    """Returns the number of tokens. Raises RequestError."""
    if not service.tokenizer.has_text:
        raise RequestError("token_ids: there is no tokenizer (--skip-tokenizer-init)", param="token_ids")
    return check_token_ids(answers, service.vocab_size, service.max_model_len, MAX_TOKENS)


def _follow(generation: Generation, token_ids: list[int] | None, vocab_size: int) -> None:
    """Makes the answer continue the client's prompt tokens. Raises RequestError."""
    if not token_ids or token_ids == generation.prompt_token_ids:
        return
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        name = "prompt_token_ids"
        raise RequestError(f"{name}: ids must be in 0 to {vocab_size - 1}", param=name)
    generation.resume(msgspec.structs.replace(generation.order, prompt_token_ids=token_ids))


def _with_prompt(usage: Usage, num_tokens: int | None) -> Usage:
    """Returns the usage with the client's own count of prompt tokens."""
    if num_tokens is None:
        return usage
    total = num_tokens + usage.completion_tokens
    return msgspec.structs.replace(usage, prompt_tokens=num_tokens, total_tokens=total)
