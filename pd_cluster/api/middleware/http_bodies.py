"""Reads limited bodies and sends streams, for the public and the admin port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Depends
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pd_cluster.api.middleware.http_callers import caller_of, count_request
from pd_cluster.api.middleware.request_reservation import arrival_of
from pd_cluster.errors import RequestError
from pd_cluster.service.concurrency.fair_thread_pool import FairThreadPool
from pd_cluster.service.schema.error_bodies import MAX_BODY_NBYTES, TOO_LARGE, BodyTooLarge

MAX_LENGTH_NUM_DIGITS = 18  # the digits of a declared body length; longer numbers are always too large
BODY_TIMEOUT_S = 60.0
LARGE_BODY_NBYTES = 256 << 10  # smaller bodies are parsed on the event loop, within a few milliseconds
BODY = "pd_cluster.body"  # the key of a body that one route has read for another
MAX_FAULT_NUM_CHARS = 200
LOOKING = ["GET", "HEAD"]
CHARSET = "; charset=utf-8"  # the charset of text answers

T = TypeVar("T")

# Only one thread: several would take the interpreter's lock one after another, while the event loop waits.
_large_bodies = FairThreadPool(num_threads=1)


async def read_request(http: Request, read: Callable[[bytes], T]) -> T:
    """Returns the result of `read` for the body. Raises what `read_body` and `read` raise."""
    body = await read_body(http)
    return await parsed(http, len(body), lambda: read(body))


async def parsed(http: Request, nbytes: int, work: Callable[[], T]) -> T:
    """Runs work on a body of this size, on a thread if it is large; clients take turns."""
    if nbytes <= LARGE_BODY_NBYTES:
        return work()
    return await _large_bodies.run(caller_of(http).client, work, nbytes)


async def read_body(request: Request) -> bytes:
    """Reads the body.

    Raises BodyTooLarge before more than the limit is in memory, and RequestError if the body does not arrive in time.
    Before anything is read, raises RateLimited if the caller has used up its limit, and Overloaded if other bodies
    leave no memory.
    """
    count_request(request)
    if isinstance(known := request.scope.get(BODY), bytes):
        return known
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/plain":
        # Web pages may send this type to another host without a preflight.
        raise RequestError("Content-Type: text/plain; send application/json")
    arrival, declared = arrival_of(request), declared_length(request)
    if declared is not None and declared > MAX_BODY_NBYTES:
        raise BodyTooLarge(TOO_LARGE)
    if arrival is not None and declared is not None:
        arrival.reads(request, declared)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_NBYTES:
                    raise BodyTooLarge(TOO_LARGE)
                if arrival is not None and declared is None:
                    arrival.reads(request, size)
                parts.append(part)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise RequestError("the client left before its request was complete") from None
    return await parsed(request, size, lambda: b"".join(parts))


def read_as(body: bytes, kind: type[T]) -> T:
    """Parses a body with a fixed schema. Raises RequestError, which repeats little of the body."""
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise RequestError("body: nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"body: {str(error)[:MAX_FAULT_NUM_CHARS]}") from None


def declared_length(request: Request) -> int | None:
    """Returns the declared size of the body, at most MAX_BODY_NBYTES + 1; None if undeclared."""
    declared = request.headers.get("content-length")
    if declared is None or not declared.isdecimal():
        return None
    return MAX_BODY_NBYTES + 1 if len(declared) > MAX_LENGTH_NUM_DIGITS else min(int(declared), MAX_BODY_NBYTES + 1)


def guarded_by(check: Callable[[Request], None]) -> Any:
    """Returns a route's dependency that runs `check` on the event loop, where FastAPI would use a thread."""

    async def run(request: Request) -> None:
        check(request)

    return Depends(run)


class Last(bytes):
    """The last events of a stream, which are sent together with the end of the response, in one write."""


class EventStream(Response):
    """Server-sent events. Closes its generator as soon as the client leaves.

    An error before the first event is raised, so it becomes an HTTP status. `late_headers` is called once the first
    event exists. A client that does not read blocks `send` until the kernel ends the connection (http_server.py).
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        late_headers: Callable[[], dict[str, str]] = dict,
        headers: dict[str, str] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        self.status_code, self.background = 200, None
        self.raw_headers = [
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # makes nginx forward each event at once
            (b"content-type", f"{media_type}{CHARSET if media_type.startswith('text/') else ''}".encode()),
        ]
        if headers:
            self.raw_headers += _encoded(headers)
        self._events = events
        self._late_headers = late_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._write(send))
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        events = await anext(self._events)
        headers = [*self.raw_headers, *_encoded(self._late_headers())]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        if type(events) is not Last:
            await send({"type": "http.response.body", "body": events, "more_body": True})
            async for events in self._events:
                if type(events) is Last:
                    break
                await send({"type": "http.response.body", "body": events, "more_body": True})
            else:
                events = b""
        await send({"type": "http.response.body", "body": events, "more_body": False})


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def json_of(answer: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a small answer as a JSON response."""
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


async def json_response(make: Callable[[], object], large: bool, headers: dict[str, str] | None = None) -> Response:
    """Returns the result of `make` as a JSON response. Large answers are built on a thread, so that no stream waits."""

    def encoded() -> bytes:
        return msgspec.json.encode(make())

    body = await asyncio.to_thread(encoded) if large else encoded()
    return Response(body, media_type="application/json", headers=headers)


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T | None:
    """Returns the result of `work`, or None if the client left first; `work` is then cancelled.

    `work` runs as a separate task, because the cost of waking a task grows with the coroutines on its stack.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    watcher.add_done_callback(lambda _, cancel=task.cancel: cancel())  # type: ignore[misc]
    try:
        return await task
    except asyncio.CancelledError:
        if not watcher.done():  # this coroutine was cancelled, not the watcher
            raise
        return None
    finally:
        watcher.cancel()
        del task  # its exception refers to this frame


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
