"""Sends answers made of blocks, whole or streamed, for /v1/messages and /v1/responses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial

from fastapi import Request
from fastapi.responses import Response

from pd_cluster.api.middleware.http_bodies import EventStream, json_response, unless_disconnected
from pd_cluster.api.middleware.http_callers import reserve_tokens
from pd_cluster.api.routes.openai_routes import served_by
from pd_cluster.errors import PdClusterError
from pd_cluster.service.answers.reply_blocks import BlockAnswer
from pd_cluster.service.schema.error_bodies import CLIENT_CLOSED_REQUEST
from pd_cluster.service.text_service import TextService


async def _nothing() -> None:
    """The default of `keep`: stores nothing."""


async def send(
    http: Request, service: TextService, answer: BlockAnswer, keep: Callable[[], Awaitable[None]] = _nothing
) -> Response:
    """Generates the answer and sends it. `keep` is called when the answer is complete, before the client receives its
    end.

    Raises RequestError, RateLimited before anything is computed.
    """
    generation = answer.generation
    reserve_tokens(http, [generation])
    generation.client_id = answer.name
    if answer.streams:
        return EventStream(_events(service, answer, keep), lambda: served_by([generation]), headers=answer.headers)
    is_whole = await unless_disconnected(http.receive, _take(service, answer, keep))
    if is_whole is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return await json_response(answer.whole, large=answer.is_large, headers=answer.headers | served_by([generation]))


async def _take(service: TextService, answer: BlockAnswer, keep: Callable[[], Awaitable[None]]) -> bool:
    async with contextlib.aclosing(service.stream(answer.generation)) as pieces:
        async for piece in pieces:
            answer.read(piece)
    await keep()
    return True


async def _events(
    service: TextService, answer: BlockAnswer, keep: Callable[[], Awaitable[None]]
) -> AsyncGenerator[bytes, None]:
    """Yields all events. An error before the first event is raised; a later error is sent in-band."""
    begun = False
    try:
        async with contextlib.aclosing(service.stream(answer.generation)) as pieces:
            async for piece in pieces:
                changes = answer.read(piece)
                repeats_texts = any(change.what == "ends" for change in changes)
                events = await _built(answer, partial(answer.events, changes), repeats_texts)
                if answer.last is not None:
                    await keep()
                    events += await _built(answer, answer.closing)
                if events:
                    begun = True
                    yield events
    except PdClusterError as error:
        if not begun:
            raise
        yield await _built(answer, partial(answer.failure, error))


async def _built(answer: BlockAnswer, make: Callable[[], bytes], repeats_texts: bool = True) -> bytes:
    """Returns the events of `make`, built on a thread if the answer is large, so that no stream waits."""
    return await asyncio.to_thread(make) if answer.is_large and repeats_texts else make()
