"""The project's HTTP server without a cluster, and raw clients that choose every byte."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from pd_cluster.api.connections import http_server
from pd_cluster.settings.http_settings import Tls
from pd_cluster.settings.routing_settings import ConnectionLimits

KIB = 1 << 10
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
PROBE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HELD = b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n"


class App:
    """Responds with the request as received. /held responds when released, /early without reading the body."""

    def __init__(self) -> None:
        self.num_heard = 0
        self.go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_heard += 1
        body = b""
        while scope["path"] != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        if scope["path"] == "/held":
            await self.go.wait()
        headers = [[name.decode(), value.decode("latin-1")] for name, value in scope["headers"]]
        said = {"path": scope["path"], "length": len(body), "body": body[:100].decode("latin-1"), "headers": headers}
        answer = msgspec.json.encode(said)
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": answer, "more_body": False})


class Serving:
    def __init__(self, app: App, running: http_server.Server, port: int) -> None:
        self.app = app
        self.limiter = running.limiter
        self.connections: set[Any] = running.server_state.connections
        self.port = port

    async def connect(self, source: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0), ssl=tls)
        return Client(reader, writer)

    async def ask(self, *pieces: bytes, source: str = "127.0.0.1") -> bytes:
        """Sends the pieces; returns all bytes until the server closes, or the first response."""
        client = await self.connect(source)
        for piece in pieces:
            await client.send(piece)
        answer = await client.answer()
        client.close()
        return answer

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Waits for a condition. At the test's deadline, fails with the condition's name."""
        try:
            while not condition():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            raise AssertionError(f"never: {what}") from None


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def answer(self) -> bytes:
        """Returns one response, head and body; only the received part if the connection ends."""
        head = b""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            return head + await self.reader.readexactly(int(length))
        except asyncio.IncompleteReadError as error:
            return head + error.partial
        except ConnectionError:
            return head

    async def is_closed(self) -> bool:
        """Waits for the server to close the connection."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.writer.close()


@contextlib.asynccontextmanager
async def serving(
    limits: ConnectionLimits | None = None, tls: Tls | None = None, uploads: Mapping[bytes, int] | None = None
) -> AsyncIterator[Serving]:
    listener = http_server.bind("127.0.0.1", 0)
    app = App()
    made = http_server.make_server(app, limits or ConnectionLimits(), tls=tls, uploads=uploads or {})
    running = asyncio.ensure_future(made.serve(sockets=[listener]))
    try:
        yield Serving(app, made, listener.getsockname()[1])
    finally:
        app.go.set()
        made.should_exit = made.force_exit = True
        await running


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1]) if answer else 0


def said(answer: bytes) -> Any:
    return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])
