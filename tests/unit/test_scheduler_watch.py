"""How the endpoint picker observes schedulers: readiness, numbers of requests, and names that do not resolve."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import httpx
import pytest

from pd_cluster.cluster.processes.port_reservations import free_ports
from pd_cluster.extras.gateway.scheduler_choice import AllFull, SchedulerChoice
from pd_cluster.extras.gateway.scheduler_watch import SchedulerWatch
from tests.support.says_load import serve_load

WELL = (200, "{}")


def looks(answers: dict[str, dict[str, tuple[int, str]]], key: str = "") -> dict[str, Any]:
    """Observes hosts once; returns the reports by host. `answers`: host -> path -> (status, content)."""
    seen: dict[str, Any] = {}

    class Seen(SchedulerChoice):
        def report(self, address: str, *, is_ready: bool, load: int | None = None, num_seen: int | None = None) -> None:
            seen[address.partition(":")[0]] = (load if load is not None else "unknown") if is_ready else None

    async def serve(host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            status, content = answers[host][head.split()[1].decode()]
            if key and f"Authorization: Bearer {key}".encode() not in head:
                status = 401
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode())

    async def go() -> None:
        (port,) = free_ports(1)
        served = [host for host, paths in answers.items() if paths]
        servers = [await asyncio.start_server(partial(serve, host), host, port) for host in served]
        watch = SchedulerWatch(Seen(), [(host, port) for host in answers], 0.5, 5.0, key)
        async with httpx.AsyncClient(trust_env=False) as client:
            await watch.look(client)
        for each in servers:
            each.close()

    asyncio.run(go())
    return seen


def test_a_look_tells_who_takes_requests_and_how_many_each_has() -> None:
    answers = {
        "127.0.0.1": {"/health": WELL, "/load": (200, '{"server_load":5}')},
        "127.0.0.2": {"/health": (503, "{}"), "/load": (200, '{"server_load":0}')},
        "127.0.0.3": {},
        "127.0.0.4": {"/health": WELL, "/load": (200, "<html>")},
        "127.0.0.5": {"/health": WELL, "/load": (401, "{}")},
        "127.0.0.6": {"/health": (200, "x" * (2 << 20))},
    }
    loads = {"127.0.0.1": 5, "127.0.0.5": "unknown"}
    assert looks(answers) == {host: loads.get(host) for host in answers}
    assert looks({"127.0.0.1": answers["127.0.0.1"]}, "k") == {"127.0.0.1": 5}


async def test_a_scheduler_that_hangs_holds_up_no_report_of_another() -> None:
    """Requests sent meanwhile are not lost: each is in the reported load or counted in addition."""
    choice, asked, gate = SchedulerChoice(most=10), asyncio.Semaphore(0), asyncio.Event()
    loads = [0, 4, 10]

    def load() -> int:
        asked.release()
        return loads[0]

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.close()

    (port,) = free_ports(1)
    servers = [
        await asyncio.start_server(partial(serve_load, load=load), "127.0.0.1", port),
        await asyncio.start_server(hang, "127.0.0.2", port),
    ]
    watch = SchedulerWatch(choice, [("127.0.0.1", port), ("127.0.0.2", port)], 0.5, 20.0)
    async with asyncio.timeout(15), httpx.AsyncClient(trust_env=False) as client:
        for num_sent in (4, 6):
            looking = asyncio.create_task(watch.look(client))
            for _ in range(2):  # for health and load
                await asked.acquire()
            while not choice.is_ready:
                await asyncio.sleep(0.01)
            for _ in range(num_sent):
                choice.choose()
            loads.pop(0)
            gate.set()
            await looking
            gate.clear()
        with pytest.raises(AllFull):
            choice.choose()
    for each in servers:
        each.close()


class SchedulerState(SchedulerChoice):
    """Records the addresses found for these schedulers, none of which takes requests."""

    def __init__(self, addresses: list[tuple[str, int]]) -> None:
        super().__init__()
        self._known: list[str] = []
        self._watch = SchedulerWatch(self, addresses, 0.5, 0.5)

    def set_addresses(self, endpoints: Iterable[str]) -> None:
        self._known = list(endpoints)
        super().set_addresses(self._known)

    async def endpoints(self) -> list[str]:
        """Observes once; returns the addresses found."""
        idle = httpx.MockTransport(lambda request: httpx.Response(503, stream=httpx.ByteStream(b"")))
        async with httpx.AsyncClient(transport=idle) as client:
            await self._watch.look(client)
        return self._known


async def test_a_name_that_hangs_holds_up_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one lookup per name is pending, however many hang; numeric addresses need none."""
    gate, resolved = threading.Event(), socket.getaddrinfo
    names = [f"slow-{at}.example" for at in range(20)]
    asked: list[str] = []

    def slow(host: Any, *args: Any, **more: Any) -> Any:
        asked.append(str(host))
        if str(host).endswith(".example"):
            gate.wait(20)
            raise OSError
        if host == "bad":
            raise UnicodeError("a label is too long")
        return resolved("127.0.0.2" if host == "good" else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    looked = SchedulerState([("127.0.0.1", 8), *((name, 9) for name in names), ("bad", 8), ("good", 8)])
    for _ in range(4):
        async with asyncio.timeout(10):
            assert await looked.endpoints() == ["127.0.0.1:8", "127.0.0.2:8"]
    gate.set()
    assert sorted(each for each in asked if each in names) == sorted(names)
    assert asked.count("bad") > 1, "a failed lookup must be retried"


async def test_addresses_with_a_scope_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [(0, 0, 0, "", ("fe80::1%2", 9000, 0, 2)), (0, 0, 0, "", ("fd00::3", 9000, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: infos)
    assert await SchedulerState([("link", 9000)]).endpoints() == ["[fd00::3]:9000"]


@pytest.mark.parametrize("host", ["nowhere", "10.0.0.9"])
async def test_what_does_not_resolve_is_told_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    def fails(*args: Any, **more: Any) -> Any:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    looked = SchedulerState([(host, 9000)])
    for _ in range(3):
        assert await looked.endpoints() == []
    ours = [each.message for each in caplog.records if each.name.startswith("pd_cluster.")]
    assert ours == [f"{host}:9000: cannot be resolved"]


async def test_a_thread_that_cannot_begin_is_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    assert await SchedulerState([("name", 9000)]).endpoints() == []
