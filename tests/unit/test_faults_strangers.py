"""Clients that leave and strangers of `benchmarks faults`, each against a small server that shows what reached it."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.faults import leaving as faults_leaving
from benchmarks.faults.frames import KINDS, OVERSIZED_NBYTES, say
from benchmarks.faults.leaving import aborts, each, request_of, resets, slow_readers
from benchmarks.faults.ports import Listener, listeners
from benchmarks.faults.scripts import FAULTS, endure
from benchmarks.faults.terms import Means, Seen
from benchmarks.load import LoadRequest
from pd_cluster.errors import PdClusterError

PROBE = LoadRequest((1, 2, 3), 1, None).body("m", "probe")
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def means_for(port: int, scale: float = 0.01, stall_s: float = 0.1) -> Means:
    stage: Any = SimpleNamespace(public=("127.0.0.1", port))
    return Means(stage, stall_s, PROBE, scale, random.Random(1))


class Server:
    """Answers each request with a head and endless tokens; `ends` says how each connection ended, and after what."""

    def __init__(self, head: bytes = HEAD) -> None:
        self._head = head
        self.ends: list[tuple[str, bytes]] = []

    async def serve(self, script: Callable[[Means], Awaitable[str]], connections: int) -> str:
        """Serves until this many connections have ended."""
        done = asyncio.Event()

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            data, how = b"", "closed"
            try:
                while more := await reader.read(1 << 16):
                    data += more
                    if data.endswith(b"}"):
                        writer.write(self._head + 500 * b"\ndata: x\n")
            except ConnectionResetError:
                how = "reset"
            writer.close()
            self.ends.append((how, data))
            if len(self.ends) == connections:
                done.set()

        server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
        async with server:
            told = await script(means_for(server.sockets[0].getsockname()[1]))
            await asyncio.wait_for(done.wait(), 10)
        return told


def test_connections_are_reset_in_the_head_in_the_body_and_in_the_answer() -> None:
    server = Server()
    told = asyncio.run(server.serve(resets, 40))
    assert {how for how, _ in server.ends} == {"reset"}
    assert any(b"\r\n\r\n" not in data for _, data in server.ends)
    assert any(data.endswith(b"}") for _, data in server.ends)
    assert told.startswith("40 connections reset: ")
    assert all(f"in the {where}" in told for where in ("head", "body", "answer"))


def test_clients_leave_after_a_few_tokens() -> None:
    server = Server()
    told = asyncio.run(server.serve(aborts, 50))
    assert {how for how, _ in server.ends} == {"reset", "closed"}
    assert told.startswith("50 clients left: ")


def test_a_request_that_is_refused_is_no_abort() -> None:
    with pytest.raises(PdClusterError, match=r"about to leave got b'HTTP/1\.1 503 "):
        asyncio.run(Server(b"HTTP/1.1 503 Service Unavailable\r\n\r\n").serve(aborts, 1))


def test_slow_clients_hold_their_connections_for_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults_leaving, "NUM_SLOW", 3)
    monkeypatch.setattr(faults_leaving, "NUM_DEAF", 2)
    server = Server()
    assert asyncio.run(server.serve(slow_readers, 5)) == "3 clients read 3 bytes in 0.1 s, 2 none"


def test_what_one_client_cannot_do_ends_the_row() -> None:
    async def one(number: int) -> str:
        if number == 3:
            raise TimeoutError
        if number == 2:
            raise ConnectionResetError
        return "good"

    with pytest.raises(PdClusterError, match="client 3 of 9"):
        asyncio.run(each(9, one, at_once=1))
    assert asyncio.run(each(3, one)) == {"good": 2, "cut off by the cluster": 1}


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_of_garbage_differs_from_what_is_understood(seed: int) -> None:
    rng = random.Random(seed)
    known = [b"".join(request_of(means_for(1), 4)), rng.randbytes(500), rng.randbytes(300)]
    made = {kind: make(rng, known) for kind, make in KINDS}
    assert made["garbled"] not in known
    assert any(data.startswith(made["truncated"]) for data in known)
    assert made["replayed"] in known or sorted(made["replayed"]) == sorted(b"".join(known))
    assert max(len(dict(KINDS)["oversized"](rng, known)) for _ in range(20)) > OVERSIZED_NBYTES - 1000


def test_a_stranger_says_it_and_goes_whatever_the_port_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = [each for each in listeners([os.getpid()]) if each.port == port]
        assert found == [Listener(os.getpid(), "127.0.0.1", port)]
        asyncio.run(say(found[0], b"hello", is_reset=False))
        assert server.accept()[0].recv(64) == b"hello"
    assert port not in {each.port for each in listeners([os.getpid()])}


@pytest.mark.parametrize("after", [[1, 2], [1, 3]])
def test_a_process_that_ended_of_it_fails_the_row(after: list[int]) -> None:
    class Stage:
        lives_told = iter(([1, 2], after))

        async def lives(self) -> dict[str, list[int]]:
            return {"decode-0": next(self.lives_told)}

        async def whole(self) -> None: ...

    async def nothing(means: Means) -> str:
        return "nothing was done"

    means = Means(cast(Any, Stage()), 1.0, PROBE)
    if after == [1, 2]:
        assert asyncio.run(endure(means, nothing)) == Seen()
    else:
        with pytest.raises(PdClusterError, match="decode-0 ended and was started again"):
            asyncio.run(endure(means, nothing))


def test_the_rows_are_there() -> None:
    assert {"resets", "aborts", "slow-readers", "frames"} <= FAULTS.keys()
