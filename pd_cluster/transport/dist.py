"""torch.distributed transport: one two-rank process group per link, P is rank 0 and sends, D is rank 1 and receives.

The group is built directly on a TCPStore that P hosts on the rank table's address: no global world, nothing that
another link could disturb. Payloads land in staging buffers and are copied to their blocks from there; a timeout ends
the link, so that late bytes never reach a reused block. gloo on CPU; NCCL and HCCL will take the same shape.
"""

from __future__ import annotations

import secrets
import socket
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from pd_cluster.errors import LinkError, TransferFailed
from pd_cluster.kv.layout import KVLayout, Route
from pd_cluster.kv.pack import pack, unpack
from pd_cluster.kv.pool import KVPool
from pd_cluster.transport.base import Checksum, Prepared
from pd_cluster.transport.local import put_blocks
from pd_cluster.wire import KVChunk, KVPiece, TransportName, TransportOffer

MAX_PAYLOAD_NBYTES = 8 << 20
NUM_UNDER_WAY = 4  # payloads: one is packed or unpacked while the next are on the wire
BACKENDS = ("gloo",)

SENDER, RECEIVER = 0, 1


class Store:
    """The rendezvous that P hosts for one attempt to open a link: who waits in it keeps nobody else waiting."""

    def __init__(self, host: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((host, 0))
        listener.listen(64)
        self.host = host
        self.port = int(listener.getsockname()[1])
        self.store = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


class DistSender:
    name: TransportName = "dist"
    max_payload_nbytes = MAX_PAYLOAD_NBYTES

    def __init__(
        self,
        pool: KVPool,
        checksum: Checksum,
        wants_int8: bool,
        bind_host: str,
        connect_s: float,
        transfer_s: float,
    ) -> None:
        self._store: Store | None = Store(bind_host, connect_s)
        self._pool = pool
        self._checksum = checksum
        self._wants_int8 = wants_int8
        self._bind_host = bind_host
        self._connect_s = connect_s
        self._transfer = timedelta(seconds=transfer_s)
        self._group_name = secrets.token_hex(16)
        self._group: Any = None
        self._route: Route | None = None
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()  # the work, and the bytes that it reads

    def offer(self) -> TransportOffer:
        assert self._store is not None
        return TransportOffer(transport="dist", address=self._group_name, port=self._store.port, backend="gloo")

    def open(self, peer: KVLayout) -> None:
        assert self._store is not None
        self._route = Route(self._pool.layout, peer, self._wants_int8)
        prefix = PrefixStore(self._group_name, self._store.store)
        self._group = _make_group(prefix, SENDER, self._bind_host, self._connect_s)

    def prepare(self, piece: KVPiece) -> Prepared:
        assert self._route is not None
        payload = pack(self._pool.data, piece, self._route)
        return Prepared(payload, len(payload), self._checksum.of(payload))

    def send(self, sequence: int, prepared: Prepared) -> None:
        assert prepared.payload is not None
        try:
            if len(self._under_way) == NUM_UNDER_WAY:
                self._under_way.popleft()[0].wait(self._transfer)
            work = self._group.send([prepared.payload], RECEIVER, _tag(sequence))
        except RuntimeError as error:
            raise LinkError(f"sending KV cache failed: {_first_line(error)}", retry=True) from error
        self._under_way.append((work, prepared.payload))

    def close(self) -> None:
        self._group = self._store = None  # which closes its port
        self._under_way.clear()


class DistReceiver:
    name: TransportName = "dist"

    def __init__(
        self,
        offer: TransportOffer,
        pool: KVPool,
        peer: KVLayout,
        checksum: Checksum,
        wants_int8: bool,
        peer_host: str,
        bind_host: str,
        connect_s: float,
        transfer_s: float,
    ) -> None:
        self._offer = offer
        self._pool = pool
        self._checksum = checksum
        self._route = Route(peer, pool.layout, wants_int8)
        self._peer_host = peer_host
        self._bind_host = bind_host
        self._connect_s = connect_s
        self._transfer_s = transfer_s
        self._free = [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_UNDER_WAY)]
        self._announced: deque[tuple[int, KVChunk]] = deque()  # for want of a free buffer
        # sequence, work (None when it is done), buffer, the payload's part of it
        self._under_way: deque[tuple[int, Any, torch.Tensor, torch.Tensor]] = deque()
        self._group: Any = None
        self.precision = self._route.precision

    def open(self) -> None:
        if self._offer.backend not in BACKENDS:
            raise LinkError(
                f"the prefill instance sends with {self._offer.backend!r}, this one receives with {', '.join(BACKENDS)}"
            )
        timeout = timedelta(seconds=self._connect_s)
        try:
            store = TCPStore(self._peer_host, self._offer.port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            raise LinkError(
                f"the prefill instance's store at {self._peer_host}:{self._offer.port} cannot be reached: "
                f"{_first_line(error)}",
                retry=True,
            ) from error
        prefix = PrefixStore(self._offer.address, store)
        self._group = _make_group(prefix, RECEIVER, self._bind_host, self._connect_s)

    def expect(self, sequence: int, chunk: KVChunk) -> None:
        self._announced.append((sequence, chunk))
        self._start()

    def arrive(self, sequence: int, chunk: KVChunk, timeout_s: float) -> None:
        if not self._under_way:
            self.expect(sequence, chunk)
        expected, work, buffer, payload = self._under_way[0]
        assert expected == sequence
        if work is None:
            return
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise LinkError(f"receiving KV cache failed: {_first_line(error)}", retry=True) from error
        self._under_way[0] = (expected, None, buffer, payload)

    def receive(self, sequence: int, chunk: KVChunk, into: list[int] | None) -> None:
        self.arrive(sequence, chunk, self._transfer_s)
        _, _, buffer, payload = self._under_way.popleft()
        try:
            if into is not None:
                self._take(payload, chunk, into)
        finally:
            self._free.append(buffer)
            self._start()

    def _take(self, payload: torch.Tensor, chunk: KVChunk, into: list[int]) -> None:
        if chunk.nbytes != self._route.payload_nbytes(chunk.piece):
            raise TransferFailed(f"{chunk.nbytes} bytes came for {self._route.payload_nbytes(chunk.piece)}")
        if chunk.checksum and self._checksum.of(payload) != chunk.checksum:
            raise TransferFailed("checksum of a KV chunk is wrong")
        if self._route.is_verbatim:
            put_blocks(payload, chunk.piece, self._pool.data, into)
        else:
            unpack(payload, chunk.piece, self._route, self._pool.data, into)

    def close(self) -> None:
        self._group = None
        self._under_way.clear()

    def _start(self) -> None:
        """Receives into every staging buffer that is free, in order. Raises LinkError."""
        while self._free and self._announced:
            sequence, chunk = self._announced.popleft()
            if not 0 < chunk.nbytes <= max(MAX_PAYLOAD_NBYTES, self._route.source.block_nbytes):
                raise LinkError(f"a header announces a payload of {chunk.nbytes} bytes", retry=True)
            buffer = self._free.pop()
            if len(buffer) < chunk.nbytes:
                buffer = torch.zeros(chunk.nbytes, dtype=torch.uint8)
            payload = buffer[: chunk.nbytes]
            try:
                work = self._group.recv([payload], SENDER, _tag(sequence))
            except RuntimeError as error:
                raise LinkError(f"receiving KV cache failed: {_first_line(error)}", retry=True) from error
            self._under_way.append((sequence, work, buffer, payload))


def _tag(sequence: int) -> int:
    return sequence & 0x3FFFFFFF


def _make_group(store: PrefixStore, rank: int, host: str, connect_s: float) -> ProcessGroupGloo:
    """Blocks until both ranks are there. Raises LinkError after at most twice `connect_s`: gloo tries five times."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=0.4 * connect_s)
    try:
        return ProcessGroupGloo(store, rank, 2, options)
    except RuntimeError as error:
        raise LinkError(f"the gloo pair did not come up: {_first_line(error)}", retry=True) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
