"""Hostile requests at a server's port over real sockets: endless heads, trailers, framing, and request smuggling.

Each client sends a bounded number of bytes, then checks the server's memory and answer.
"""

from __future__ import annotations

import pytest

from pd_cluster.api.connections import http_protocol
from tests.support.http_protocol import GET, HELD, KIB, POST, said, serving, status

CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


# ---- heads


ENDLESS = {
    "a header": GET + b"X: ",
    "the name of a header": GET,
    "a URL": b"GET /",
    "a method's line": b"GET / HTTP/1.1\r\nHost: ",
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_an_endless_head_is_cut_off(name: str) -> None:
    """The server reads 64 KiB of a head of 1 MiB, and answers without calling a route."""
    async with serving() as at:
        client = await at.connect()
        await client.send(ENDLESS[name])
        for _ in range(64):
            await client.send(b"a" * 16 * KIB)
        answer = await client.answer()
        assert status(answer) in (431, 0)  # 0: reset, because unread bytes were left
        assert await client.is_closed()
        assert at.app.num_heard == 0
        client.close()
        assert status(await at.ask(GET + b"\r\n")) == 200


async def test_a_head_just_within_the_limits_is_served() -> None:
    async with serving() as at:
        room = 64 * KIB - len(GET + b"X: \r\n\r\n")
        assert status(await at.ask(GET + b"X: " + b"a" * room + b"\r\n\r\n")) == 200
        assert status(await at.ask(GET + b"X: " + b"a" * (room + 1) + b"\r\n\r\n")) == 431
        assert status(await at.ask(GET + b"X: " + b"a" * room, b"\r\n\r", b"\n")) == 200
        fields = b"".join(b"X%d: 1\r\n" % number for number in range(255))
        assert len(said(await at.ask(GET + fields + b"\r\n"))["headers"]) == 256
        assert status(await at.ask(GET + fields + b"Y: 1\r\n\r\n")) == 431


async def test_each_request_of_a_connection_has_a_head_of_its_own() -> None:
    """Sends three large heads one after the other, pipelined, and split anywhere; each is limited separately."""
    async with serving() as at:
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


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17])
async def test_heads_and_bodies_may_be_cut_anywhere(size: int) -> None:
    async with serving() as at:
        chunks = CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
        data = b"\r\n" + GET + b"\r\n" + POST + b"Content-Length: 5\r\n\r\nabcde\r\n" + chunks + GET + b"\r\n"
        client = await at.connect()
        for piece in _cut(data, size):
            await client.send(piece)
        assert [said(await client.answer())["length"] for _ in range(4)] == [0, 5, 5, 0]
        client.close()


async def test_thousands_of_requests_behind_each_other_wait_their_turn() -> None:
    """An unanswered request holds back the pipelined requests after it, unparsed."""
    async with serving() as at:
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


# ---- trailers and chunks


async def test_trailers_are_bounded_and_no_headers() -> None:
    async with serving() as at:
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


@pytest.mark.parametrize("around", [b"3;" + b"x" * 400 * KIB, b"3;a=" + b"b" * 400 * KIB, b"0" * 400 * KIB])
async def test_what_is_around_chunks_is_bounded(around: bytes) -> None:
    async with serving() as at:
        client = await at.connect()
        await client.send(CHUNKED)
        for piece in _cut(around, 16 * KIB):
            await client.send(piece)
        assert status(await client.answer()) in (400, 0)
        assert await client.is_closed()
        client.close()


async def test_a_body_that_goes_on_after_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_BODY_NBYTES", 256 * KIB)
    async with serving() as at:
        client = await at.connect()
        await client.send(b"POST /early HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert status(await client.answer()) == 200
        for _ in range(40):
            await client.send(b"4000\r\n" + b"a" * 16 * KIB + b"\r\n")
        assert await client.is_closed()
        client.close()


async def test_a_body_that_is_announced_too_large_is_refused_at_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client may still send up to a body's limit, so that it can read the answer."""
    monkeypatch.setattr(http_protocol, "MAX_BODY_NBYTES", 256 * KIB)
    async with serving() as at:
        client = await at.connect()
        await client.send(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n")
        answer = await client.answer()
        assert status(answer) == 413
        assert b"connection: close" in answer
        for _ in range(40):
            await client.send(b"a" * 16 * KIB)
        assert await client.is_closed()
        client.close()


# ---- requests that two servers could parse differently


SMUGGLED = {
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": GET + b"Host: y\r\n\r\n",
    "a Host with a path": b"GET / HTTP/1.1\r\nHost: x/y\r\n\r\n",
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
async def test_what_two_servers_could_read_differently(name: str) -> None:
    """Such a request is refused and the connection closed, so that nothing after it is parsed as a request."""
    async with serving() as at:
        client = await at.connect()
        await client.send(SMUGGLED[name] + GET + b"\r\n")
        answer = await client.answer()
        assert status(answer) in (400, 505), answer
        assert said(answer)["error"]["type"] == "invalid_request_error"
        assert await client.is_closed()
        assert at.app.num_heard == 0
        client.close()


async def test_a_body_behind_a_wish_to_upgrade_is_a_body() -> None:
    """Java's client offers an upgrade to HTTP/2 with every request; its body must not be parsed as another request."""
    async with serving() as at:
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


async def test_what_comes_behind_a_request_does_not_spoil_its_answer() -> None:
    async with serving() as at:
        client = await at.connect()
        await client.send(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\nNONSENSE\r\n\r\n")
        await at.until("it is heard", lambda: at.app.num_heard == 1)
        at.app.go.set()
        answer = await client.answer()
        assert said(answer)["path"] == "/held"
        assert await client.is_closed()
        client.close()
