"""Anthropic's routes: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster.api.middleware.direct_routes import GeneratingRoute, PlainRoute
from pd_cluster.api.middleware.http_bodies import json_of, parsed, read_body
from pd_cluster.api.middleware.http_callers import caller_of
from pd_cluster.api.openapi.operations import READ_FAILURES, Operation
from pd_cluster.api.openapi.request_examples import COUNT, MESSAGES
from pd_cluster.api.routes.block_answers import send
from pd_cluster.service.answers.messages_answer import (
    NOT_MARKED,
    CacheEnds,
    MessageAnswer,
    MessageEvent,
    MessagesAnswer,
)
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.error_field_names import with_field_names
from pd_cluster.service.schema.messages.cache_breakpoints import TTLS, Breakpoint, breakpoints_of, extended
from pd_cluster.service.schema.messages.messages_protocol import MessagesPrompt, MessagesRequest
from pd_cluster.service.schema.messages.messages_to_chat import FIELD_NAMES, chat_of
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.service.text_service import TextService


class TokensCount(msgspec.Struct):
    input_tokens: int


@dataclass(frozen=True, slots=True)
class _ChatsOfMessages:
    """Converts a request of `nbytes` bytes to chats."""

    http: Request
    service: TextService
    nbytes: int

    async def of(self, request: MessagesPrompt) -> ChatCompletionRequest:
        variables, reads_reasoning = self.service.template_variables, self.service.reads_reasoning
        return await parsed(self.http, self.nbytes, lambda: chat_of(request, variables, reads_reasoning))

    async def cache_ends(
        self, request: MessagesRequest, chat: ChatCompletionRequest, generation: Generation
    ) -> CacheEnds:
        """Returns how many tokens of the prompt the client wants cached."""
        places = breakpoints_of(request)
        if not places or not self.service.settings.engine.enable_prefix_caching:
            return NOT_MARKED
        lasting = [each for each in places if each.ttl != TTLS[0]]
        ends: dict[Breakpoint, int] = {}
        for place in {places[-1], *lasting[-1:]}:
            longer = await self.of(extended(request, place))
            ends[place] = await self.service.chat_num_shared(chat, longer, generation, caller_of(self.http))
        return CacheEnds(ends[places[-1]], ends[lasting[-1]] if lasting else 0)


def message_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=GeneratingRoute)
    operation = Operation("Answer a conversation, in Anthropic's form.", MessageAnswer, MessagesRequest, MESSAGES)

    @routes.post("/v1/messages", openapi_extra=operation.events(MessageEvent))
    async def messages(http: Request) -> Response:
        received_s = time.monotonic()
        body = await read_body(http)
        request = await parsed(http, len(body), lambda: parse(body, MessagesRequest, has_own_names=True))
        name = service.names.check(request.model, caller_of(http))
        chats = _ChatsOfMessages(http, service, len(body))
        with with_field_names(FIELD_NAMES):
            chat = await chats.of(request)
            generation = await service.chat(chat, received_s, caller_of(http))
            ends = await chats.cache_ends(request, chat, generation)
        return await send(http, service, MessagesAnswer(request, name, generation, ends))

    return routes


def message_count_routes(service: TextService) -> APIRouter:
    """Makes the route that counts tokens, without instances."""
    routes = APIRouter(route_class=PlainRoute)

    @routes.post(
        "/v1/messages/count_tokens",
        openapi_extra=Operation(
            "The number of a conversation's tokens.", TokensCount, MessagesPrompt, COUNT, READ_FAILURES
        ),
    )
    async def count_tokens(http: Request) -> Response:
        body = await read_body(http)
        request = await parsed(http, len(body), lambda: parse(body, MessagesPrompt, has_own_names=True))
        service.names.check(request.model, caller_of(http))
        with with_field_names(FIELD_NAMES):
            chat = await _ChatsOfMessages(http, service, len(body)).of(request)
            num_tokens = await service.chat_num_tokens(chat, caller_of(http))
        return json_of(TokensCount(num_tokens))

    return routes
