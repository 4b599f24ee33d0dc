"""OpenAI's routes that generate: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster.api.middleware.direct_routes import GeneratingRoute
from pd_cluster.api.middleware.http_bodies import (
    EventStream,
    Last,
    json_response,
    parsed,
    read_body,
    unless_disconnected,
)
from pd_cluster.api.middleware.http_callers import caller_of, owner_of, reserve_tokens
from pd_cluster.api.openapi.operations import Operation
from pd_cluster.api.openapi.request_examples import CHAT, COMPLETION, TOOLS
from pd_cluster.api.routes.load_header import load_header
from pd_cluster.api.routes.request_names import named
from pd_cluster.api.routes.stream_resumption import ResumableStream, stream_resumption
from pd_cluster.errors import PdClusterError
from pd_cluster.service.answers.chat_answer import ChatAnswer, ChatCompletion, ChatCompletionChunk
from pd_cluster.service.answers.completion_answer import Completion, CompletionAnswer, CompletionChunk
from pd_cluster.service.answers.openai_answer import Answer
from pd_cluster.service.answers.sse import DONE, event
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.schema.error_bodies import CLIENT_CLOSED_REQUEST, error_body
from pd_cluster.service.schema.request_parsing import HANDLE, RequestT, parse
from pd_cluster.service.text_service import TextService


def openai_routes(service: TextService) -> APIRouter:
    routes, tries = APIRouter(route_class=GeneratingRoute), TOOLS | CHAT if service.takes_tools else CHAT
    resumption = stream_resumption(service)
    of_chat = Operation("Answer a conversation.", ChatCompletion, ChatCompletionRequest, tries)
    of_text = Operation("Continue a text.", Completion, CompletionRequest, COMPLETION)

    @routes.post("/v1/chat/completions", openapi_extra=of_chat.chunks(ChatCompletionChunk))
    async def chat(http: Request) -> Response:
        received_s = time.monotonic()
        body = await read_body(http)
        request = await parsed(http, len(body), lambda: _parse(body, ChatCompletionRequest, service))
        name = service.names.check(request.model, caller_of(http))
        generation = await service.chat(named(request, http), received_s, caller_of(http))
        stream = resumption.begin(http, request, [generation])
        answer = ChatAnswer(request, name, service, generation)
        if stream is not None:
            stream.keep("chat", body, answer)
        return await answered(http, service, answer, stream)

    @routes.post("/v1/completions", openapi_extra=of_text.chunks(CompletionChunk))
    async def completions(http: Request) -> Response:
        received_s = time.monotonic()
        body = await read_body(http)
        request = await parsed(http, len(body), lambda: _parse(body, CompletionRequest, service))
        name = service.names.check(request.model, caller_of(http))
        generations = await service.completions(named(request, http), received_s, caller_of(http))
        stream = resumption.begin(http, request, generations)
        answer = CompletionAnswer(request, name, service, generations)
        if stream is not None:
            stream.keep("completions", body, answer)
        return await answered(http, service, answer, stream)

    return routes


def _parse(body: bytes, kind: type[RequestT], service: TextService) -> RequestT:
    return parse(body, kind, takes=(HANDLE,), vocab_size=service.vocab_size)


async def answered(
    http: Request, service: TextService, answer: Answer, stream: ResumableStream | None = None
) -> Response:
    """Runs the request, and answers whole or in chunks. `stream`: for a stream that may resume."""
    if answer.wanted.kv_transfer_params:
        orders = [generation.order for generation in answer.generations]
        asked = answer.wanted.kv_transfer_params
        plan = service.kv_handles.plan(asked, owner_of(http), orders, answer.wanted.stream)
        answer.kv_handle = plan.told
        answer.generations[0].follow_session(plan.session)  # a request with a handle has only one generation
    reserve_tokens(http, answer.generations)
    for generation in answer.generations:
        generation.client_id = answer.id
    if not answer.wanted.stream:
        pieces = await unless_disconnected(http.receive, service.complete(answer.generations))
        if pieces is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        headers = served_by(answer.generations) | load_header(http, service)
        return await json_response(lambda: answer.whole(pieces), large=answer.is_large, headers=headers)
    events, headers = _events(service, answer), load_header(http, service)
    if stream is not None:
        events, headers = stream.numbered(events), headers | stream.headers
    return EventStream(events, lambda: served_by(answer.generations), headers)


async def _events(service: TextService, answer: Answer) -> AsyncGenerator[bytes, None]:
    """Yields all server-sent events of a request.

    An error before the first text is raised; a later error is sent in-band.
    """
    begun, end = False, b""
    num_left = sum(len(generation.sequences) for generation in answer.generations)
    try:
        async with contextlib.aclosing(service.pieces(answer.generations)) as pieces:
            async for piece in pieces:
                events = answer.events(piece)
                num_left -= piece.finish_reason is not None
                if not num_left:
                    end = events  # sent together with the closing events
                elif events:
                    begun = True
                    yield events
    except PdClusterError as error:
        if not begun and not end:
            raise
        yield Last(end + event(error_body(error)) + DONE)
        return
    yield Last(end + answer.closing_chunk() + DONE)


def served_by(generations: list[Generation]) -> dict[str, str]:
    """Returns a header with the instances that served the request, for operators; clients ignore it."""
    names = dict.fromkeys(name for generation in generations for name in generation.served_by)
    return {"x-pd-served-by": ",".join(names)} if names else {}
