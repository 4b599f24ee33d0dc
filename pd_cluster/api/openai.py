"""OpenAI's routes that generate: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster.api.answers import Answer
from pd_cluster.api.caller import caller_of
from pd_cluster.api.chat_answer import ChatAnswer
from pd_cluster.api.chat_protocol import ChatCompletionRequest
from pd_cluster.api.completion_answer import CompletionAnswer
from pd_cluster.api.error_answers import error_body
from pd_cluster.api.generation import Generation
from pd_cluster.api.http import (
    CLIENT_CLOSED_REQUEST,
    DONE,
    EventStream,
    PlainRoute,
    event,
    json_response,
    read_body,
    session_of,
    unless_disconnected,
)
from pd_cluster.api.parse import parse
from pd_cluster.api.protocol import CompletionRequest
from pd_cluster.api.request_names import named
from pd_cluster.api.service import TextService
from pd_cluster.errors import PdClusterError


def openai_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=PlainRoute)

    @routes.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        received_s = time.monotonic()
        request = parse(await read_body(http), ChatCompletionRequest)
        name = service.check_model(request.model)
        generation = await service.chat(named(request, http), received_s, caller_of(http))
        return await _answer(http, service, ChatAnswer(request, name, service, generation))

    @routes.post("/v1/completions")
    async def completions(http: Request) -> Response:
        received_s = time.monotonic()
        request = parse(await read_body(http), CompletionRequest)
        name = service.check_model(request.model)
        generations = await service.completions(named(request, http), received_s, caller_of(http))
        return await _answer(http, service, CompletionAnswer(request, name, service, generations))

    return routes


async def _answer(http: Request, service: TextService, answer: Answer) -> Response:
    session = session_of(http)
    for generation in answer.generations:
        generation.client_id = answer.id
        generation.session = generation.session or session
    if not answer.wanted.stream:
        pieces = await unless_disconnected(http.receive, service.complete(answer.generations))
        if pieces is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        headers = served_by(answer.generations)
        return await json_response(lambda: answer.whole(pieces), large=answer.is_large, headers=headers)
    return EventStream(_events(service, answer), lambda: served_by(answer.generations))


async def _events(service: TextService, answer: Answer) -> AsyncGenerator[bytes, None]:
    """All server-sent events of a request. An error before the first text is raised, a later one is in-band."""
    begun = False
    try:
        async with contextlib.aclosing(service.pieces(answer.generations)) as pieces:
            async for piece in pieces:
                if events := answer.events(piece):
                    begun = True
                    yield events
    except PdClusterError as error:
        if not begun:
            raise
        yield event(error_body(error)) + DONE
        return
    yield (answer.usage_chunk() if answer.wanted.usage else b"") + DONE


def served_by(generations: list[Generation]) -> dict[str, str]:
    """Which instances did the work, for operators; clients ignore it."""
    names = dict.fromkeys(name for generation in generations for name in generation.served_by)
    return {"x-pd-served-by": ",".join(names)} if names else {}
