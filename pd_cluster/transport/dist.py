"""Transports over process groups of two ranks, one per link: P (rank 0) sends, D (rank 1) receives (device_pair.py).

The ends meet by exchanging keys over the link's own connection (meeting.py), so no other process can take part.
Payloads land in staging buffers, from which they are copied to their blocks. A timeout ends the link, so that late
bytes never reach a block that has been reused. gloo and CURVE stage in host memory, even if the pools are on devices.
NCCL and HCCL stage on the devices; their payloads have no checksum, because the host would have to fetch them to
compute it.
"""

from __future__ import annotations

import secrets
from collections import deque
from datetime import timedelta
from typing import Any

import msgspec
import torch

from pd_cluster.devices import device as devices
from pd_cluster.devices import process_groups as device_group
from pd_cluster.devices.device import Device
from pd_cluster.errors import LinkError, TransferFailed, first_line
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.transport.device_pair import (
    BACKENDS,
    IN_HOST_MEMORY,
    RECEIVER,
    SENDER,
    Backend,
    PairEndpoint,
    close_group,
    make_group,
)
from pd_cluster.transport.link_copies import Copies
from pd_cluster.transport.meeting import Meeting
from pd_cluster.transport.staging import Staging
from pd_cluster.transport.transport_interface import (
    Checksum,
    KVReceiver,
    KVSender,
    LinkContext,
    Peer,
    PostKey,
    Prepared,
    decode_offer,
)
from pd_cluster.wire import KVChunk, KVPiece, TransportName, TransportOffer

MAX_PAYLOAD_NBYTES = 8 << 20
MAX_DEVICE_PAYLOAD_NBYTES = 32 << 20
NUM_UNDER_WAY = 4  # payloads in flight; one is packed or unpacked while the next ones are being sent


class GroupOffer(msgspec.Struct, frozen=True):
    """The group's name, its backend, and the accelerator of P's pool ("" for backends in host memory)."""

    address: str
    backend: str
    device_uuid: str = ""

    def offer(self, transport: TransportName) -> TransportOffer:
        return TransportOffer(transport=transport, data=msgspec.msgpack.encode(self))


class DistSender:
    def __init__(self, place: LinkContext, checksum: Checksum, post: PostKey, backend: Backend = "gloo") -> None:
        """`post` sends one of the meeting's keys to the other end."""
        self.name: TransportName = "dist" if backend == "gloo" else backend
        self.max_payload_nbytes = _most(backend)
        self.meeting = Meeting(place.connect_s, post)
        self.place, self._pool = place, place.pool
        self._checksum = checksum if backend in IN_HOST_MEMORY else Checksum(is_on=False)
        self._transfer = timedelta(seconds=place.transfer_s)
        self._backend: Backend = backend
        self._copies = Copies(place.pool.device, place.transfer_s)
        self._group_name = secrets.token_hex(16)
        self.group: Any = None
        self._staging: Staging | None = None
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()  # each work with the buffer that it reads

    def offer(self) -> TransportOffer:
        uuid = "" if self._backend in IN_HOST_MEMORY else devices.uuid(self._pool.device)
        return GroupOffer(self._group_name, self._backend, uuid).offer(self.name)

    def open(self, peer: KVLayout) -> None:
        route = PoolRoute(self._pool.layout, peer, self.place.wants_int8)
        self._staging = Staging(self._pool, route, self._copies, in_host_memory=self._backend in IN_HOST_MEMORY)
        self._staging.warm()
        self.group = make_group(self._backend, self.meeting, self._group_name, SENDER, _pair_endpoint(self.place))

    def prepare(self, piece: KVPiece) -> Prepared:
        assert self._staging is not None
        payload = self._staging.packed(piece)
        return Prepared(payload, len(payload), self._checksum.of(payload))

    def send(self, sequence: int, prepared: Prepared) -> None:
        assert prepared.payload is not None
        try:
            if len(self._under_way) == NUM_UNDER_WAY:
                self._under_way.popleft()[0].wait(self._transfer)
            with self._copies.launch():  # so that the device sends after it has packed
                work = self.group.send([prepared.payload], RECEIVER, _tag(sequence))
        except RuntimeError as error:
            raise LinkError(f"sending KV cache failed: {first_line(error)}", retry=True) from error
        self._under_way.append((work, prepared.payload))

    def close(self) -> None:
        close_group(self.group)
        self._copies.drain()
        self.group = None
        self._under_way.clear()


class DistReceiver:
    def __init__(self, place: LinkContext, peer: Peer, checksum: Checksum, post: PostKey) -> None:
        """`post` sends one of the meeting's keys to the other end. Raises LinkError for an invalid offer."""
        self.name: TransportName = peer.offer.transport
        self.meeting = Meeting(place.connect_s, post)
        self._offer = decode_offer(peer.offer, GroupOffer)
        self._backend = _backend_of(self.name)
        self.place, self._pool = place, place.pool
        self._checksum = checksum
        self.route = PoolRoute(peer.layout, place.pool.layout, place.wants_int8)
        self.copies = Copies(place.pool.device, place.transfer_s)
        self._staging = Staging(place.pool, self.route, self.copies, in_host_memory=self._backend in IN_HOST_MEMORY)
        self._free = [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_UNDER_WAY)]
        self._announced: deque[tuple[int, KVChunk]] = deque()  # payloads that wait for a free buffer
        # The sequence number, the work (None once done), the buffer, and the payload's part of the buffer.
        self._under_way: deque[tuple[int, Any, torch.Tensor, torch.Tensor]] = deque()
        self.group: Any = None

    def open(self) -> None:
        if problem := _why_no_pair(self.name, self._offer, self._pool.device):
            raise LinkError(problem)
        self._staging.warm()
        self.group = make_group(self._backend, self.meeting, self._offer.address, RECEIVER, _pair_endpoint(self.place))

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
            raise LinkError(f"receiving KV cache failed: {first_line(error)}", retry=True) from error
        self._under_way[0] = (expected, None, buffer, payload)

    def receive(self, sequence: int, chunk: KVChunk, into: list[int] | None) -> None:
        self.arrive(sequence, chunk, self.place.transfer_s)
        _, _, buffer, payload = self._under_way.popleft()
        try:
            if into is not None:
                self._take(payload, chunk, into)
        finally:
            self._free.append(buffer)
            self._start()

    def _take(self, payload: torch.Tensor, chunk: KVChunk, into: list[int]) -> None:
        if chunk.nbytes != self.route.payload_nbytes(chunk.piece):
            raise TransferFailed(f"{chunk.nbytes} bytes arrived, not {self.route.payload_nbytes(chunk.piece)}")
        if self._backend in IN_HOST_MEMORY and chunk.checksum and self._checksum.of(payload) != chunk.checksum:
            raise TransferFailed("checksum of a KV chunk is wrong")
        self._staging.unpack(payload, chunk.piece, into)

    def close(self) -> None:
        close_group(self.group)
        self.copies.drain()
        self.group = None
        self._under_way.clear()

    def _start(self) -> None:
        """Begins to receive announced payloads, in order, as long as a staging buffer is free. Raises LinkError."""
        while self._free and self._announced:
            sequence, chunk = self._announced.popleft()
            if not 0 < chunk.nbytes <= max(_most(self._backend), self.route.source.block_nbytes):
                raise LinkError(f"a header announces a payload of {chunk.nbytes} bytes", retry=True)
            buffer = self._free.pop()
            try:
                with self.copies.launch():  # so that the device receives after its copies from this buffer
                    if len(buffer) < chunk.nbytes:
                        buffer = self._staging.buffer(chunk.nbytes)
                    payload = buffer[: chunk.nbytes]
                    work = self.group.recv([payload], SENDER, _tag(sequence))
            except RuntimeError as error:
                raise LinkError(f"receiving KV cache failed: {first_line(error)}", retry=True) from error
            self._under_way.append((sequence, work, buffer, payload))


def _pair_endpoint(place: LinkContext) -> PairEndpoint:
    return PairEndpoint(place.bind_host, place.connect_s, place.pool.device)


def _backend_of(name: TransportName) -> Backend:
    return next((each for each in BACKENDS if each == name), "gloo")


def _why_no_pair(name: TransportName, offer: GroupOffer, device: Device) -> str:
    """Returns why a process with its pool on this device cannot be the receiving end; "" if it can."""
    backend, uuid = offer.backend, offer.device_uuid
    if backend != _backend_of(name):
        return f"the prefill instance sends with {backend!r} over {name}, this one receives with {_backend_of(name)}"
    if backend not in device_group.BACKENDS:
        return ""
    if problem := device_group.why_none(backend, device):
        return problem
    if uuid and uuid == devices.uuid(device):
        return f"both pools are on device {uuid}: {backend.upper()} allows only one rank per device"
    return ""


def _most(backend: Backend) -> int:
    return MAX_PAYLOAD_NBYTES if backend in IN_HOST_MEMORY else MAX_DEVICE_PAYLOAD_NBYTES


def _tag(sequence: int) -> int:
    return sequence & 0x3FFFFFFF


def why_not(name: TransportName, own: Device, peer: TransportOffer | None = None) -> str:
    """See transport_table.Transport."""
    if name in device_group.BACKENDS and (problem := device_group.why_none(name, own)):
        return problem
    return _why_no_pair(name, decode_offer(peer, GroupOffer), own) if peer is not None else ""


def ends(name: TransportName, place: LinkContext) -> DistEnds:
    return DistEnds(name, place)


class DistEnds:
    def __init__(self, name: TransportName, place: LinkContext) -> None:
        self._backend = _backend_of(name)
        self.place = place

    def sender(self, checksum: Checksum, post: PostKey) -> KVSender:
        return DistSender(self.place, checksum, post, self._backend)

    def receiver(self, peer: Peer, checksum: Checksum, post: PostKey) -> KVReceiver:
        return DistReceiver(self.place, peer, checksum, post)
