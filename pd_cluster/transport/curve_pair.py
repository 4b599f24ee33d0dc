"""An encrypted, authenticated pair: wraps net/payload_channel.py in the interface of a process group.

The ends exchange their keys and the receiver's address through a meeting. See docs/protocol/pairs.md, "The encrypted
connection".
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import msgspec
import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore

from pd_cluster.devices.device_streams import poll
from pd_cluster.net.payload_channel import PayloadReceiver, PayloadSender, PayloadUnderWay
from pd_cluster.net.zmq_sockets import KeyPair
from pd_cluster.transport.transport_interface import buffer_of
from pd_cluster.wire import KEY_NBYTES
from ranktable_tools.host_addresses import is_ip

SENDERS_KEY, RECEIVERS_KEY = "sender", "receiver"  # keys in the meeting's store


class PairAddress(msgspec.Struct, frozen=True):
    """The address where the receiver listens, and its public key for this pair."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    public_key: Annotated[bytes, msgspec.Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]


class CurveSender:
    """Rank 0: the sending end."""

    def __init__(self, store: PrefixStore, connect_s: float) -> None:
        """Blocks until the other end is connected, at most twice `connect_s`. Raises RuntimeError."""
        keys = KeyPair.of(b"")
        store.set(SENDERS_KEY, keys.public)  # type: ignore[arg-type]  # torch also accepts bytes
        try:
            found = msgspec.msgpack.decode(_await(store, RECEIVERS_KEY, connect_s), type=PairAddress)
        except msgspec.DecodeError as error:
            raise RuntimeError(f"the other end's address is invalid: {error}") from error
        if not is_ip(found.host):
            raise RuntimeError(f"the other end's address is invalid: {found.host!r}")
        self._socket = PayloadSender(keys)
        try:
            self._socket.connect(found.host, found.port, found.public_key, connect_s)
        except RuntimeError:
            self._socket.close()
            raise

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> SendWork:
        (payload,) = tensors
        return SendWork(self._socket.send(buffer_of(payload), tag))

    def close(self) -> None:
        self._socket.close()


class CurveReceiver:
    """Rank 1: the receiving end."""

    def __init__(self, store: PrefixStore, host: str, connect_s: float) -> None:
        """Blocks until the other end is connected, at most twice `connect_s`. Raises RuntimeError."""
        self._socket = PayloadReceiver(host, _await(store, SENDERS_KEY, connect_s))
        try:
            here = PairAddress(host, self._socket.port, self._socket.public_key)
            store.set(RECEIVERS_KEY, msgspec.msgpack.encode(here))  # type: ignore[arg-type]  # as for the sender's key
            self._socket.accept(connect_s)
        except RuntimeError:
            self._socket.close()
            raise

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> ReceiveWork:
        (payload,) = tensors
        return ReceiveWork(self._socket, payload, tag)

    def close(self) -> None:
        self._socket.close()


class SendWork:
    def __init__(self, under_way: PayloadUnderWay) -> None:
        self._under_way = under_way

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError."""
        self._under_way.wait(timeout.total_seconds())


class ReceiveWork:
    """A receive under way. The caller must wait for a receiver's receives in order."""

    def __init__(self, socket: PayloadReceiver, payload: torch.Tensor, tag: int) -> None:
        self._socket, self._payload, self._tag = socket, payload, tag

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError."""
        received = self._socket.receive(len(self._payload), self._tag, timeout.total_seconds())
        np.copyto(self._payload.numpy(), np.frombuffer(received, dtype=np.uint8))


def _await(store: PrefixStore, key: str, timeout_s: float) -> bytes:
    """Returns a value that the other end has set. Raises RuntimeError."""
    if not poll(lambda: store.check([key]), timeout_s):
        raise RuntimeError(f"the other end did not connect within {timeout_s:g} s")
    return store.get(key)
