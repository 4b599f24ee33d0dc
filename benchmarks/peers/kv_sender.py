"""The prefill instance's end in `kv`, with the worker's exports. Credited prompts count as computed."""

from __future__ import annotations

import time

import torch

from benchmarks.kv.kv_messages import NAMES, Answer, Gloo, Handover, Lane, MakePool, Move, OpenGloo, OpenLane
from benchmarks.peers.kv_floors import FreeBlocks, GlooPeer, make_pool
from pd_cluster import wire
from pd_cluster.devices.device import resolve, use
from pd_cluster.engine.handover.engine_events import Event, HandedOver, Mail
from pd_cluster.engine.handover.exports import Exports
from pd_cluster.engine.handover.shipping import ShipSizes
from pd_cluster.engine.handover.transfer_terms import TransferTerms
from pd_cluster.engine.link_probe.probe_links import LAYOUT, TIMEOUTS, SendingEnd
from pd_cluster.engine.link_probe.probe_messages import Send
from pd_cluster.errors import LinkError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.types import Request, RequestSpec, Sampling, TokenOutput, note_nothing


class SendLane(SendingEnd):
    """One link. Calls that wait also process its events."""

    def __init__(self, lane: Lane, pool: KVPool, free: FreeBlocks) -> None:
        send = Send(lane.secret, NAMES["decode"], lane.port, lane.epoch, 0)
        super().__init__(lane.begin("prefill"), send, pool, lane.options)
        terms, sizes = TransferTerms(time.monotonic, TIMEOUTS), ShipSizes.of([LAYOUT])
        self._exports = Exports(self._table, self, terms, sizes)
        self._free = free
        self._requests: dict[str, Request] = {}
        self._credited: list[Request] = []
        self._num_offered = self._num_done = 0
        self.last_blocks: list[int] = []
        self.ships_s: list[float] = []
        self.confirms_s: list[float] = []
        self.link(send)
        if self.transport != lane.transport:
            raise LinkError(f"the link uses {self.transport}")

    def move(self, move: Move) -> float:
        """Returns the seconds from the first shipment to the last confirmation."""
        self.ships_s, self.confirms_s = [], []
        self._num_offered = self._num_done = 0
        for _ in range(min(move.count, move.num_under_way)):
            self._offer(move)
        self._wait(lambda: len(self._credited) == self._num_offered, self._take, "the credits")
        while self._num_done < move.count:
            for request in self._credited:
                self._ship(request)
            self._credited = []
            done = self._num_done
            self._wait(lambda done=done: bool(self._credited) or self._num_done > done, self._take, "a transfer")  # type: ignore[misc]
            while self._num_offered < min(move.count, self._num_done + move.num_under_way):
                self._offer(move)
        return self.confirms_s[-1] - self.ships_s[0]

    def _offer(self, move: Move) -> None:
        transfer_id = f"t{time.monotonic_ns():x}"
        request = Request(transfer_id, RequestSpec([0] * (move.num_blocks * LAYOUT.block_size), Sampling(max_tokens=2)))
        request.leg, request.transfer_id, request.peer = "prefill", transfer_id, self._peer
        request.tables[0] = self._free.take(move.num_blocks)
        self._requests[transfer_id] = request
        self._num_offered += 1
        self._exports.admitted(request)

    def _ship(self, request: Request) -> None:
        self.ships_s.append(time.monotonic())
        self._exports.computed(request, [TokenOutput(request.request_id, 0, 0, 0, 1)])

    def urgent(self, conn: str, body: wire.Body) -> bool:
        """Handles confirmations on the mailbox's thread, as Handover.intercept does."""
        if not isinstance(body, wire.Confirm):
            return super().urgent(conn, body)
        held = self._exports.held.answer(conn, body, self.mailbox.send, note_nothing)
        self.confirms_s.append(time.monotonic())
        if held:
            self.events.put(HandedOver(conn, body.transfer_id, time.monotonic()))
        return True

    def _take(self, event: Event) -> None:
        match event:
            case Mail(conn, _, wire.Credit() as body):
                self._exports.on_credit(conn, body)
                self._credited.append(self._requests[body.transfer_id])
            case HandedOver(conn, transfer_id):
                self._exports.on_handed_over(conn, transfer_id)
            case _:
                super()._take(event)

    def export_ended(self, request: Request, error: str | None) -> None:
        if error is not None:
            raise LinkError(error)
        del self._requests[request.transfer_id]
        self.last_blocks = request.tables[0]
        self._free.release(request.tables[0])
        self._num_done += 1


class Peer:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._lanes: dict[str, SendLane] = {}

    def make_pool(self, command: MakePool) -> Answer:
        device = resolve(command.device)
        use(device)
        self._pool = make_pool(command.num_blocks, True, device)
        self._gloo = GlooPeer(self._pool, 0)
        return Answer()

    def open_lane(self, command: OpenLane) -> Answer:
        free = FreeBlocks(self._pool.num_blocks, 1)
        self._lanes[command.lane.name] = SendLane(command.lane, self._pool, free)
        return Answer()

    def handover(self, command: Handover) -> Answer:
        lane = self._lanes[command.lane]
        took_s = lane.move(command.move)
        return Answer(took_s=took_s, ships_s=lane.ships_s, confirms_s=lane.confirms_s, blocks=lane.last_blocks)

    def open_gloo(self, command: OpenGloo) -> Answer:
        return self._gloo.open(command)

    def gloo(self, command: Gloo) -> Answer:
        return self._gloo.move(command)
