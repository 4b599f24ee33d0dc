"""The decode instance's end in `kv`: credits every offer at once, and confirms what has landed."""

from __future__ import annotations

import torch

from benchmarks.kv.kv_messages import Answer, Gloo, Lane, LastTransfer, MakePool, Memcpy, OpenGloo, OpenLane
from benchmarks.peers.kv_floors import FreeBlocks, GlooPeer, make_pool, memcpy
from pd_cluster import wire
from pd_cluster.devices.device import resolve, use
from pd_cluster.devices.device_streams import poll
from pd_cluster.engine.handover.engine_events import Event, Mail
from pd_cluster.engine.link_probe.probe_links import ReceivingEnd
from pd_cluster.engine.link_probe.probe_messages import Listen
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_pool import KVPool

SETTLE_S = 5.0


class ReceiveLane(ReceivingEnd):
    """One link, each of whose transfers lands in different blocks."""

    def __init__(self, lane: Lane, pool: KVPool, free: FreeBlocks) -> None:
        self._free = free
        self._tables: dict[str, list[int]] = {}  # transfer -> blocks
        self._last_blocks: list[int] = []
        super().__init__(lane.begin("decode"), Listen(lane.secret), pool, lane.options)

    def last_blocks(self) -> list[int]:
        """Waits until this end, too, has noted all confirmations. Raises TimeoutError, LinkError."""
        if not poll(lambda: bool(self._error) or not self._tables, SETTLE_S):
            raise TimeoutError(f"{len(self._tables)} transfers were not confirmed")
        if self._error:
            raise LinkError(self._error)
        return self._last_blocks

    def _take(self, event: Event) -> None:
        match event:
            case Mail(conn, _, wire.Offer(transfer_id, num_tokens)):
                blocks = self._tables[transfer_id] = self._free.take(num_tokens // self._pool.layout.block_size)
                self._conns[transfer_id] = conn
                self._lanes.begin(conn, transfer_id, [blocks], [0], num_tokens)
                self._lanes.send(conn, wire.Credit(transfer_id, [0]))
            case Mail(_, _, wire.Confirmed(transfer_id, held)):
                self._last_blocks = self._tables[transfer_id]
                self._free.release(self._last_blocks)
                self._error = "" if held else "a transfer's blocks were no longer held"
                del self._conns[transfer_id], self._tables[transfer_id]  # last, because `last_blocks` waits for it
            case _:
                super()._take(event)


class Peer:
    """The receiver. Each received block of its pool contains the number of the sender's block."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._lanes: dict[str, ReceiveLane] = {}

    def make_pool(self, command: MakePool) -> Answer:
        device = resolve(command.device)
        use(device)
        self.pool = make_pool(command.num_blocks, False, device)
        if not device.is_accelerator:
            self._source = make_pool(command.num_blocks, of_numbers=True)  # the source of memcpy
        self._copied = (FreeBlocks(command.num_blocks, 1), FreeBlocks(command.num_blocks, 2))
        self._gloo = GlooPeer(self.pool, 1)
        return Answer()

    def open_lane(self, command: OpenLane) -> Answer:
        lane = self._lanes[command.lane.name] = ReceiveLane(
            command.lane, self.pool, FreeBlocks(self.pool.num_blocks, 2)
        )
        return Answer(port=lane.port, epoch=lane.epoch)

    def last_transfer(self, command: LastTransfer) -> Answer:
        blocks = self.pool.flat()[self._lanes[command.lane].last_blocks()].view(torch.int16)
        same = blocks.amin(1) == blocks.amax(1)
        numbers = torch.where(same, blocks[:, 0], -1).tolist()
        return Answer(blocks=numbers)

    def memcpy(self, command: Memcpy) -> Answer:
        return memcpy(self._source, self.pool, self._copied, command.move)

    def open_gloo(self, command: OpenGloo) -> Answer:
        return self._gloo.open(command)

    def gloo(self, command: Gloo) -> Answer:
        return self._gloo.move(command)
