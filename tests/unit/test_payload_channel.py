"""The encrypted pair delivers payloads whole, in order and to one peer only; no end waits for a closed one."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pd_cluster.devices.device import CPU
from pd_cluster.errors import LinkError
from pd_cluster.net.payload_channel import PayloadError, PayloadReceiver, PayloadSender
from pd_cluster.net.zmq_sockets import KeyPair
from pd_cluster.transport.device_pair import RECEIVER, SENDER, PairEndpoint, make_group
from pd_cluster.transport.dist import GroupOffer
from pd_cluster.transport.link_events import Landed
from pd_cluster.transport.meeting import Meeting
from pd_cluster.transport.transport_table import BY_NAME
from tests.support.transports import WAIT_S, Link

HOST = "127.0.0.1"


@contextmanager
def ends() -> Iterator[tuple[KeyPair, PayloadSender, PayloadReceiver]]:
    """Yields the sender's keys and both ends, not yet connected."""
    keys = KeyPair.of(b"")
    receiver, sender = PayloadReceiver(HOST, keys.public), PayloadSender(keys)
    try:
        yield keys, sender, receiver
    finally:
        sender.close()
        receiver.close()


@contextmanager
def opened() -> Iterator[tuple[PayloadSender, PayloadReceiver]]:
    with ends() as (_, sender, receiver):
        meet(sender, receiver, receiver.port)
        yield sender, receiver


def meet(sender: PayloadSender, receiver: PayloadReceiver, port: int) -> None:
    connecting = threading.Thread(target=sender.connect, args=(HOST, port, receiver.public_key, WAIT_S))
    connecting.start()
    receiver.accept(WAIT_S)
    connecting.join(WAIT_S)


def test_payloads_of_any_size_come_in_order() -> None:
    with opened() as (sender, receiver):
        payloads = [secrets.token_bytes(nbytes) for nbytes in (1, 100, 1 << 16, 5 << 20)]
        works = [sender.send(memoryview(each), tag) for tag, each in enumerate(payloads)]
        for tag, each in enumerate(payloads):
            assert receiver.receive(len(each), tag, WAIT_S) == each
        for work in works:
            work.wait(WAIT_S)


def test_only_the_peer_is_admitted_and_only_once() -> None:
    """Others are refused before the peer connects; afterwards even the peer's keys are refused."""

    def is_refused(stranger: KeyPair, port: int, server_key: bytes) -> bool:
        other = PayloadSender(stranger)
        try:
            with pytest.raises(PayloadError, match=r"did not|refused"):
                other.connect(HOST, port, server_key, 1.0)
            return True
        finally:
            other.close()

    with ends() as (keys, sender, receiver):
        assert is_refused(KeyPair.of(b""), receiver.port, receiver.public_key)
        assert is_refused(keys, receiver.port, KeyPair.of(b"").public), "the receiver must prove its key, too"
        meet(sender, receiver, receiver.port)
        assert is_refused(KeyPair.of(b""), receiver.port, receiver.public_key)
        assert is_refused(keys, receiver.port, receiver.public_key)
        sender.send(memoryview(b"still"), 0)
        assert receiver.receive(5, 0, WAIT_S) == b"still"


def test_nothing_is_readable_on_the_way() -> None:
    """A relay between the ends sees no part of the payload in the clear."""
    secret = b"a prompt that nobody else may read " * 1000
    seen = bytearray()
    with ends() as (_, sender, receiver), socket.create_server((HOST, 0)) as listening:

        def relay() -> None:
            near, _ = listening.accept()
            far = socket.create_connection((HOST, receiver.port))
            back = threading.Thread(target=pump, args=(far, near, bytearray()), daemon=True)
            back.start()
            pump(near, far, seen)
            back.join(WAIT_S)

        relaying = threading.Thread(target=relay, daemon=True)
        relaying.start()
        meet(sender, receiver, listening.getsockname()[1])
        sender.send(memoryview(secret), 0).wait(WAIT_S)
        assert receiver.receive(len(secret), 0, WAIT_S) == secret
        sender.close()
        receiver.close()
        relaying.join(WAIT_S)
    assert len(seen) > len(secret)
    assert secret[:16] not in seen


def test_another_payload_than_the_announced_one_is_refused() -> None:
    for nbytes, tag, reason in ((3, 8, "not the announced one"), (4, 7, "3 bytes arrived, 4 were announced")):
        with opened() as (sender, receiver):
            sender.send(memoryview(b"abc"), 7)
            with pytest.raises(PayloadError, match=reason):
                receiver.receive(nbytes, tag, WAIT_S)


def pump(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
    """Copies until one end closes, then closes the other direction."""
    with source, target:
        try:
            while data := source.recv(1 << 16):
                seen += data
                target.sendall(data)
        except OSError:
            pass


def test_a_sender_hears_of_a_receiver_that_is_gone() -> None:
    def send_many() -> None:
        for tag in range(1000):  # it may notice the other end's close only after some
            sender.send(memoryview(bytes(1 << 20)), tag).wait(WAIT_S)

    with opened() as (sender, receiver):
        receiver.close()
        with pytest.raises(PayloadError, match="the connection was closed"):
            send_many()


def test_a_receiver_waits_no_longer_than_told() -> None:
    with opened() as (_, receiver), pytest.raises(PayloadError, match=r"nothing arrived within 0\.05 s"):
        receiver.receive(1, 0, 0.05)
    with ends() as (*_, receiver), pytest.raises(PayloadError, match=r"did not connect within 0\.05 s"):
        receiver.accept(0.05)


@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
def test_an_end_whose_other_does_not_come_gives_up(rank: int) -> None:
    meeting = Meeting(0.1, lambda key, value: None)
    with pytest.raises(LinkError, match=r"the curve pair did not come up: the other end did not connect within 0\.1 s"):
        make_group("curve", meeting, "name", rank, PairEndpoint(HOST, 0.1, CPU))


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x83\xa4host\xa1x\xa4port\x01\xaapublic_key\xc4\x20" + bytes(32)])
def test_an_address_that_makes_no_sense_is_refused(value: bytes) -> None:
    meeting = Meeting(5.0, lambda key, value: None)
    meeting.put("/name//receiver", value)
    meeting.put("name/receiver", value)
    with pytest.raises(LinkError, match="is invalid"):
        make_group("curve", meeting, "name", SENDER, PairEndpoint(HOST, 5.0, CPU))


def test_gloo_cannot_come_under_the_encrypted_pairs_name() -> None:
    """A prefill instance cannot make a decode instance accept unencrypted payloads from another host."""
    offer = GroupOffer("g", "gloo").offer("curve")
    assert "sends with 'gloo' over curve" in BY_NAME["curve"].why_not(CPU, offer)


def test_a_link_over_it_moves_blocks() -> None:
    link = Link("curve")
    assert link.await_ready().transport == "curve"
    link.transfer([1, 2, 3], [7, 8, 9])
    assert isinstance(event := link.events.get(timeout=WAIT_S), Landed)
    assert event.nbytes
    assert torch.equal(link.target.data[[7, 8, 9]], link.source.data[[1, 2, 3]])
    link.close()
