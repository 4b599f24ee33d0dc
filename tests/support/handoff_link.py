"""A link between two engines of handoff_engine.py: P's sending threads, frames in transit, D's threads.

A lane carries one group of layers. Sealer, Opener, Lander and LaneBarrier are production code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from pd_cluster import wire
from pd_cluster.devices.device import CPU
from pd_cluster.engine.handover.links.lane_barrier import LaneBarrier
from pd_cluster.engine.handover.shipping import ShipLimits
from pd_cluster.errors import LinkError
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.transport.landing import Geometry, Lander
from pd_cluster.transport.link_copies import Copies
from pd_cluster.transport.link_events import Arrived, Drained, Landed, LandFault, LinkEvent
from pd_cluster.transport.link_frames import LinkKey, Opener, Sealer
from tests.support.handoff_engine import Memory


class LateCopies(Copies):
    """Runs copies only when the host waits for them, as on a device."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._late: deque[Callable[[], None]] = deque()

    def add(self, copy: Callable[[], None]) -> None:
        self._late.append(copy)

    def settle(self) -> None:
        while self._late:
            self._late.popleft()()

    drain = settle


class LinkLane:
    """Both ends of one lane, and its frames in transit."""

    name: wire.TransportName = "local"

    def __init__(self, key: LinkKey, source: Memory, target: Memory, one_sided: bool, is_late: bool) -> None:
        self.source, self.target, self.one_sided = source, target, one_sided
        self.sealer, self.opener = Sealer(key), Opener(key)
        self.jobs: deque[Callable[[], wire.KVHeader | None]] = deque()
        self.frames: deque[wire.KVFrame | str] = deque()  # input of D's thread: frames, or transfers to forget
        self.opened: set[int] = set()
        self.copied: list[str] = []  # transfer of each pending copy
        self.payloads: dict[int, list[list[int]]] = {}  # two-sided transports: the blocks' content when sent
        self.num_sent: dict[str, int] = {}  # transfer -> number of tokens sent, summed over layers
        self.copies = LateCopies()
        self._is_late = is_late  # as if the pools were on devices
        self.route = PoolRoute(source.layout, target.layout)
        self.geometry = Geometry.of(source.layout, target.layout)
        self.lander = Lander(self, self.geometry, clear=self._clear if self.route.precision else None)

    def open(self) -> None: ...
    def expect(self, sequence: int, chunk: wire.KVChunk) -> None: ...
    def close(self) -> None: ...

    def send(self) -> wire.KVFrame | None:
        """Runs the next job of P's thread; returns its frame, if any."""
        header = self.jobs.popleft()()
        if header is None:
            return None
        frame = self.sealer.seal(header)
        if isinstance(header, wire.KVChunk):
            piece = header.piece
            sent = self.num_sent.get(header.transfer_id, 0)
            self.num_sent[header.transfer_id] = sent + piece.num_tokens * piece.num_layers
            if not self.one_sided:
                self.payloads[frame.sequence] = self.source.read(piece)
        return frame

    def receive(self, sequence: int, chunk: wire.KVChunk, into: list[int] | None) -> None:
        payload = None if self.one_sided else self.payloads.pop(sequence)
        if into is None:
            return
        self.copied.append(chunk.transfer_id)
        self.copies.add(partial(self._copy, chunk, into, payload))
        if not self._is_late:
            self.copies.settle()

    def _clear(self, blocks: list[int]) -> None:
        self.copies.add(partial(self.target.clear, blocks, self.geometry.num_layers))
        if not self._is_late:
            self.copies.settle()

    def _copy(self, chunk: wire.KVChunk, into: list[int], payload: list[list[int]] | None) -> None:
        self.copied.remove(chunk.transfer_id)
        self.target.write(chunk.piece, into, self.source.read(chunk.piece) if payload is None else payload)

    def land(self, works: bool) -> LinkEvent | str | None:
        """Processes the next item of D's thread; returns an event, or a string with the reason for a link failure."""
        item = self.frames.popleft()
        if isinstance(item, str):
            drained = self.lander.forget(item)
            assert drained is None or item not in self.copied, f"{item} is written after its end"
            return drained
        if not works:
            return None
        try:
            header = self.opener.open(item)
            assert not isinstance(header, wire.KVProbe)
            if header is None:
                return None
            assert item.sequence not in self.opened, f"frame {item.sequence} was opened twice"
            self.opened.add(item.sequence)
            return self.lander.land(item.sequence, header)
        except LinkError as error:
            return str(error)


class Link:
    """All lanes of one connection, one for each group of layers. Refers to both sides' memories."""

    def __init__(
        self, conn: str, sources: Sequence[Memory], targets: Sequence[Memory], one_sided: bool, is_late: bool
    ) -> None:
        self.conn = conn
        self.lanes = [
            LinkLane(LinkKey.derive(b"secret", conn, "p", "d", lane=at), *pair, one_sided, is_late)
            for at, pair in enumerate(zip(sources, targets, strict=True))
        ]
        self.live: set[str] = set()
        self.seen: list[wire.KVFrame] = []
        self.works = True
        self._gather = LaneBarrier(len(self.lanes))

    @property
    def precision(self) -> str:
        return self.lanes[0].route.precision

    def limits(self, group: int, max_payload_nbytes: int) -> ShipLimits:
        geometry = self.lanes[group].geometry
        return ShipLimits(geometry.target_block_size, max_payload_nbytes, geometry.num_layers)

    def begin(
        self, transfer_id: str, tables: Sequence[list[int]], first_tokens: Sequence[int], num_tokens: int
    ) -> None:
        """Begins a transfer in every lane, as InLanes does."""
        for lane, table, first_token in zip(self.lanes, tables, first_tokens, strict=True):
            num_wanted = 1 if lane.target.layout.holds.is_state else num_tokens
            lane.lander.begin(
                transfer_id, table[: lane.target.layout.num_blocks_for(num_wanted)], first_token, num_wanted
            )

    def put(self, frame: wire.KVFrame) -> None:
        """Delivers a frame to D's end of its lane."""
        self.lanes[frame.lane].frames.append(frame)

    def forget(self, transfer_id: str) -> None:
        for lane in self.lanes:
            lane.frames.append(transfer_id)

    def land(self, lane: LinkLane) -> Arrived | Landed | LandFault | Drained | str | None:
        """Processes this lane's next item at D; returns the link's event, or the reason why the link fails."""
        event = lane.land(self.works)
        if isinstance(event, str):
            self.works = False
            return event
        return None if event is None else self._gather.add(self.lanes.index(lane), event)  # type: ignore[return-value]
