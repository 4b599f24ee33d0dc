"""OpenAI's newer route that generates: /v1/responses."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster.api.gate.callers import caller_of
from pd_cluster.api.gate.http import GeneratingRoute, read_body
from pd_cluster.api.openai.block_answers import send
from pd_cluster.errors import RequestError
from pd_cluster.service.answers.responses_answer import ResponsesAnswer
from pd_cluster.service.schema.own_words import in_own_words
from pd_cluster.service.schema.parse import parse
from pd_cluster.service.schema.responses_chat import ITS_NAMES, chat_of, items_of
from pd_cluster.service.schema.responses_protocol import ResponsesRequest
from pd_cluster.service.service import TextService


def response_routes(service: TextService) -> APIRouter:
    routes = APIRouter(route_class=GeneratingRoute)

    @routes.post("/v1/responses")
    async def create(http: Request) -> Response:
        received_s = time.monotonic()
        request = parse(await read_body(http), ResponsesRequest, has_own_names=True)
        name = service.check_model(request.model, caller_of(http))
        _check_not_kept(request)
        with in_own_words(ITS_NAMES):
            chat = chat_of(request, items_of(request), service.template_variables)
            generation = await service.chat(chat, received_s, caller_of(http))
        return await send(http, service, ResponsesAnswer(request, name, generation))

    return routes


def _check_not_kept(request: ResponsesRequest) -> None:
    """Raises RequestError for what needs responses that are kept."""
    if request.store:
        raise RequestError("store: this server keeps no responses; leave it out, or give false", param="store")
    if request.previous_response_id is not None:
        raise RequestError(
            "previous_response_id: this server keeps no responses; send the earlier items in input",
            param="previous_response_id",
        )
