"""A cluster whose scheduler has few descriptors keeps answering during attacks from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from pd_cluster.cluster.processes.launcher import Member
from tests.api.conftest import FLAGS
from tests.support.cluster import LiveCluster

NUM_DESCRIPTORS = 128
LIMITED = (
    "import os, resource, sys\n"
    f"resource.setrlimit(resource.RLIMIT_NOFILE, ({NUM_DESCRIPTORS}, {NUM_DESCRIPTORS}))\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
SENT_NBYTES = 16 << 20
TAKEN_NBYTES = 8 << 20  # more than both systems' buffers hold, less than was sent


class Poor(LiveCluster):
    def plan(self) -> list[Member]:
        *workers, scheduler = super().plan()
        command = [sys.executable, "-c", LIMITED, *scheduler.command]
        return [*workers, dataclasses.replace(scheduler, command=command)]


@pytest.fixture(scope="module")
def poor(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with Poor(tmp_path_factory.mktemp("poor"), model, arguments=FLAGS) as running:
        yield running
        running.assert_home()


@contextlib.contextmanager
def crowd(cluster: LiveCluster, count: int, sent: bytes, port_offset: int = 0) -> Iterator[list[socket.socket]]:
    url = urlsplit(cluster.url)
    assert url.hostname is not None
    assert url.port is not None
    with contextlib.ExitStack() as leaving:
        clients = []
        for _ in range(count):
            client = socket.create_connection((url.hostname, url.port + port_offset), timeout=20)
            clients.append(leaving.enter_context(client))
            with contextlib.suppress(ConnectionError):
                client.sendall(sent)
        yield clients


def assert_answers(cluster: LiveCluster) -> None:
    """Asserts that new connections get answers."""
    for url in (f"{cluster.url}/health", f"{cluster.url}/ping", f"{cluster.admin_url}/instances"):
        assert httpx.get(url, trust_env=False, timeout=30).status_code == 200


@pytest.mark.parametrize(("sent", "is_admin"), [(b"", True), (b"GET / HTTP/1.1\r\nHost: x\r\n", False)])
def test_more_connections_than_descriptors(poor: LiveCluster, sent: bytes, is_admin: bool) -> None:
    with crowd(poor, 3 * NUM_DESCRIPTORS, sent, is_admin):
        assert_answers(poor)
        body = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{poor.url}/v1/completions", json=body, trust_env=False, timeout=30)
        assert answer.status_code == 200, answer.text
    assert poor.complete("hello", 4)


def test_more_requests_than_descriptors(poor: LiveCluster) -> None:
    """With many requests whose bodies never arrive, new ones are served or told when to retry; probes are answered."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with crowd(poor, NUM_DESCRIPTORS, head):
        assert_answers(poor)
        answer = httpx.get(f"{poor.url}/v1/models", trust_env=False, timeout=30)
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "too_many_connections"
    poor.wait_until("it serves again", lambda: poor.client.get(f"{poor.url}/v1/models").status_code == 200)
    assert poor.complete("hello", 4)


@pytest.mark.parametrize("sent", [b"X: ", b"X: 1\r\n" * 1000], ids=["one header", "many headers"])
def test_heads_without_end(poor: LiveCluster, sent: bytes) -> None:
    """Each connection is closed long before it has sent its endless head."""
    with crowd(poor, 4, b"GET /health HTTP/1.1\r\nHost: x\r\n" + sent) as clients:
        for client in clients:
            num_sent = 0
            with contextlib.suppress(ConnectionError):
                while num_sent < SENT_NBYTES:
                    num_sent += client.send(sent * (65536 // len(sent)))
            assert num_sent < TAKEN_NBYTES
        assert_answers(poor)


def test_the_log_stays_short(poor: LiveCluster) -> None:
    for _ in range(5):
        with crowd(poor, 60, b"NONSENSE\r\n\r\n") as clients:
            for client in clients:
                with contextlib.suppress(ConnectionError):
                    assert client.recv(12) in (b"HTTP/1.1 400", b"")
    lines = poor.log_file("scheduler").read_text(errors="replace").splitlines()
    turned_away = [line for line in lines if "rejected: " in line]
    assert 1 <= len(turned_away) < 60
    assert not [line for line in lines if "Invalid HTTP request" in line or "Traceback" in line]
