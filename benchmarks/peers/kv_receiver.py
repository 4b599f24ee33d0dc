"""D's end in `kv`: the worker's links and threads; every offer is credited at once, every landing confirmed."""

from __future__ import annotations

import threading
import time

import torch

from benchmarks.kv.spec import (
    Answer,
    Gloo,
    Lane,
    LastTransfer,
    MakePool,
    Memcpy,
    OpenGloo,
    OpenLane,
    serve_commands,
)
from benchmarks.peers.kv_floors import GlooPeer, memcpy
from benchmarks.peers.kv_lane import FreeBlocks, LaneEnd, make_pool
from pd_cluster import wire
from pd_cluster.devices.device import resolve, use
from pd_cluster.engine.handover.events import ConnClosed, Event, Mail, StopEngine
from pd_cluster.engine.handover.in_links import InLinks
from pd_cluster.engine.handover.links import PeerProgress
from pd_cluster.engine.start.process import die_with_parent
from pd_cluster.kv.pool import KVPool
from pd_cluster.transport.events import LandFault, LinkFailed

SETTLE_S = 5.0


class ReceiveLane:
    """One link, with a thread in the engine's place."""

    def __init__(self, lane: Lane, pool: KVPool, free: FreeBlocks) -> None:
        self._end = LaneEnd(lane, "decode", pool, self._route)
        self._links = InLinks(
            self._end.side,
            self._end.mailbox,
            self._end.lanes,
            self._end.inbox.put,
            lambda conn, reason: None,
            PeerProgress(time.monotonic),
        )
        self._pool, self._free = pool, free
        self._tables: dict[str, tuple[str, list[int]]] = {}  # transfer -> connection, blocks
        self.last_blocks: list[int] = []
        self.error = ""
        self._settled = threading.Condition()
        self.port, self.epoch = self._end.port, self._end.epoch
        self._end.mailbox.start(self._end)
        threading.Thread(target=self._run, name=f"lane {lane.name}", daemon=True).start()

    def _route(self, conn: str, body: wire.Body) -> bool:
        match body:
            case wire.KVFrame():
                self._links.route(conn, body)
            case wire.LinkValue():
                self._links.meet(conn, body)
            case _:
                return False
        return True

    def _run(self) -> None:
        while not self.error:
            event = self._end.inbox.get()
            with self._settled:
                try:
                    self._on_event(event)
                except ValueError as error:
                    self.error = str(error)
                self._settled.notify_all()

    def settle(self) -> None:
        """Waits until this end, too, knows that everything was confirmed. Raises TimeoutError."""
        with self._settled:
            if not self._settled.wait_for(lambda: bool(self.error) or not self._tables, SETTLE_S):
                raise TimeoutError(f"{len(self._tables)} transfers were not confirmed")

    def _on_event(self, event: Event) -> None:
        match event:
            case Mail(conn, peer, wire.LinkOpen() as opened):
                self._links.on_open(conn, peer, opened, is_told=True)
            case Mail(conn, _, wire.Offer(transfer_id, num_tokens)):
                blocks = self._free.take(num_tokens // self._pool.layout.block_size)
                self._tables[transfer_id] = (conn, blocks)
                self._links.begin(conn, transfer_id, blocks, 0, num_tokens)
                self._links.send(conn, wire.Credit(transfer_id))
            case Mail(_, _, wire.Confirmed(transfer_id, held)):
                _, self.last_blocks = self._tables.pop(transfer_id)
                self._free.release(self.last_blocks)
                self.error = "" if held else "a transfer was not held any more"
            case LandFault(_, reason) | LinkFailed(_, reason) | ConnClosed(_, _, reason):
                self.error = reason
            case StopEngine(error):
                self.error = str(error)
            case _:
                pass


class Receiver:
    """Its pool has a number in every received block: that of the sender's block."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._lanes: dict[str, ReceiveLane] = {}

    def make_pool(self, command: MakePool) -> Answer:
        device = resolve(command.device)
        use(device)
        self.pool = make_pool(command.num_blocks, False, device)
        if not device.is_accelerator:
            self._source = make_pool(command.num_blocks, of_numbers=True)  # of memcpy
        self._copied = (FreeBlocks(command.num_blocks, 1), FreeBlocks(command.num_blocks, 2))
        self._gloo = GlooPeer(self.pool, 1)
        return Answer()

    def open_lane(self, command: OpenLane) -> Answer:
        lane = self._lanes[command.lane.name] = ReceiveLane(
            command.lane, self.pool, FreeBlocks(self.pool.num_blocks, 2)
        )
        return Answer(port=lane.port, epoch=lane.epoch)

    def last_transfer(self, command: LastTransfer) -> Answer:
        lane = self._lanes[command.lane]
        lane.settle()
        blocks = self.pool.flat()[lane.last_blocks].view(torch.int16)
        same = blocks.amin(1) == blocks.amax(1)
        numbers = torch.where(same, blocks[:, 0], -1).tolist()
        return Answer(blocks=numbers, error=lane.error)

    def memcpy(self, command: Memcpy) -> Answer:
        return memcpy(self._source, self.pool, self._copied, command.move)

    def open_gloo(self, command: OpenGloo) -> Answer:
        return self._gloo.open(command)

    def gloo(self, command: Gloo) -> Answer:
        return self._gloo.move(command)


if __name__ == "__main__":
    die_with_parent()
    serve_commands(Receiver())
