"""P's end in `kv`: the worker's links, threads and exports; a prompt counts as computed once it is credited."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import torch

from benchmarks.kv.spec import (
    Answer,
    Gloo,
    Handover,
    Lane,
    LastTransfer,
    MakePool,
    Move,
    OpenGloo,
    OpenLane,
    serve_commands,
)
from benchmarks.peers.kv_floors import GlooPeer
from benchmarks.peers.kv_lane import HOST, LAYOUT, NAMES, TIMEOUTS, FreeBlocks, LaneEnd, make_pool
from pd_cluster import wire
from pd_cluster.devices.device import resolve, use
from pd_cluster.engine.handover.events import ConnClosed, ConnOpened, Event, HandedOver, Mail, StopEngine
from pd_cluster.engine.handover.exports import Exports
from pd_cluster.engine.handover.links import PeerProgress
from pd_cluster.engine.handover.out_links import OutLinks
from pd_cluster.engine.start.process import die_with_parent
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.errors import LinkError
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.pool import KVPool
from pd_cluster.net.admission import peer_key
from pd_cluster.transport.events import LinkFailed
from pd_cluster.types import LinkState, Order, Request, Sampling, TokenOutput, note_nothing
from ranktable_tools.public_keys import public_key

DEADLINE_S = 60.0


class SendLane:
    """One link. Waiting calls read its events."""

    def __init__(self, lane: Lane, pool: KVPool, free: FreeBlocks) -> None:
        self._peer = peer_key(NAMES["decode"], lane.epoch)
        self._end = LaneEnd(lane, "prefill", pool, self._confirm)
        self._links = OutLinks(
            self._end.side,
            self._end.mailbox,
            self._end.lanes,
            self._end.inbox.put,
            self._on_down,
            PeerProgress(time.monotonic),
            time.monotonic,
            TIMEOUTS,
        )
        scheduler = StepScheduler(BlockPool(pool.num_blocks), LAYOUT.block_size, 1, 1)  # only its block size is used
        self._exports = Exports(
            scheduler, self._links, self._ended, time.monotonic, TIMEOUTS, LAYOUT.num_layers, LAYOUT.block_nbytes
        )
        self._free = free
        self._requests: dict[str, Request] = {}
        self._credited: list[Request] = []
        self._num_offered = self._num_done = 0
        self.last_blocks: list[int] = []
        self.ships_s: list[float] = []
        self.confirms_s: list[float] = []
        self._end.mailbox.start(self._end)
        info = wire.PeerInfo(
            name=NAMES["decode"],
            epoch=lane.epoch,
            role="decode",
            host=HOST,
            control_port=lane.port,
            public_key=public_key(lane.key_of("decode")),
        )
        self._links.set_peers([info])
        self._wait(lambda: self._links.link_to(self._peer) is not None)
        if (state := self._links.states()[self._peer]) != LinkState("up", (lane.transport,)):
            raise LinkError(f"the link is {state}")

    def move(self, move: Move) -> float:
        """Returns the seconds from the first ship to the last confirmation."""
        self.ships_s, self.confirms_s = [], []
        self._num_offered = self._num_done = 0
        for _ in range(min(move.count, move.num_under_way)):
            self._offer(move)
        self._wait(lambda: len(self._credited) == self._num_offered)
        while self._num_done < move.count:
            for request in self._credited:
                self._ship(request)
            self._credited = []
            done = self._num_done
            self._wait(lambda done=done: bool(self._credited) or self._num_done > done)  # type: ignore[misc]
            while self._num_offered < min(move.count, self._num_done + move.num_under_way):
                self._offer(move)
        return self.confirms_s[-1] - self.ships_s[0]

    def _offer(self, move: Move) -> None:
        transfer_id = f"t{time.monotonic_ns():x}"
        request = Request(transfer_id, Order([0] * (move.num_blocks * LAYOUT.block_size), Sampling(max_tokens=2)))
        request.leg, request.transfer_id, request.peer = "prefill", transfer_id, self._peer
        request.block_table = self._free.take(move.num_blocks)
        self._requests[transfer_id] = request
        self._num_offered += 1
        self._exports.admitted(request)

    def _ship(self, request: Request) -> None:
        self.ships_s.append(time.monotonic())
        self._exports.computed(request, [TokenOutput(request.request_id, 0, 0, 0, 1)])

    def _confirm(self, conn: str, body: wire.Body) -> bool:
        """Confirms on the mailbox's thread, as in engine/mail.py."""
        if isinstance(body, wire.LinkValue):
            self._links.meet(conn, body)
            return True
        if not isinstance(body, wire.Confirm):
            return False
        held = self._exports.held.answer(conn, body, self._end.mailbox.send, note_nothing)
        self.confirms_s.append(time.monotonic())
        if held:
            self._end.inbox.put(HandedOver(conn, body.transfer_id))
        return True

    def _wait(self, done: Callable[[], bool]) -> None:
        """Waits. Raises LinkError if something fails or the deadline is over."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not done():
            try:
                event = self._end.inbox.get(timeout=max(0.001, deadline_s - time.monotonic()))
            except queue.Empty:
                raise LinkError(f"not done within {DEADLINE_S:g} s: {self._links.states()}") from None
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        match event:
            case ConnOpened(conn):
                self._links.on_opened(conn)
            case Mail(conn, _, wire.LinkAnswer() as body):
                self._links.on_answer(conn, body)
            case Mail(conn, _, wire.LinkReady() as body):
                self._links.on_ready(conn, body)
            case Mail(conn, _, wire.Credit() as body):
                self._exports.on_credit(conn, body)
                self._credited.append(self._requests[body.transfer_id])
            case HandedOver(conn, transfer_id):
                self._exports.on_handed_over(conn, transfer_id)
            case Mail(_, _, wire.LinkRefused(_, reason)) | LinkFailed(_, reason) | ConnClosed(_, _, reason):
                raise LinkError(reason)
            case StopEngine(error):
                raise LinkError(str(error))
            case _:
                pass

    def _ended(self, request: Request, error: str | None) -> None:
        if error is not None:
            raise LinkError(error)
        del self._requests[request.transfer_id]
        self.last_blocks = request.block_table
        self._free.release(request.block_table)
        self._num_done += 1

    def _on_down(self, conn: str, reason: str) -> None:
        raise LinkError(reason)


class Sender:
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
        return Answer(took_s=took_s, ships_s=lane.ships_s, confirms_s=lane.confirms_s)

    def last_transfer(self, command: LastTransfer) -> Answer:
        return Answer(blocks=self._lanes[command.lane].last_blocks)

    def open_gloo(self, command: OpenGloo) -> Answer:
        return self._gloo.open(command)

    def gloo(self, command: Gloo) -> Answer:
        return self._gloo.move(command)


if __name__ == "__main__":
    die_with_parent()
    serve_commands(Sender())
