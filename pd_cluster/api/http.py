"""What every HTTP server of the project shares: bodies with a limit, errors in OpenAI's shape, streams that close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from pd_cluster.errors import DeadlineExceeded, GenerationError, Overloaded, PdClusterError, RequestError, Unavailable

log = logging.getLogger(__name__)

MAX_BODY_NBYTES = 32 << 20
CLIENT_CLOSED_REQUEST = 499
BODY_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 120.0  # a client that does not read its stream for so long is dropped

T = TypeVar("T")


class BodyTooLarge(RequestError):
    status = 413


async def read_body(request: Request) -> bytes:
    """Raises BodyTooLarge before more than the limit is held, RequestError when it does not come in time."""
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


def error_body(error: Exception) -> dict[str, Any]:
    """{"error": {message, type, param, code}}; nothing of ours leaks from an unexpected exception."""
    kind, param, code = "internal_error", None, None
    message = "internal error; the server's log has the details"
    if isinstance(error, RequestError):
        kind, param, code = "invalid_request_error", error.param, error.code
    elif isinstance(error, Unavailable):
        kind, code = "service_unavailable", "no_instance"
    elif isinstance(error, Overloaded):
        kind, code = "rate_limit_error", "overloaded"
    elif isinstance(error, DeadlineExceeded):
        kind, code = "timeout_error", "deadline_exceeded"
    elif isinstance(error, GenerationError):
        kind, code = "server_error", "generation_failed"
    if isinstance(error, PdClusterError):
        message = str(error)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    status, headers = 500, {}
    if isinstance(error, RequestError):
        status = error.status
    elif isinstance(error, Unavailable):
        status, headers = 503, {"Retry-After": str(error.retry_after_s)}
    elif isinstance(error, Overloaded):
        status, headers = 429, {"Retry-After": str(error.retry_after_s)}
    elif isinstance(error, DeadlineExceeded):
        status = 504
    return JSONResponse(error_body(error), status, headers)


def install_error_handlers(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = error_body(RequestError(f"{request.method} {request.url.path}: {error.detail}"))
        return JSONResponse(body, error.status_code, error.headers)

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("unexpected error in %s %s", request.method, request.url.path, exc_info=error)
        return error_response(error)

    app.add_exception_handler(PdClusterError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)


class EventStream(StreamingResponse):
    """Server-sent events; closes its generator when the client leaves, wherever it stands."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(events, media_type=media_type, headers={"Cache-Control": "no-cache", **(headers or {})})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            log.warning("a client did not read its stream for %g s and was dropped", SEND_TIMEOUT_S)
        finally:
            await self._events.aclose()


async def chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(rest):
        yield first
        async for item in rest:
            yield item


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def json_response(make: Callable[[], object], large: bool, headers: dict[str, str] | None = None) -> Response:
    """What `make` returns, as JSON. A large answer is put together on a thread, so that no stream waits for it."""

    def encoded() -> bytes:
        return msgspec.json.encode(make())

    body = await asyncio.to_thread(encoded) if large else encoded()
    return Response(body, media_type="application/json", headers=headers)


DONE = b"data: [DONE]\n\n"


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None when the client left first; `work` is cancelled then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
