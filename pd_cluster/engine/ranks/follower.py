"""A rank other than 0: executes rank 0's plans and holds the ends of lanes on its device. Read `run` first.

A follower accepts messages only from rank 0. The channel's thread only queues work: steps for the computing thread, and
calls for the lanes' threads.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from pd_cluster import wire
from pd_cluster.engine.handover.links.link_ends import LinkName, LocalLanes, ReceiveEnd, SendEnd
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.lane_calls import RECEIVE_CALLS, SEND_CALLS, LaneCalls
from pd_cluster.engine.ranks.lead_runner import ALL_LAYERS
from pd_cluster.engine.ranks.rank_adapters import load_share
from pd_cluster.engine.ranks.rank_channel import Channel
from pd_cluster.errors import LinkError
from pd_cluster.model.inputs.image_rows import ImagePart
from pd_cluster.model.inputs.step_input import KEEP_COLUMNS, NUM_COLUMNS, GroupTables, Ints, StepInput
from pd_cluster.model.inputs.virtual_token_rows import NUM_COLUMNS as VIRTUAL_COLUMNS
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.transport.link_events import Drained, LinkEvent, LinkFailed
from pd_cluster.types import note_nothing

log = logging.getLogger(__name__)

COUNT_INTERVAL_S = 0.2  # between reports to rank 0 of the bytes that the lanes have moved

At = tuple[str, int]  # connection and lane
OfSteps = (
    to.Step | to.TakePart | to.Moves | to.TierCommands | to.DropAdapter | to.Rest | to.LoadWeights
)  # the computing thread processes these in order


class ProgressQueue:
    """Runs jobs in order, each once the steps have made the progress that it waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reached = to.Reached(0, ALL_LAYERS)
        self._jobs: deque[tuple[to.Reached, Callable[[], None]]] = deque()

    def add(self, after: to.Reached, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.append((after, job))
            self._run()

    def reached(self, progress: to.Reached) -> None:
        with self._lock:
            self._reached = progress
            self._run()

    def _run(self) -> None:
        while self._jobs and self._jobs[0][0] <= self._reached:
            self._jobs.popleft()[1]()


class _HeldEnd(NamedTuple):
    end: SendEnd | ReceiveEnd
    calls: LaneCalls
    gate: ProgressQueue
    moved: Callable[[], tuple[int, int]]  # total bytes, and dropped frames


class LaneHost:
    """This rank's ends of lanes. `send` sends a message to rank 0.

    Sending ends and receiving ends have separate queues of jobs that wait for steps.
    """

    def __init__(self, lanes: LocalLanes, send: Callable[[to.RankMessage], None]) -> None:
        self._lanes = lanes
        self._send = send
        self._sending, self._receiving = ProgressQueue(), ProgressQueue()
        self._held: dict[At, _HeldEnd] = {}
        self._counted: dict[At, tuple[int, int]] = {}

    def handle(self, message: to.ToLanes) -> None:
        """Handles a message from rank 0. Runs on the channel's thread."""
        at = message.conn, message.lane
        if isinstance(message, to.Call):
            self._call(at, message)
            return
        try:
            if isinstance(message, to.OpenSend):
                self._open_send(at, message)
            else:
                self._open_receive(at, message)
        except LinkError as error:
            self._report(at, LinkFailed(message.conn, str(error)))

    def reached(self, progress: to.Reached) -> None:
        """Runs jobs that waited for this progress. Called on the computing thread."""
        self._sending.reached(progress)
        self._receiving.reached(progress)

    def count(self) -> None:
        """Reports bytes moved and frames dropped since the last call."""
        for at, held in list(self._held.items()):
            if (moved := held.moved()) != self._counted.get(at, (0, 0)):
                self._counted[at] = moved
                self._send(to.Counted(*at, *moved))

    def _report(self, at: At, event: LinkEvent) -> None:
        self._send(to.Reported(*at, event))

    def _open_send(self, at: At, message: to.OpenSend) -> None:
        report = partial(self._report, at)
        link = LinkName(message.conn, message.link_id, message.peer)
        end = self._lanes.send_end(link, message.lane, message.between, report, note_nothing)
        self._held[at] = _HeldEnd(end, SEND_CALLS, self._sending, lambda: (end.sent_nbytes, 0))
        self._send(to.Offers(*at, end.offers, end.max_payloads, end.probe_seed))

    def _open_receive(self, at: At, message: to.OpenReceive) -> None:
        report = partial(self._report, at)
        end = self._lanes.receive_end(message.conn, message.peer, message.opened, message.lane, report, note_nothing)
        self._held[at] = _HeldEnd(end, RECEIVE_CALLS, self._receiving, lambda: (end.received_nbytes, end.num_dropped))

    def _call(self, at: At, call: to.Call) -> None:
        gate = self._receiving
        if (held := self._held.get(at)) is not None:
            gate, job = held.gate, partial(getattr(held.end, call.method), *held.calls.arguments(call))
        elif call.method == "forget":  # nothing can land at an end that did not open
            job = partial(self._report, at, Drained(*RECEIVE_CALLS.arguments(call)))
        else:
            return
        if call.method == "close":
            del self._held[at]
            self._counted.pop(at, None)
        if call.after is None:
            job()
        else:
            gate.add(call.after, job)


class Follower:
    """A rank other than 0. `lanes` is None for an engine without peers."""

    def __init__(self, runner: ModelRunner, channel: Channel, lanes: LocalLanes | None) -> None:
        self._runner = runner
        self._channel = channel
        self._host = None
        if lanes is not None:
            self._host = LaneHost(lanes, channel.send)
        self._steps: queue.SimpleQueue[OfSteps | None] = queue.SimpleQueue()
        self._num_steps = 0
        self._next_count_s = 0.0

    def start(self) -> None:
        self._channel.start("rank 0", self._hear, self.stop)

    def stop(self) -> None:
        """Makes `run` return after the current step, because rank 0 is gone or this process must end."""
        self._steps.put(None)

    def run(self) -> None:
        """Computes until `stop`.

        Raises InstanceLost if another rank is lost during a step, and any error that was raised while a message from
        rank 0 was handled.
        """
        while True:
            self._count()
            try:
                message = self._steps.get(timeout=COUNT_INTERVAL_S)
            except queue.Empty:
                continue
            if message is None:
                if self._channel.error is not None:
                    raise self._channel.error
                self._runner.close_tiers()
                return
            if isinstance(message, to.Moves):
                self._runner.move(message.moves)
                self._num_steps += 1
                self._advance(ALL_LAYERS)
            elif isinstance(message, to.TierCommands):
                self._runner.order(message.kind, message.orders)
            elif isinstance(message, to.DropAdapter):
                self._runner.held.drop_adapter(message.digest)
            elif isinstance(message, to.Rest):
                self._runner.sleep(message.level)
            elif isinstance(message, to.LoadWeights):
                self._runner.change_weights(message.path, message.stamp)
            elif isinstance(message, to.TakePart):
                self._runner.expect(message.unit_rows)
                self._runner.take_part()
                self._runner.threads.rest()  # see _compute
            else:
                self._compute(message)

    def _compute(self, step: to.Step) -> None:
        self._num_steps += 1
        on_layer = self._advance if step.by_layers else None
        if step.unit_rows:
            self._runner.expect(step.unit_rows)
        self._runner.compute(_input_of(step), on_layer, step.is_ahead)
        self._runner.threads.rest()  # this rank does not know whether another step follows
        self._advance(ALL_LAYERS)

    def _advance(self, num_layers: int) -> None:
        if self._host is not None:
            self._host.reached(to.Reached(self._num_steps, num_layers))

    def _count(self) -> None:
        now_s = time.monotonic()
        if self._host is not None and now_s >= self._next_count_s:
            self._next_count_s = now_s + COUNT_INTERVAL_S
            self._host.count()

    def _hear(self, message: to.ToFollower) -> None:
        if isinstance(message, OfSteps):
            self._steps.put(message)
        elif isinstance(message, to.LoadAdapter):
            load_share(self._runner, message, self._channel.send)
        elif isinstance(message, to.Ping):
            self._channel.send(to.Pong())
        elif self._host is not None:
            self._host.handle(message)


def _input_of(step: to.Step) -> StepInput:
    parts = (step.rows, step.input_ids, step.blocks, step.rope_positions, step.adapters, step.virtual, step.leaders)
    rows, input_ids, blocks, rope_positions, adapters, virtual, leaders = map(_numbers, parts)
    own = rope_positions.reshape(-1, len(input_ids)) if len(rope_positions) else None
    images = tuple(
        ImagePart(each.row, each.start, each.num_tokens, each.key, each.image, each.is_landed) for each in step.images
    )
    slots = adapters if len(adapters) else None
    virtual_parts = virtual.reshape(-1, VIRTUAL_COLUMNS) if len(virtual) else None
    shared = leaders if len(leaders) else None
    found = StepInput(rows.reshape(-1, NUM_COLUMNS), input_ids, blocks, own, slots, images, virtual_parts, shared)
    if not step.further:
        return found
    further = tuple(GroupTables(_numbers(counts), _numbers(table)) for counts, table in step.further)
    keeps = _numbers(step.keeps).reshape(-1, KEEP_COLUMNS) if step.keeps else None
    return replace(found, further=further, keeps=keeps)


def _numbers(data: bytes) -> Ints:
    return np.frombuffer(data, np.int64).copy()


def send_to_rank_0(channel: Channel) -> Callable[[str, wire.Body], None]:
    """Returns a function for the lanes' threads that sends messages for a link's connection through rank 0."""
    return lambda conn, body: channel.send(to.Posted(conn, body))
