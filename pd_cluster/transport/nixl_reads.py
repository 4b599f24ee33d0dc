"""Tracks the reads of one lane over NIXL until their bytes are in place. Knows nothing of links or headers.

Only the lane's thread uses this.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

import msgspec

from pd_cluster.devices.device_streams import REACHED, Marker, poll
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.transport.link_copies import Copies
from pd_cluster.transport.nixl_agent import Agent, Ranges, Read, ReadState, RemoteAgent, ranges_at
from pd_cluster.transport.nixl_offer import DEVICE, ByteRanges, byte_ranges_of, cut
from pd_cluster.transport.staging import Staging
from pd_cluster.transport.transport_interface import Checksum
from pd_cluster.wire import KVChunk

NUM_UNDER_WAY = 4  # concurrent reads into the pool; reads into buffers run one at a time


@dataclass(frozen=True, slots=True)
class ReadSource:
    """The location of a payload at P. P gets `notice` when it has been read; b"": P does not wait for that."""

    base: int
    places: ByteRanges
    kind: str
    device: int
    notice: bytes = b""


@dataclass(eq=False, slots=True)
class ReadLanding:
    """A payload that is read into blocks of the pool, directly or through a buffer. `into` None: only into a buffer."""

    read: Read
    chunk: KVChunk
    into: list[int] | None
    slot: int | None


class Reads(Copies):
    """The copies of a lane, with the reads that precede them. Both are settled and drained together."""

    def __init__(
        self, agent: Agent, pool: KVPool, route: PoolRoute, checksum: Checksum, kind: str, settle_s: float
    ) -> None:
        """`kind`: NIXL's kind of memory of the pool, if reads write to the pool; "": they write to buffers."""
        super().__init__(pool.device, settle_s)
        self._agent, self._pool, self._route, self._checksum = agent, pool, route, checksum
        self._kind = kind
        self._device = pool.device.index if kind == DEVICE else 0
        self._staging = Staging(pool, route, self, in_host_memory=True)
        self._peer: RemoteAgent | None = None
        self._under_way: deque[ReadLanding] = deque()
        self._is_free: Marker = REACHED
        self._error: LinkError | None = None

    def attach(self, peer: RemoteAgent) -> None:
        self._peer = peer
        self._staging.warm()

    def after(self, marker: Marker) -> None:
        super().after(marker)
        self._is_free = marker

    def begin(self, source: ReadSource, chunk: KVChunk, into: list[int]) -> None:
        """Begins to read a payload into these blocks. Raises LinkError."""
        if not self._kind:
            self._finish_all_but(0)
            self._under_way.append(self._into_buffer(source, chunk, into))
            return
        self._finish_all_but(NUM_UNDER_WAY - 1)
        if not self._is_free.wait(self._settle_s):
            raise LinkError(f"the device still uses blocks for KV cache after {self._settle_s:g} s", retry=True)
        super().settle()  # reads are not ordered after the work of any stream
        target = byte_ranges_of(self._route.target, chunk.piece, into)
        remote, local = cut(source.places, target)
        own = self._pool.memory.parts[0].data_ptr()
        read = self._read(source, remote, ranges_at(own, local, self._kind, self._device))
        self._under_way.append(ReadLanding(read, chunk, into, None))

    def fetch(self, source: ReadSource, chunk: KVChunk, timeout_s: float) -> ReadLanding:
        """Reads a payload into a buffer, and waits for it. Raises LinkError."""
        landing = self._into_buffer(source, chunk, None)
        self._under_way.append(landing)  # so that `drain` covers it if it takes too long
        self._wait(landing, timeout_s)
        self._under_way.remove(landing)
        return landing

    def land(self, landing: ReadLanding) -> None:
        """Checks a payload that has been read, and copies it from its buffer to its blocks. Raises LinkError."""
        try:
            if landing.into is not None:
                self._check_and_copy(landing, landing.into)
        finally:
            if landing.slot is not None:
                self._agent.slots.release(landing.slot)

    def settle(self) -> None:
        """Waits until all payloads are in their blocks, within the time limit. Raises LinkError."""
        self._finish_all_but(0)
        super().settle()

    def drain(self) -> None:
        """Waits, without a time limit, until no read or copy can write any more."""
        while self._under_way:
            landing = self._under_way[0]
            poll(partial(self._is_over, landing.read), float("inf"))
            self._under_way.popleft()
            try:
                if landing.read.state is ReadState.FAILED:
                    landing.into = None
                    self._error = self._error or _failed()
                self.land(landing)
            except LinkError as error:
                self._error = self._error or error
        super().drain()

    def notice(self, notice: bytes) -> None:
        """Notifies P that a payload is not needed. Raises LinkError."""
        assert self._peer is not None
        self._agent.notice(self._peer, notice)

    def close(self) -> None:
        self.drain()
        if self._peer is not None:
            self._agent.detach(self._peer)
            self._peer = None

    # ---- internal

    def _into_buffer(self, source: ReadSource, chunk: KVChunk, into: list[int] | None) -> ReadLanding:
        slots = self._agent.slots
        slot = slots.take(self._settle_s)
        remote, local = cut(source.places, [(0, chunk.nbytes)])
        try:
            read = self._read(source, remote, slots.ranges(slot, local))
        except LinkError:  # the read did not begin
            slots.release(slot)
            raise
        return ReadLanding(read, chunk, into, slot)

    def _read(self, source: ReadSource, remote: ByteRanges, local: Ranges) -> Read:
        if self._error is not None:
            raise self._error
        assert self._peer is not None
        return self._agent.read(
            self._peer, ranges_at(source.base, remote, source.kind, source.device), local, source.notice
        )

    def _finish_all_but(self, most: int) -> None:
        if self._error is not None:
            raise self._error
        while len(self._under_way) > most:
            self._wait(self._under_way[0], self._settle_s)
            self.land(self._under_way.popleft())

    def _wait(self, landing: ReadLanding, timeout_s: float) -> None:
        if not poll(lambda: self._agent.look_at(landing.read) is not ReadState.UNDER_WAY, timeout_s):
            raise LinkError(f"the prefill instance's KV cache was not read within {timeout_s:g} s", retry=True)
        if landing.read.state is ReadState.FAILED:
            raise _failed()

    def _is_over(self, read: Read) -> bool:
        self._agent.look_at(read)
        return read.is_over

    def _check_and_copy(self, landing: ReadLanding, into: list[int]) -> None:
        chunk = landing.chunk
        if landing.slot is not None:
            payload = self._agent.slots.buffers[landing.slot][: chunk.nbytes]
            self._check(chunk, payload)
            self._staging.unpack(payload, chunk.piece, into)
        elif self._checksum.is_on and chunk.checksum:
            here = msgspec.structs.replace(chunk.piece, block_ids=into)
            self._check(chunk, *self._pool.memory.contiguous_parts(here))

    def _check(self, chunk: KVChunk, *parts: object) -> None:
        if self._checksum.is_on and chunk.checksum and self._checksum.of(*parts) != chunk.checksum:  # type: ignore[arg-type]
            raise LinkError("checksum of a KV chunk is wrong", retry=True)


def _failed() -> LinkError:
    return LinkError("reading the prefill instance's KV cache failed", retry=True)
