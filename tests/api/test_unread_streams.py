"""A client that does not read has its stream paused, then cut, without effects on other clients; over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from fastapi import FastAPI
from fastapi.responses import Response

from pd_cluster.api.connections import http_server
from pd_cluster.api.middleware.error_responses import install_error_handlers
from pd_cluster.api.middleware.http_bodies import EventStream
from pd_cluster.errors import RequestError
from pd_cluster.service.answers.sse import event

EVENT = event({"text": "x" * 1000})


class Source:
    """Generates endless events; records their number, and whether it was closed."""

    def __init__(self) -> None:
        self.num_made = 0
        self.closed = asyncio.Event()

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                self.num_made += 1
                yield EVENT
                await asyncio.sleep(0)
        finally:
            self.closed.set()


async def finite(count: int) -> AsyncGenerator[bytes, None]:
    for _ in range(count):
        yield EVENT


async def refused() -> AsyncGenerator[bytes, None]:
    raise RequestError("not like this")
    yield b""


@contextlib.asynccontextmanager
async def serving(source: Source) -> AsyncIterator[int]:
    """Runs the project's HTTP server; yields its port."""
    app = FastAPI()
    install_error_handlers(app)
    kinds = {"endless": source.events, "finite": lambda: finite(100), "refused": refused}

    @app.get("/{kind}")
    async def stream(kind: str) -> Response:
        return EventStream(kinds[kind](), lambda: {"x-late": kind})

    listener = http_server.bind("127.0.0.1", 0)
    uvicorn = http_server.make_server(app)
    running = asyncio.ensure_future(uvicorn.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        uvicorn.should_exit = uvicorn.force_exit = True
        await running


async def get(port: int, kind: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /{kind} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


def silent_client(port: int) -> socket.socket:
    """Requests the endless stream and does not read it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
    return client


async def standstill(source: Source) -> int:
    """Returns the number of generated events once it stops growing."""
    seen = -1
    while seen != source.num_made or not seen:
        seen = source.num_made
        await asyncio.sleep(0.1)
    return seen


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "UNREAD_TIMEOUT_S", 1)
    source = Source()
    async with serving(source) as port:
        client = silent_client(port)
        num_made = await standstill(source)
        assert num_made * len(EVENT) < 16 << 20, "unread events must be bounded"
        assert (await get(port, "finite")).count(EVENT) == 100, "no other client may wait"
        await source.closed.wait()
        client.close()


async def test_a_client_that_leaves_ends_its_stream() -> None:
    source = Source()
    async with serving(source) as port:
        client = silent_client(port)
        await standstill(source)
        client.close()
        await source.closed.wait()


async def test_headers_come_late_and_an_error_before_the_first_event_is_a_status() -> None:
    async with serving(Source()) as port:
        whole, error = await get(port, "finite"), await get(port, "refused")
    assert whole.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"x-late: finite\r\n" in whole
    assert b"content-type: text/event-stream; charset=utf-8\r\n" in whole
    assert error.startswith(b"HTTP/1.1 400 ")
    assert b"not like this" in error
    assert b"x-late" not in error
