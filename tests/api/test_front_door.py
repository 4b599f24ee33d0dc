"""Hostile clients at a server's door, over real sockets: heads, trailers, framing, times, connections and descriptors.

Each sends a bounded number of bytes and looks at what the server holds and answers then. Deadlines are shortened, and
only end what would otherwise never end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from pd_cluster.api import doorman as doorman_module
from pd_cluster.api import front_door, server
from pd_cluster.api.doorman import NUM_SPARE_PER_HOST
from pd_cluster.config import ConnectionLimits

NUM_SPARE = ConnectionLimits().spare
WAIT_S = 30.0
KIB = 1 << 10
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HELD = b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n"
PROBE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class App:
    """Says what it has heard of each request. /held answers when it is let go, /early without reading the body."""

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
    def __init__(self, app: App, running: server.Server, port: int) -> None:
        self.app = app
        self.doorman = running.doorman
        self.connections: set[Any] = running.server_state.connections
        self.port = port

    async def connect(self, source: str = "127.0.0.1") -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(source, 0))
        return Client(reader, writer)

    async def ask(self, *pieces: bytes, source: str = "127.0.0.1") -> bytes:
        """Everything that is answered until the server closes, or to the first answer's end."""
        client = await self.connect(source)
        for piece in pieces:
            await client.send(piece)
        answer = await client.answer()
        client.close()
        return answer

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Fails when the test's own deadline is over first, and says what it waited for."""
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
        """One, head and body; what there is of it when the connection ends."""
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
        """Waits for the server to end the connection."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.writer.close()


@contextlib.asynccontextmanager
async def serving(limits: ConnectionLimits | None = None) -> AsyncIterator[Serving]:
    listener = server.bind("127.0.0.1", 0)
    app = App()
    made = server.make_server(app, limits or ConnectionLimits())
    running = asyncio.ensure_future(made.serve(sockets=[listener]))
    try:
        yield Serving(app, made, listener.getsockname()[1])
    finally:
        app.go.set()
        made.should_exit = made.force_exit = True
        await running


def run(test: Callable[[Serving], Awaitable[Any]], limits: ConnectionLimits | None = None) -> None:
    async def timed() -> None:
        async with asyncio.timeout(WAIT_S), serving(limits) as at:
            await test(at)

    asyncio.run(timed())


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1]) if answer else 0


def said(answer: bytes) -> Any:
    return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])


# ---- heads


ENDLESS = {
    "a header": GET + b"X: ",
    "the name of a header": GET,
    "a URL": b"GET /",
    "a method's line": b"GET / HTTP/1.1\r\nHost: ",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_head_is_cut_off(name: str) -> None:
    """A client sends a MiB; the server takes 64 KiB and answers. No route hears of it."""

    async def test(at: Serving) -> None:
        client = await at.connect()
        await client.send(ENDLESS[name])
        for _ in range(64):
            await client.send(b"a" * 16 * KIB)
        answer = await client.answer()
        assert status(answer) in (431, 0)  # 0: reset, as more was sent than anybody reads
        assert await client.is_closed()
        assert at.app.num_heard == 0
        client.close()
        assert status(await at.ask(GET + b"\r\n")) == 200

    run(test)


def test_a_head_just_within_the_limits_is_served() -> None:
    async def test(at: Serving) -> None:
        room = 64 * KIB - len(GET + b"X: \r\n\r\n")
        assert status(await at.ask(GET + b"X: " + b"a" * room + b"\r\n\r\n")) == 200
        assert status(await at.ask(GET + b"X: " + b"a" * (room + 1) + b"\r\n\r\n")) == 431
        assert status(await at.ask(GET + b"X: " + b"a" * room, b"\r\n\r", b"\n")) == 200
        fields = b"".join(b"X%d: 1\r\n" % number for number in range(255))
        assert len(said(await at.ask(GET + fields + b"\r\n"))["headers"]) == 256
        assert status(await at.ask(GET + fields + b"Y: 1\r\n\r\n")) == 431

    run(test)


def test_each_request_of_a_connection_has_a_head_of_its_own() -> None:
    """Three large ones after each other, behind each other, and cut anywhere."""

    async def test(at: Serving) -> None:
        large = GET + b"X: " + b"a" * 40 * KIB + b"\r\n\r\n"
        body = POST + b"Content-Length: 70000\r\n\r\n" + b"b" * 70000
        for pieces in (
            [large, large, body, large],
            [large + body + large + large],
            [*_cut(large + body + large, 9973)],
        ):
            client = await at.connect()
            for piece in pieces:
                await client.send(piece)
            num_answers = b"".join(pieces).count(b" HTTP/1.1\r\n")
            assert [status(await client.answer()) for _ in range(num_answers)] == [200] * num_answers
            client.close()

    run(test)


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17])
def test_heads_and_bodies_may_be_cut_anywhere(size: int) -> None:
    async def test(at: Serving) -> None:
        chunks = CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
        data = b"\r\n" + GET + b"\r\n" + POST + b"Content-Length: 5\r\n\r\nabcde\r\n" + chunks + GET + b"\r\n"
        client = await at.connect()
        for piece in _cut(data, size):
            await client.send(piece)
        assert [said(await client.answer())["length"] for _ in range(4)] == [0, 5, 5, 0]
        client.close()

    run(test)


def test_thousands_of_requests_behind_each_other_wait_their_turn() -> None:
    """One that is not answered yet holds back those behind it, unparsed."""

    async def test(at: Serving) -> None:
        client = await at.connect()
        await client.send(HELD + (GET + b"\r\n") * 5000)
        await at.until("the first is heard", lambda: at.app.num_heard == 1)
        (protocol,) = at.connections
        await at.until("the second is parsed", lambda: len(protocol.pipeline) > 0)
        assert len(protocol.pipeline) == 1
        at.app.go.set()
        for _ in range(5001):
            assert status(await client.answer()) == 200
        client.close()

    run(test)


# ---- trailers and chunks


def test_trailers_are_bounded_and_no_headers() -> None:
    async def test(at: Serving) -> None:
        few = await at.ask(CHUNKED + b"3\r\nabc\r\n0\r\nAuthorization: Bearer k\r\nHost: y\r\n\r\n")
        assert [name for name, _ in said(few)["headers"]] == ["host", "transfer-encoding"]
        for endless in (b"X: 1\r\n" * 100_000, b"X: " + b"a" * 400 * KIB, b"a" * 400 * KIB):
            client = await at.connect()
            await client.send(CHUNKED + b"3\r\nabc\r\n0\r\n")
            for piece in _cut(endless, 16 * KIB):
                await client.send(piece)
            assert status(await client.answer()) in (431, 400, 0)
            assert await client.is_closed()
            client.close()

    run(test)


@pytest.mark.parametrize("around", [b"3;" + b"x" * 400 * KIB, b"3;a=" + b"b" * 400 * KIB, b"0" * 400 * KIB])
def test_what_is_around_chunks_is_bounded(around: bytes) -> None:
    async def test(at: Serving) -> None:
        client = await at.connect()
        await client.send(CHUNKED)
        for piece in _cut(around, 16 * KIB):
            await client.send(piece)
        assert status(await client.answer()) in (400, 0)
        assert await client.is_closed()
        client.close()

    run(test)


def test_a_body_that_goes_on_after_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door, "MAX_BODY_NBYTES", 256 * KIB)

    async def test(at: Serving) -> None:
        client = await at.connect()
        await client.send(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n")
        assert status(await client.answer()) == 200
        for _ in range(40):
            await client.send(b"a" * 16 * KIB)
        assert await client.is_closed()
        client.close()

    run(test)


# ---- what two servers could read differently


SMUGGLED = {
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": GET + b"Host: y\r\n\r\n",
    "two equal Hosts": GET + b"Host: x\r\n\r\n",
    "two Hosts in 1.0": b"GET / HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n",
    "a Host with a path": b"GET / HTTP/1.1\r\nHost: x/y\r\n\r\n",
    "a Host with a user": b"GET / HTTP/1.1\r\nHost: x@y\r\n\r\n",
    "Transfer-Encoding in 1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "identity, chunked": POST + b"Transfer-Encoding: identity, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "gzip, chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "xchunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "chunked and a length": CHUNKED[:-2] + b"Content-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "a folded header": GET + b"X: 1\r\n Transfer-Encoding: chunked\r\n\r\n",
    "a space before the colon": GET + b"Content-Length : 3\r\n\r\n",
    "bare newlines": b"GET / HTTP/1.1\nHost: x\n\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    "an upgrade with chunks": POST
    + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "CONNECT": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_what_two_servers_could_read_differently(name: str) -> None:
    """Refused with a closed connection, so nothing behind it is read as a request."""

    async def test(at: Serving) -> None:
        client = await at.connect()
        await client.send(SMUGGLED[name] + GET + b"\r\n")
        answer = await client.answer()
        assert status(answer) in (400, 505), answer
        assert said(answer)["error"]["type"] == "invalid_request_error"
        assert await client.is_closed()
        assert at.app.num_heard == 0
        client.close()

    run(test)


def test_a_body_behind_a_wish_to_upgrade_is_a_body() -> None:
    """Java's client wishes for HTTP/2 with every request; the parser alone would read the body as a request."""

    async def test(at: Serving) -> None:
        wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
        body = GET + b"\r\n"
        client = await at.connect()
        await client.send(POST + wish + b"Content-Length: %d\r\n\r\n" % len(body))
        await client.send(body[:9])
        await client.send(body[9:] + GET + wish + b"\r\n")
        first, second = said(await client.answer()), said(await client.answer())
        assert (first["body"], second["body"]) == (body.decode(), "")
        assert at.app.num_heard == 2
        client.close()

    run(test)


def test_what_comes_behind_a_request_does_not_spoil_its_answer() -> None:
    async def test(at: Serving) -> None:
        client = await at.connect()
        await client.send(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\nNONSENSE\r\n\r\n")
        await at.until("it is heard", lambda: at.app.num_heard == 1)
        at.app.go.set()
        answer = await client.answer()
        assert said(answer)["path"] == "/held"
        assert await client.is_closed()
        client.close()

    run(test)


# ---- times


@pytest.mark.parametrize("sent", [b"", GET, GET + b"\r\n" + GET, b"\r\n"], ids=["nothing", "half", "a second", "crlf"])
def test_a_head_has_a_deadline(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Also one that always gets a little further."""
    monkeypatch.setattr(doorman_module, "HEAD_TIMEOUT_S", 0.3)

    async def test(at: Serving) -> None:
        client = await at.connect()
        await client.send(sent)
        if sent.count(b"GET") == 2:
            assert status(await client.answer()) == 200
        closing = asyncio.ensure_future(client.answer())
        while not closing.done():
            await client.send(b"X: 1\r\n" if sent.strip() else b"")
            await asyncio.wait({closing}, timeout=0.05)
        assert status(await closing) == (408 if sent.strip() else 0)
        await at.until("nobody is connected", lambda: not at.doorman.num_open)
        client.close()

    run(test)


@pytest.mark.parametrize("path", [b"/", b"/early"])
def test_a_body_has_a_deadline(monkeypatch: pytest.MonkeyPatch, path: bytes) -> None:
    monkeypatch.setattr(doorman_module, "BODY_TIMEOUT_S", 0.3)

    async def test(at: Serving) -> None:
        client = await at.connect()
        await client.send(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        closing = asyncio.ensure_future(client.reader.read())
        while not closing.done():
            await client.send(b"a")
            await asyncio.wait({closing}, timeout=0.05)
        await asyncio.wait({closing})
        await at.until("nobody is connected", lambda: not at.doorman.num_open)
        client.close()

    run(test)


def test_a_client_that_takes_long_to_answer_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are for what the client sends, not for what the server does."""
    monkeypatch.setattr(doorman_module, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(doorman_module, "BODY_TIMEOUT_S", 0.1)

    async def test(at: Serving) -> None:
        client = await at.connect()
        await client.send(HELD + GET)
        await at.until("it is heard", lambda: at.app.num_heard == 1)
        for _ in range(3):
            at.doorman.sweep()
            await asyncio.sleep(0.11)
        at.app.go.set()
        assert status(await client.answer()) == 200
        client.close()

    run(test)


# ---- connections


LIMITS = ConnectionLimits(total=5, per_host=0)


async def crowd(at: Serving, count: int, sent: bytes, source: str = "127.0.0.1") -> list[Client]:
    clients = [await at.connect(source) for _ in range(count)]
    for client in clients:
        await client.send(sent)
    return clients


@pytest.mark.parametrize("sent", [b"", GET, GET + b"\r\n"], ids=["silent", "half", "answered"])
def test_idle_connections_make_room(sent: bytes) -> None:
    """Twice as many as may be there: the first go, and whoever comes is served."""

    async def test(at: Serving) -> None:
        most = 5 + NUM_SPARE
        clients = await crowd(at, 2 * most, sent)
        await at.until("all were looked at", lambda: at.doorman.num_open == most)
        assert status(await at.ask(GET + b"\r\n")) == 200
        assert status(await at.ask(PROBE)) == 200
        assert at.doorman.num_open <= most
        for client in clients:
            client.close()

    run(test, LIMITS)


@pytest.mark.parametrize("sent", [HELD, POST + b"Content-Length: 90\r\n\r\nunfinished"], ids=["late", "unfinished"])
def test_when_all_are_busy_probes_are_answered_and_others_refused(sent: bytes) -> None:
    async def test(at: Serving) -> None:
        clients = await crowd(at, 5, sent)
        await at.until("all are busy", lambda: at.doorman.num_busy == 5)
        more = await crowd(at, 3 * NUM_SPARE, b"")
        refused = await at.ask(GET + b"\r\n")
        assert (status(refused), said(refused)["error"]["code"]) == (503, "too_many_connections")
        assert b"\r\nretry-after: 1\r\n" in refused
        assert status(await at.ask(PROBE)) == 200
        assert status(await at.ask(b"POST /health HTTP/1.1\r\nHost: x\r\n\r\n")) == 503
        assert at.doorman.num_busy == 5
        assert at.doorman.num_open <= 5 + NUM_SPARE
        for client in clients[:1]:
            client.close()
        await at.until("one has left", lambda: at.doorman.num_busy < 5)
        assert status(await at.ask(GET + b"\r\n")) == 200
        for client in clients[1:] + more:
            client.close()
        await at.until("all have left", lambda: not at.doorman.num_open)
        assert at.doorman.num_busy == 0

    run(test, LIMITS)


def test_one_address_does_not_take_the_others_places() -> None:
    async def test(at: Serving) -> None:
        hog = await crowd(at, 3, HELD, "127.0.0.2")
        await at.until("its requests run", lambda: at.doorman.num_busy == 3)
        refused = await at.ask(GET + b"\r\n", source="127.0.0.2")
        assert (status(refused), said(refused)["error"]["type"]) == (429, "rate_limit_error")
        assert status(await at.ask(PROBE, source="127.0.0.2")) == 200
        hog += await crowd(at, 3 * NUM_SPARE_PER_HOST, b"", "127.0.0.2")
        others = await crowd(at, 3, GET + b"\r\n")
        assert [status(await client.answer()) for client in others] == [200] * 3
        assert at.doorman.num_open <= 3 + NUM_SPARE_PER_HOST + 3
        for client in hog + others:
            client.close()

    run(test, ConnectionLimits(total=100, per_host=3))


# ---- the log


def test_malformed_requests_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    async def test(at: Serving) -> None:
        for _ in range(200):
            assert status(await at.ask(b"NONSENSE\r\n\r\n")) == 400

    with caplog.at_level(logging.WARNING):
        run(test)
    assert 1 <= len(caplog.records) <= 1 + WAIT_S / 10
    assert "127.0.0.1: malformed request" in caplog.records[0].getMessage()
    assert "NONSENSE" not in caplog.text
