"""The routes that return a request's prompt as tokens, with all else that /inference/v1/generate needs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster.api.middleware.direct_routes import PlainRoute
from pd_cluster.api.middleware.http_bodies import json_of, json_response, parsed, read_body, read_request
from pd_cluster.api.middleware.http_callers import caller_of
from pd_cluster.api.openapi.operations import Operation
from pd_cluster.api.openapi.request_examples import CHAT, COMPLETION, MESSAGES
from pd_cluster.api.routes.request_names import named
from pd_cluster.errors import RequestError
from pd_cluster.service.answers.chat_answer import ChatAnswer
from pd_cluster.service.answers.completion_answer import CompletionAnswer
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.schema.error_field_names import with_field_names
from pd_cluster.service.schema.messages.messages_protocol import MessagesRequest
from pd_cluster.service.schema.messages.messages_to_chat import ITS_NAMES, chat_of
from pd_cluster.service.schema.request_parsing import OFFSETS, parse
from pd_cluster.service.schema.tokens.tokens_protocol import RenderedPrompt, rendered
from pd_cluster.service.text_service import TextService

FEW_PROMPTS = 4  # larger answers are built on a thread


def render_routes(service: TextService) -> APIRouter:
    """Makes the routes; response_routes.py makes /v1/responses/render, which needs earlier responses."""
    routes = APIRouter(route_class=PlainRoute)
    _add_chats(routes, service)
    _add_completions(routes, service)
    return routes


def _add_chats(routes: APIRouter, service: TextService) -> None:
    of_chat = "The body of /inference/v1/generate that answers this conversation."
    of_message = "The same for a conversation in Anthropic's form."
    chat, message = {"plain": CHAT["plain"]}, {"plain": MESSAGES["plain"]}

    @routes.post(
        "/v1/chat/completions/render", openapi_extra=Operation(of_chat, RenderedPrompt, ChatCompletionRequest, chat)
    )
    async def render_chat(http: Request) -> Response:
        vocab_size = service.vocab_size
        request = await read_request(
            http, lambda body: parse(body, ChatCompletionRequest, takes=(OFFSETS,), vocab_size=vocab_size)
        )
        name = service.names.check(request.model, caller_of(http))
        return json_of(await rendered_chat(http, service, named(request, http), name, ChatAnswer.prefix))

    @routes.post("/v1/messages/render", openapi_extra=Operation(of_message, RenderedPrompt, MessagesRequest, message))
    async def render_message(http: Request) -> Response:
        body = await read_body(http)
        request = await parsed(http, len(body), lambda: parse(body, MessagesRequest, has_own_names=True))
        name = service.names.check(request.model, caller_of(http))
        with with_field_names(ITS_NAMES):
            chat = await parsed(
                http, len(body), lambda: chat_of(request, service.template_variables, service.reads_reasoning)
            )
            return json_of(await rendered_chat(http, service, chat, name, "msg"))


async def rendered_chat(
    http: Request, service: TextService, request: ChatCompletionRequest, name: str, prefix: str
) -> RenderedPrompt:
    """Returns the tokens and parameters that answer a chat. Raises RequestError, also for a chat with images."""
    generation = await service.chat(request, caller=caller_of(http))
    if generation.order.images:
        raise RequestError(
            "messages: token ids alone cannot carry images; send them to /v1/chat/completions", param="messages"
        )
    offsets = None
    if request.return_token_offsets:
        text, special = await service.chat_text(request), bool(request.add_special_tokens)
        offsets = await service.offsets(text, special, generation.prompt_token_ids, caller_of(http))
    return rendered(request, generation.prompt_token_ids, generation.sampling, name, prefix, offsets)


def _add_completions(routes: APIRouter, service: TextService) -> None:
    summary, tries = "The body of /inference/v1/generate for each prompt.", {"plain": COMPLETION["plain"]}

    @routes.post("/v1/completions/render", openapi_extra=Operation(summary, [RenderedPrompt], CompletionRequest, tries))
    async def render_completion(http: Request) -> Response:
        vocab_size, caller = service.vocab_size, caller_of(http)
        request = await read_request(
            http, lambda body: parse(body, CompletionRequest, takes=(OFFSETS,), vocab_size=vocab_size)
        )
        name = service.names.check(request.model, caller)
        if request.echo or request.max_tokens == 0:
            field = "echo" if request.echo else "max_tokens"
            raise RequestError(f"{field}: has no form in sampling_params; leave it out", param=field)
        generations = await service.completions(named(request, http), caller=caller)
        special, answers = request.add_special_tokens is not False, []
        for prompt, each in zip(request.prompts(), generations, strict=True):
            offsets = None
            if request.return_token_offsets and isinstance(prompt, str):
                offsets = await service.offsets(prompt, special, each.prompt_token_ids, caller)
            answers.append(_rendered_text(request, each, name, offsets))
        return await json_response(lambda: answers, large=len(answers) > FEW_PROMPTS)


def _rendered_text(
    request: CompletionRequest, generation: Generation, name: str, offsets: list[list[int]] | None
) -> RenderedPrompt:
    prefix = CompletionAnswer.prefix
    return rendered(request, generation.prompt_token_ids, generation.sampling, name, prefix, offsets)
