"""Shared by the public and the admin port: bodies with a limit, streams that close."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pd_cluster.api.front_door import MAX_BODY_NBYTES as MAX_BODY_NBYTES
from pd_cluster.errors import RequestError

MAX_LENGTH_NUM_DIGITS = 18  # of a body's declared length; more are too many, whatever they are
CLIENT_CLOSED_REQUEST = 499
BODY_TIMEOUT_S = 60.0
LOOKING = ["GET", "HEAD"]

T = TypeVar("T")


class BodyTooLarge(RequestError):
    status = 413


async def read_body(request: Request) -> bytes:
    """Raises BodyTooLarge before more than the limit is held, RequestError when it does not come in time."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > MAX_LENGTH_NUM_DIGITS or int(declared) > MAX_BODY_NBYTES):
        raise BodyTooLarge(f"the body is larger than {MAX_BODY_NBYTES >> 20} MiB")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_NBYTES:
                    raise BodyTooLarge(f"the body is larger than {MAX_BODY_NBYTES >> 20} MiB")
                parts.append(part)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise RequestError("the client left before its request was complete") from None
    return b"".join(parts)


def session_of(request: Request) -> str:
    """What a client calls the session that its request belongs to; "" where it does not say."""
    return request.headers.get("x-session-id", "")


class PlainRoute(APIRoute):
    """A route whose endpoint reads the request and makes the response itself, so that FastAPI need not do so too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


class EventStream(StreamingResponse):
    """Server-sent events; closes its generator when the client leaves, wherever it stands.

    An error before the first event is raised, and so becomes an HTTP status. `late_headers` are asked for when that
    event is there. A client that does not read makes `send` wait, until the kernel ends the connection (server.py).
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        late_headers: Callable[[], dict[str, str]] = dict,
        headers: dict[str, str] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(events, media_type=media_type, headers={"Cache-Control": "no-cache", **(headers or {})})
        self._events = events
        self._late_headers = late_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._write(send))
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        first = await anext(self._events)
        late = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._late_headers().items()]
        await send({"type": "http.response.start", "status": self.status_code, "headers": [*self.raw_headers, *late]})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for events in self._events:
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def json_response(make: Callable[[], object], large: bool, headers: dict[str, str] | None = None) -> Response:
    """What `make` returns, as JSON. A large answer is put together on a thread, so that no stream waits for it."""

    def encoded() -> bytes:
        return msgspec.json.encode(make())

    body = await asyncio.to_thread(encoded) if large else encoded()
    return Response(body, media_type="application/json", headers=headers)


DONE = b"data: [DONE]\n\n"


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None when the client left first; `work` is cancelled then.

    It is a task of its own, too, because to wake a task costs something for each of the coroutines that it is deep in.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    watcher.add_done_callback(lambda _, cancel=task.cancel: cancel())  # type: ignore[misc]
    try:
        return await task
    except asyncio.CancelledError:
        if not watcher.done():  # it is this very coroutine that was cancelled
            raise
        return None
    finally:
        watcher.cancel()
        del task  # its exception knows this frame


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
