"""Slow clients, and many of them, at a server's port over real sockets.

Tests shorten deadlines, and use them only to end what would otherwise never end.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from pd_cluster.api.connections import connection_limiter, http_protocol
from pd_cluster.api.connections.connection_limiter import NUM_SPARE_PER_HOST
from pd_cluster.settings.routing_settings import ConnectionLimits
from tests.support.http_protocol import GET, HELD, POST, PROBE, Client, Serving, said, serving, status

NUM_SPARE = ConnectionLimits().spare


# ---- times


@pytest.mark.parametrize("sent", [b"", GET, GET + b"\r\n" + GET, b"\r\n"], ids=["nothing", "half", "a second", "crlf"])
async def test_a_head_has_a_deadline(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """The deadline also ends a slow head with steady progress."""
    monkeypatch.setattr(connection_limiter, "HEAD_TIMEOUT_S", 0.3)
    async with serving() as at:
        client = await at.connect()
        await client.send(sent)
        if sent.count(b"GET") == 2:
            assert status(await client.answer()) == 200
        closing = asyncio.ensure_future(client.answer())
        while not closing.done():
            await client.send(b"X: 1\r\n" if sent.strip() else b"")
            await asyncio.wait({closing}, timeout=0.05)
        assert status(await closing) == (408 if sent.strip() else 0)
        await at.until("nobody is connected", lambda: not at.limiter.num_open)
        client.close()


@pytest.mark.parametrize("path", [b"/", b"/early"])
async def test_a_body_has_a_deadline(monkeypatch: pytest.MonkeyPatch, path: bytes) -> None:
    monkeypatch.setattr(connection_limiter, "BODY_TIMEOUT_S", 0.3)
    async with serving() as at:
        client = await at.connect()
        await client.send(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        closing = asyncio.ensure_future(client.reader.read())
        while not closing.done():
            await client.send(b"a")
            await asyncio.wait({closing}, timeout=0.05)
        await asyncio.wait({closing})
        await at.until("nobody is connected", lambda: not at.limiter.num_open)
        client.close()


async def test_a_client_that_takes_long_to_answer_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines limit the client's sending, not the server's computing."""
    monkeypatch.setattr(connection_limiter, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(connection_limiter, "BODY_TIMEOUT_S", 0.1)
    async with serving() as at:
        client = await at.connect()
        await client.send(HELD + GET)
        await at.until("it is heard", lambda: at.app.num_heard == 1)
        for _ in range(3):
            at.limiter.sweep()
            await asyncio.sleep(0.11)
        at.app.go.set()
        assert status(await client.answer()) == 200
        client.close()


# ---- connections


LIMITS = ConnectionLimits(total=5, per_host=0)


async def crowd(at: Serving, count: int, sent: bytes, source: str = "127.0.0.1") -> list[Client]:
    clients = [await at.connect(source) for _ in range(count)]
    for client in clients:
        await client.send(sent)
    return clients


@pytest.mark.parametrize("sent", [HELD, POST + b"Content-Length: 90\r\n\r\nunfinished"], ids=["late", "unfinished"])
async def test_when_all_are_busy_probes_are_answered_and_others_refused(sent: bytes) -> None:
    async with serving(LIMITS) as at:
        clients = await crowd(at, 5, sent)
        await at.until("all are busy", lambda: at.limiter.num_busy == 5)
        more = await crowd(at, 3 * NUM_SPARE, b"")
        refused = await at.ask(GET + b"\r\n")
        assert (status(refused), said(refused)["error"]["code"]) == (503, "too_many_connections")
        assert b"\r\nretry-after: 1\r\n" in refused
        assert status(await at.ask(PROBE)) == 200
        assert status(await at.ask(b"POST /health HTTP/1.1\r\nHost: x\r\n\r\n")) == 503
        assert at.limiter.num_busy == 5
        assert at.limiter.num_open <= 5 + NUM_SPARE
        for client in clients[:1]:
            client.close()
        await at.until("one has left", lambda: at.limiter.num_busy < 5)
        assert status(await at.ask(GET + b"\r\n")) == 200
        for client in clients[1:] + more:
            client.close()
        await at.until("all have left", lambda: not at.limiter.num_open)
        assert at.limiter.num_busy == 0


async def test_one_address_does_not_take_the_others_places() -> None:
    async with serving(ConnectionLimits(total=100, per_host=3)) as at:
        hog = await crowd(at, 3, HELD, "127.0.0.2")
        await at.until("its requests run", lambda: at.limiter.num_busy == 3)
        refused = await at.ask(GET + b"\r\n", source="127.0.0.2")
        assert (status(refused), said(refused)["error"]["type"]) == (429, "rate_limit_error")
        assert status(await at.ask(PROBE, source="127.0.0.2")) == 200
        hog += await crowd(at, 3 * NUM_SPARE_PER_HOST, b"", "127.0.0.2")
        others = await crowd(at, 3, GET + b"\r\n")
        assert [status(await client.answer()) for client in others] == [200] * 3
        assert at.limiter.num_open <= 3 + NUM_SPARE_PER_HOST + 3
        for client in hog + others:
            client.close()


# ---- uploads


async def test_an_upload_has_time_while_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload may take longer while bytes arrive; other bodies, and stalled uploads, may not."""
    monkeypatch.setattr(connection_limiter, "BODY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http_protocol, "LEAST_NBYTES", 1000)
    async with serving(uploads={b"/up": 64 << 20}) as at:
        for path, sends, wanted in (("up", True, 200), ("up", False, 0), ("other", True, 0)):
            client = await at.connect()
            await client.send(f"POST /{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 12000\r\n\r\n".encode())
            for _ in range(12 if sends else 1):
                with contextlib.suppress(ConnectionError):
                    await client.send(b"x" * (1000 if sends else 12))
                await asyncio.sleep(0.2)
            assert status(await client.answer()) == wanted, path
            client.close()


async def test_an_upload_may_be_larger_than_other_bodies() -> None:
    async with serving(uploads={b"/up": 40 << 20}) as at:
        for path, nbytes, wanted in (("up", 40 << 20, 200), ("up", (40 << 20) + 1, 413), ("u", 40 << 20, 413)):
            head = f"POST /{path}?a=b HTTP/1.1\r\nHost: x\r\nContent-Length: {nbytes}\r\n\r\n".encode()
            assert status(await at.ask(head, *[b"x" * (1 << 20)] * (40 if wanted == 200 else 0))) == wanted
