"""NIXL: the decode instance reads the prefill instance's memory over UCX, by RDMA, TCP or shared memory.

A pool in host memory or on a CUDA device is registered as a whole. If the layouts of both pools are equal, D reads
block by block. Otherwise (different heads, block sizes or dtypes, or pools on NPUs), P packs pieces into a registered
buffer, which D reads. docs/protocol/handover.md, "Reads over NIXL", has the state × event tables.
"""

from __future__ import annotations

import importlib.util
import secrets

import msgspec
import torch

from pd_cluster.devices.device import Device
from pd_cluster.devices.device_streams import poll
from pd_cluster.errors import LinkError, TransferFailed, first_line
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import NUM_EXTRA_BLOCKS, is_block
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.transport.link_copies import Copies
from pd_cluster.transport.meeting import Meeting
from pd_cluster.transport.nixl_agent import Agent, ReadBuffers
from pd_cluster.transport.nixl_offer import (
    DEVICE,
    HOST,
    NUM_LANE_BUFFERS,
    PACKED,
    SLOTS,
    AgentOffer,
    LaneBuffers,
    byte_ranges_of,
    kind_of,
    notice_of,
)
from pd_cluster.transport.nixl_reads import ReadLanding, Reads, ReadSource
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
from pd_cluster.transport.transport_table import BY_NAME
from pd_cluster.wire import KVChunk, KVPiece, TransportName, TransportOffer

MAX_PAYLOAD_NBYTES = 8 << 20


class NixlSender:
    """P's end: packs pieces that D cannot read from the pool itself. D does all reads."""

    name: TransportName = "nixl"
    meeting = None
    max_payload_nbytes = MAX_PAYLOAD_NBYTES

    def __init__(self, agent: Agent, place: LinkContext, checksum: Checksum, post: PostKey) -> None:
        self._agent, self._place, self._pool, self._post = agent, place, place.pool, post
        self._checksum = checksum
        self._copies = Copies(place.pool.device, place.transfer_s)
        self._lane = secrets.token_bytes(16)
        self._kind = kind_of(place.pool.device)
        self._slots: list[int] = []
        self._turn = 0  # the number of packed payloads so far
        self._route: PoolRoute | None = None
        self._staging: Staging | None = None

    def offer(self) -> TransportOffer:
        agent, device, slots = self._agent, self._pool.device, self._agent.slots
        offer = AgentOffer(
            agent=agent.name,
            metadata=agent.metadata,
            kind=self._kind,
            device=device.index if self._kind == DEVICE else 0,
            pool=self._pool.memory.parts[0].data_ptr() if self._kind else 0,
            buffers=slots.buffers.data_ptr(),
            num_buffers=len(slots.buffers),
            buffer_nbytes=slots.nbytes,
            lane=self._lane,
        )
        return TransportOffer(transport=self.name, data=msgspec.msgpack.encode(offer))

    def open(self, peer: KVLayout) -> None:
        self._route = PoolRoute(self._pool.layout, peer, self._place.wants_int8)
        if self._route.is_verbatim and self._kind:
            return
        self._staging = Staging(self._pool, self._route, self._copies, in_host_memory=True)
        self._staging.warm()
        while len(self._slots) < NUM_LANE_BUFFERS:
            self._slots.append(self._agent.slots.take(self._place.connect_s))
        self._post(SLOTS, msgspec.msgpack.encode(self._slots))

    def prepare(self, piece: KVPiece) -> Prepared:
        route = self._route
        assert route is not None
        nbytes = route.payload_nbytes(piece)
        if self._staging is not None:
            payload = self._next_buffer()[:nbytes]
            payload.copy_(self._staging.packed(piece))
            return Prepared(None, nbytes, self._checksum.of(payload))
        if not self._checksum.is_on or self._kind != HOST:
            return Prepared(None, nbytes, 0)
        return Prepared(None, nbytes, self._checksum.of(*self._pool.memory.contiguous_parts(piece)))

    def send(self, sequence: int, prepared: Prepared) -> None: ...

    def close(self) -> None:
        """Returns the buffers to the agent. D may still read them, but its link has ended."""
        self._copies.drain()
        for turn in range(max(0, self._turn - NUM_LANE_BUFFERS), self._turn):
            self._agent.forget_notice(notice_of(self._lane, turn))
        while self._slots:
            self._agent.slots.release(self._slots.pop())

    def _next_buffer(self) -> torch.Tensor:
        """Returns the buffer for the next payload, once D has read the buffer's previous payload. Raises LinkError."""
        turn, limit_s = self._turn, self._place.transfer_s
        before = notice_of(self._lane, turn - NUM_LANE_BUFFERS) if turn >= NUM_LANE_BUFFERS else None
        if before is not None and not poll(lambda: self._agent.was_noticed(before), limit_s):
            raise LinkError(f"the decode instance has not read KV cache within {limit_s:g} s", retry=True)
        self._turn += 1
        self._agent.await_notice(notice_of(self._lane, turn))
        return self._agent.slots.buffers[self._slots[turn % NUM_LANE_BUFFERS]]


class NixlReceiver:
    """D's end: reads into blocks of the pool, or into a buffer that it unpacks. `copies` also covers the reads."""

    name: TransportName = "nixl"

    def __init__(self, agent: Agent, place: LinkContext, peer: Peer, checksum: Checksum, post: PostKey) -> None:
        """Raises LinkError for an invalid offer."""
        self._agent, self._place = agent, place
        self._offer = decode_offer(peer.offer, AgentOffer)
        self._num_peer_blocks = peer.num_blocks + NUM_EXTRA_BLOCKS
        self.route = PoolRoute(peer.layout, place.pool.layout, place.wants_int8)
        self.meeting = Meeting(place.connect_s, post)
        self._reads_pool = self.route.is_verbatim and bool(self._offer.kind)
        kind = kind_of(place.pool.device) if self.route.is_verbatim else PACKED
        self._reads = Reads(agent, place.pool, self.route, checksum, kind, place.transfer_s)
        self.copies: Copies = self._reads
        self._slots: list[int] = []
        self._turn = 0
        self._fetched: ReadLanding | None = None

    def open(self) -> None:
        offer = self._offer
        if not self._reads_pool and offer.buffer_nbytes < self.route.source.block_nbytes:
            raise LinkError("the prefill instance's buffers are smaller than its blocks")
        self._reads.attach(self._agent.attach(offer.agent, offer.metadata))
        if not self._reads_pool:
            self._slots = self._receive_slots()

    def expect(self, sequence: int, chunk: KVChunk) -> None: ...

    def arrive(self, sequence: int, chunk: KVChunk, timeout_s: float) -> None:
        """Reads a payload into a buffer at this end."""
        self._fetched = self._reads.fetch(self._source(chunk), chunk, timeout_s)

    def receive(self, sequence: int, chunk: KVChunk, into: list[int] | None) -> None:
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            fetched.into = into
            self._reads.land(fetched)
        elif into is None:
            self._skip()
        else:
            self._reads.begin(self._source(chunk), chunk, into)

    def close(self) -> None:
        self._reads.close()

    def _source(self, chunk: KVChunk) -> ReadSource:
        """Checks a header. Returns the location of its payload. Raises TransferFailed, LinkError."""
        piece, offer, layout = chunk.piece, self._offer, self.route.source
        problem = ""
        if not all(is_block(block, self._num_peer_blocks) for block in piece.block_ids):
            problem = "a header names a block outside the prefill instance's pool"
        elif chunk.nbytes != (wanted := self.route.payload_nbytes(piece)):
            problem = f"a header announces {chunk.nbytes} bytes for {wanted}"
        elif chunk.nbytes > (most := min(offer.buffer_nbytes, self._agent.slots.nbytes)):
            problem = f"a header announces {chunk.nbytes} bytes, and buffers have {most}"
        if problem:
            self._skip()
            raise TransferFailed(problem)
        if self._reads_pool:
            return ReadSource(offer.pool, byte_ranges_of(layout, piece, piece.block_ids), offer.kind, offer.device)
        turn, self._turn = self._turn, self._turn + 1
        at = self._slots[turn % NUM_LANE_BUFFERS] * offer.buffer_nbytes
        return ReadSource(offer.buffers, [(at, chunk.nbytes)], HOST, 0, notice_of(offer.lane, turn))

    def _skip(self) -> None:
        """Lets P reuse the buffer of a payload that is not needed. Raises LinkError."""
        if not self._reads_pool:
            turn, self._turn = self._turn, self._turn + 1
            self._reads.notice(notice_of(self._offer.lane, turn))

    def _receive_slots(self) -> list[int]:
        """Waits for P's list of this lane's buffers. Raises LinkError."""
        try:
            value: bytes = self.meeting.store.get(SLOTS)
            slots = msgspec.msgpack.decode(value, type=LaneBuffers)
        except (RuntimeError, msgspec.DecodeError) as error:
            raise LinkError(f"the prefill instance's buffers are unknown: {first_line(error)}", retry=True) from error
        if not all(0 <= slot < self._offer.num_buffers for slot in slots):
            raise LinkError(f"the prefill instance names buffers {slots}, but has {self._offer.num_buffers}")
        return slots


def why_not(name: TransportName, own: Device, peer: TransportOffer | None = None) -> str:
    """See transport_table.Transport."""
    package = BY_NAME[name].package
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed: pip install 'pd-cluster[{name}]'"
    if peer is not None:
        decode_offer(peer, AgentOffer)
    return ""


def ends(name: TransportName, place: LinkContext) -> NixlEnds:
    return NixlEnds(place)


class NixlEnds:
    """Starts one agent for the pool when the first link needs it. All links use this agent."""

    def __init__(self, place: LinkContext) -> None:
        self._place = place
        self._agent: Agent | None = None

    def sender(self, checksum: Checksum, post: PostKey) -> KVSender:
        return NixlSender(self._started(), self._place, checksum, post)

    def receiver(self, peer: Peer, checksum: Checksum, post: PostKey) -> KVReceiver:
        return NixlReceiver(self._started(), self._place, peer, checksum, post)

    def _started(self) -> Agent:
        """Raises LinkError."""
        if self._agent is None:
            pool = self._place.pool
            is_pinned = pool.device.is_accelerator and pool.memory.device.type != "cpu"
            slots = ReadBuffers(max(MAX_PAYLOAD_NBYTES, pool.layout.block_nbytes), is_pinned)
            parts = pool.memory.parts if kind_of(pool.device) else []
            self._agent = Agent(self._place.bind_host, parts, slots)
        return self._agent
