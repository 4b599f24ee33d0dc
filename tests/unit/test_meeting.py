"""Two ranks meet over their link's connection only, so strangers have nothing to read, overwrite or join."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from pd_cluster import wire
from pd_cluster.devices.device_streams import poll
from pd_cluster.transport.link_events import Landed
from pd_cluster.transport.meeting import MAX_KEYS, Meeting
from tests.support.listeners import listeners
from tests.support.transports import WAIT_S, Link

ROOT = Path(__file__).parents[2]
START_S = 60.0  # includes the import of torch


@contextlib.contextmanager
def outsider(found: dict[str, list[str]]) -> Iterator[None]:
    """Runs a stranger that looks for this process's stores during the block; `found` receives what it saw."""
    command = [sys.executable, "-m", "tests.support.outsider", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
            found.update(json.loads(process.communicate("\n", timeout=START_S)[0]))
        finally:
            process.kill()


def listening_ports() -> set[int]:
    return {each.port for each in listeners([os.getpid()])}


def test_a_stranger_reads_and_writes_nothing_while_links_come_up_and_afterwards() -> None:
    found: dict[str, list[str]] = {}
    links = []
    with outsider(found):
        for _ in range(2):
            links.append(Link("dist"))
            assert links[-1].await_ready().transport == "dist"
        for link in links:
            link.transfer([1, 2, 3], [7, 8, 9])
            assert isinstance(link.events.get(timeout=WAIT_S), Landed)
            assert torch.equal(link.target.data[[7, 8, 9]], link.source.data[[1, 2, 3]])
    for link in links:
        link.close()
    assert found["ports"], "gloo at least must listen"
    assert not found["keys"], "a stranger read what two ranks agree on"


def test_keys_are_sent_once_and_the_other_ends_are_never_sent_back() -> None:
    sent: list[tuple[str, bytes]] = []
    meeting = Meeting(WAIT_S, lambda key, value: sent.append((key, value)))
    meeting.put("theirs", b"1")
    meeting.store.set("before", "2")
    with meeting.held():
        meeting.store.set("while", "3")
        assert poll(lambda: len(sent) == 2, WAIT_S)
        meeting.store.set("last", "4")
    assert sorted(sent) == [("before", b"2"), ("last", b"4"), ("while", b"3")]
    with meeting.held():
        meeting.put("theirs", b"5")
    assert len(sent) == 3
    assert meeting.store.get("theirs") == b"5"


def test_the_other_end_may_neither_change_a_key_of_this_end_nor_set_endless_ones() -> None:
    meeting = Meeting(WAIT_S, lambda key, value: None)
    meeting.store.set("own", "address")
    meeting.put("own", b"elsewhere")
    assert meeting.store.get("own") == b"address"
    for number in range(2 * MAX_KEYS):
        meeting.put(str(number), b"")
    assert meeting.store.num_keys() == MAX_KEYS + 1


def test_a_pair_that_nobody_has_opened_listens_nowhere() -> None:
    before = listening_ports()
    link = Link("auto")
    assert link.await_ready().transport == "local"
    assert {offer.transport for offer in link.send.offers} == {"local", "shm", "dist", "curve"}
    assert listening_ports() == before
    link.close()


class SlowMail(Link):
    """The ends receive each other's keys only once `go` is set."""

    go: threading.Event

    def _to_sender(self, body: wire.Body) -> None:
        self._later(super()._to_sender, body)

    def _to_receiver(self, body: wire.Body) -> None:
        self._later(super()._to_receiver, body)

    def _later(self, deliver: Callable[[wire.Body], None], body: wire.Body) -> None:
        if isinstance(body, wire.LinkValue):
            threading.Thread(target=self._once_it_may, args=(deliver, body), daemon=True).start()
        else:
            deliver(body)

    def _once_it_may(self, deliver: Callable[[wire.Body], None], body: wire.Body) -> None:
        assert self.go.wait(WAIT_S)
        deliver(body)


def test_a_stranger_who_guesses_gloos_numbers_gets_no_link_and_no_block() -> None:
    """If a stranger connects before the peer, the link fails in time, and the next one comes up."""
    before = listening_ports()
    SlowMail.go = threading.Event()
    link = SlowMail("dist", connect_timeout_s=4.0)
    assert isinstance(link.answers.get(timeout=WAIT_S), wire.LinkAnswer)
    assert poll(lambda: len(listening_ports() - before) == 2, WAIT_S), "expected both ends' listeners"
    ports = listening_ports() - before
    strangers = [socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) for port in ports for _ in range(16)]
    for number, stranger in enumerate(strangers):
        stranger.sendall(struct.pack("<q", number % 16))
    SlowMail.go.set()
    told = link.answers.get(timeout=WAIT_S)
    assert isinstance(told, wire.LinkRefused)
    assert told.retry
    got = b""
    for stranger in strangers:
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            got += stranger.recv(1 << 20)
        stranger.close()
    for number in (1, 2, 3):
        assert link.source.data[number].numpy().tobytes() not in got
    link.close()
    again = Link("dist")
    again.await_ready()
    again.close()
