"""GET /v1/streams: the rest of a stream whose connection broke, at any scheduler of the same workers."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster.api.middleware.direct_routes import PlainRoute
from pd_cluster.api.middleware.http_callers import caller_of, count_request, owner_of
from pd_cluster.api.routes.openai_routes import answered
from pd_cluster.cluster.streams.stream_records import RecordPlace
from pd_cluster.errors import RequestError
from pd_cluster.extras.resumable_streams.stream_tickets import StreamKeeper, StreamNotFound, StreamTicket
from pd_cluster.extras.resumable_streams.ticketed_stream import TOKEN_HEADER, TicketedStream
from pd_cluster.service.answers.chat_answer import ChatAnswer
from pd_cluster.service.answers.completion_answer import CompletionAnswer
from pd_cluster.service.answers.openai_answer import Answer
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.schema.request_parsing import HANDLE, parse
from pd_cluster.service.text_service import TextService

MOST_INDEX_DIGITS = 9


def resume_routes(service: TextService, keeper: StreamKeeper) -> APIRouter:
    routes = APIRouter(route_class=PlainRoute)

    @routes.get("/v1/streams", include_in_schema=False)
    async def streams(http: Request) -> Response:
        received_s = time.monotonic()
        count_request(http)
        ticket = _ticket_of(http)
        place = await service.router.find(ticket.digest)
        if place is None:
            raise StreamNotFound
        stream = TicketedStream(ticket, keeper)
        answer = await _answer(http, service, stream, place, received_s)
        return await answered(http, service, answer, stream)

    return routes


def _ticket_of(http: Request) -> StreamTicket:
    """Reads `Last-Event-ID: TOKEN-INDEX`, or an index and the token's own header. Raises RequestError."""
    last, token = http.headers.get("last-event-id", ""), http.headers.get(TOKEN_HEADER, "")
    before, _, index = last.rpartition("-")
    if index and not (index.isdecimal() and len(index) <= MOST_INDEX_DIGITS):
        raise RequestError("Last-Event-ID: expected the id of an event, TOKEN-INDEX")
    return StreamTicket.of(token or before, owner_of(http), int(index) if index else -1)


async def _answer(
    http: Request, service: TextService, stream: TicketedStream, place: RecordPlace, received_s: float
) -> Answer:
    """Makes the answer again, in the state before its first chunk."""
    recipe, caller = stream.keeper.recipe_of(place), caller_of(http)
    answer: Answer
    if recipe.kind == "chat":
        chat = parse(recipe.body, ChatCompletionRequest, takes=(HANDLE,), vocab_size=service.vocab_size)
        name = service.names.check(chat.model, caller)
        generation = await service.chat(chat, received_s, caller)
        stream.ticket.fix_call_ids(generation)
        answer = ChatAnswer(chat, name, service, generation)
    else:
        request = parse(recipe.body, CompletionRequest, takes=(HANDLE,), vocab_size=service.vocab_size)
        name = service.names.check(request.model, caller)
        (generation,) = generations = await service.completions(request, received_s, caller)
        answer = CompletionAnswer(request, name, service, generations)
    answer.identity = recipe.id, recipe.created
    stream.keeper.keep(generation, stream.ticket, recipe, place)
    return answer
