"""Sends answers that are made of blocks, whole or as a stream: what /v1/messages and /v1/responses share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from fastapi import Request
from fastapi.responses import Response

from pd_cluster.api.gate.callers import reserve_tokens
from pd_cluster.api.gate.http import EventStream, json_response, session_of, unless_disconnected
from pd_cluster.api.openai.openai import served_by
from pd_cluster.errors import PdClusterError
from pd_cluster.service.answers.blocks import BlockAnswer
from pd_cluster.service.service import TextService
from pd_cluster.service.status import CLIENT_CLOSED_REQUEST


async def send(http: Request, service: TextService, answer: BlockAnswer) -> Response:
    """Generates the answer and sends it. Raises RequestError, RateLimited before anything is computed."""
    generation = answer.generation
    reserve_tokens(http, [generation])
    generation.client_id = answer.id
    generation.amend(session=generation.order.session or session_of(http))
    if answer.streams:
        return EventStream(_events(service, answer), lambda: served_by([generation]), headers=answer.headers)
    is_whole = await unless_disconnected(http.receive, _take(service, answer))
    if is_whole is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return await json_response(answer.whole, large=False, headers=answer.headers | served_by([generation]))


async def _take(service: TextService, answer: BlockAnswer) -> bool:
    async with contextlib.aclosing(service.stream(answer.generation)) as pieces:
        async for piece in pieces:
            answer.take(piece)
    return True


async def _events(service: TextService, answer: BlockAnswer) -> AsyncGenerator[bytes, None]:
    """Yields all events. An error before the first one is raised, a later one is sent in-band."""
    begun = False
    try:
        async with contextlib.aclosing(service.stream(answer.generation)) as pieces:
            async for piece in pieces:
                if events := answer.events(piece):
                    begun = True
                    yield events
    except PdClusterError as error:
        if not begun:
            raise
        yield answer.failure(error)
