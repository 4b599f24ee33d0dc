"""Anthropic's routes: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster.api.middleware.direct_routes import GeneratingRoute, PlainRoute
from pd_cluster.api.middleware.http_bodies import json_of, parsed, read_body
from pd_cluster.api.middleware.http_callers import caller_of
from pd_cluster.api.openapi.operations import READ_FAILURES, Operation
from pd_cluster.api.openapi.request_examples import COUNT, MESSAGES
from pd_cluster.api.routes.block_answers import send
from pd_cluster.service.answers.messages_answer import MessageAnswer, MessageEvent, MessagesAnswer
from pd_cluster.service.schema.error_field_names import with_field_names
from pd_cluster.service.schema.messages.messages_protocol import MessagesPrompt, MessagesRequest
from pd_cluster.service.schema.messages.messages_to_chat import FIELD_NAMES, chat_of
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.service.text_service import TextService


class TokensCount(msgspec.Struct):
    input_tokens: int


def message_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=GeneratingRoute)
    operation = Operation("Answer a conversation, in Anthropic's form.", MessageAnswer, MessagesRequest, MESSAGES)

    @routes.post("/v1/messages", openapi_extra=operation.events(MessageEvent))
    async def messages(http: Request) -> Response:
        received_s = time.monotonic()
        body = await read_body(http)
        request = await parsed(http, len(body), lambda: parse(body, MessagesRequest, has_own_names=True))
        name = service.names.check(request.model, caller_of(http))
        with with_field_names(FIELD_NAMES):
            chat = await parsed(
                http, len(body), lambda: chat_of(request, service.template_variables, service.reads_reasoning)
            )
            generation = await service.chat(chat, received_s, caller_of(http))
        return await send(http, service, MessagesAnswer(request, name, generation))

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
            chat = await parsed(
                http, len(body), lambda: chat_of(request, service.template_variables, service.reads_reasoning)
            )
            num_tokens = await service.chat_num_tokens(chat, caller_of(http))
        return json_of(TokensCount(num_tokens))

    return routes
