"""Finds a request's first pair of instances.

The request waits in the admission queue, if there is one, and its objectives are checked. If the last instance was just
lost, the request waits a moment. If an instance is returning, the request waits for it as long as an interrupted
request would.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine
from typing import Any

from pd_cluster.cluster.instances.roster import Members
from pd_cluster.cluster.placement.pull_sources import PullSources, are_linked
from pd_cluster.cluster.placement.routing_policy import Pair, RoutingRequest, awaits_pair, is_served, why_unavailable
from pd_cluster.cluster.placement.routing_rules import RoutingRules
from pd_cluster.cluster.placement.wait_prediction import check_goals, within_tpot
from pd_cluster.cluster.queueing.fair_queue import Client, QueueEntry
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.cluster.routing.admission_queue import AdmissionQueue, QueuedRequest
from pd_cluster.cluster.streams.request_origin import AdmittedRequest, PromptGroup, RequestOwner
from pd_cluster.cluster.streams.request_stream import Ending, RequestStream
from pd_cluster.cluster.streams.stream_table import StreamEnd, StreamTable
from pd_cluster.errors import Overloaded, PdClusterError, Unavailable
from pd_cluster.process_messages import Gate

SHUTTING_DOWN = "the server is shutting down"
ASLEEP = "the cluster is asleep, until an operator wakes it up (POST /wake_up at the admin port)"
ASLEEP_RETRY_S = 10
SETTLE_POLL_S = 0.1  # polling interval while the first pair is awaited: no event says that it will not come


class RequestAdmission:
    """Listens to `streams`."""

    def __init__(self, streams: StreamTable, members: Members, rules: RoutingRules, stats: RequestStats) -> None:
        self._members, self._stats = members, stats
        self._choose, self._goals, self._replay = rules.choose, rules.goals, rules.replay
        self._lost_s = -math.inf  # when an instance was last lost
        self._has_settled = False  # this process has begun to serve
        self._closed = asyncio.Event()  # set when this process stops: all waits end
        self._gate: Gate = "open"
        self._resumed = asyncio.Event()
        self.waiting: AdmissionQueue | None = None
        if rules.max_queue_s is not None:
            limits = [(rules.max_queue_s, "--max-queue-time"), (rules.goals.ttft_s, "--slo-ttft")]
            limit_s, name = min((limit for limit in limits if limit[0]), default=limits[0])
            self.waiting = AdmissionQueue(limit_s, members, name, rules.has_priorities)
        streams.on_leg_ended.append(self._on_leg_ended)
        streams.on_ended.append(self._on_ended)

    @property
    def num_waiting(self) -> int:
        return self.waiting.num_waiting if self.waiting is not None else 0

    @property
    def awaits_pair(self) -> bool:
        """Whether no pair has been up yet, and one is expected soon."""
        if self._has_settled:
            return False
        instances = self._members.instances
        is_early = awaits_pair(instances, asyncio.get_running_loop().time(), self._replay.together_s)
        self._has_settled = not is_early and is_served(instances)
        return is_early

    @property
    def num_waiting_tokens(self) -> int:
        return self.waiting.num_tokens if self.waiting is not None else 0

    @property
    def _return_s(self) -> float:
        """The time that a request waits for instances after a loss: longer while an instance is returning."""
        is_returning = any(each.is_returning and each.role != "encode" for each in self._members.instances)
        return self._replay.wait_s if is_returning else self._replay.together_s

    def lost(self) -> None:
        """Records that an instance was lost, or that none is known yet.

        Requests that arrive soon afterwards wait a moment for an instance.
        """
        self._lost_s = asyncio.get_running_loop().time()

    async def all_are_here(self) -> None:
        """Waits until all instances are ready, but no longer than a moment after this process started or lost an
        instance.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._lost_s + self._replay.together_s):
                while not self._members.instances or any(not each.is_ready for each in self._members.instances):
                    await self.change()

    def arrives(self, owner: RequestOwner, num_tokens: int) -> Client | None:
        """Registers a request before it is read; the caller calls `departs` when it has its pair or ends.

        Raises Overloaded, and Unavailable while the cluster sleeps.
        """
        if self._gate == "asleep":
            self._stats.refused("unavailable")
            raise Unavailable(ASLEEP, ASLEEP_RETRY_S)
        if self.waiting is None:
            return None
        try:
            return self.waiting.arrives(owner.client, num_tokens, owner.client_timeout_s)
        except Overloaded:
            self._stats.refused("queue")
            raise

    def departs(self, client: Client, num_tokens: int) -> None:
        if self.waiting is not None:
            self.waiting.departs(client, num_tokens)

    def pair_at_once(
        self, ask: RoutingRequest, num_sequences: int, priority: int, owner: RequestOwner
    ) -> AdmittedRequest | None:
        """Returns the pair of a request that need not wait; None if it must, and the caller awaits `pair`. Raises
        Overloaded.
        """
        if self.is_closed or self._gate != "open":
            return None
        entry = None
        if self.waiting is not None:
            entry = self.waiting.at_once(_queued(ask, num_sequences, priority, owner))
            if entry is None:
                return None
        try:
            return self._admitted(ask, 0.0, entry)
        except Unavailable:
            return None

    async def pair(
        self, ask: RoutingRequest, num_sequences: int, priority: int, owner: RequestOwner
    ) -> AdmittedRequest:
        """Chooses the request's pair; the caller must then call `begun`. Raises Unavailable, Overloaded."""
        arrived_s = asyncio.get_running_loop().time()
        while True:
            try:
                return await self._turn(ask, num_sequences, priority, owner, arrived_s)
            except Unavailable as error:
                if (closed := self._why_closed()) is not None:
                    raise closed from None
                until_s = self._lost_s + self._return_s
                if is_early := self.awaits_pair:
                    until_s = max(until_s, asyncio.get_running_loop().time() + SETTLE_POLL_S)
                try:
                    async with asyncio.timeout_at(until_s):
                        await self.change()
                except TimeoutError:
                    if is_early:
                        continue
                    self._stats.refused("unavailable")
                    raise error from None

    async def _turn(
        self, ask: RoutingRequest, num_sequences: int, priority: int, owner: RequestOwner, arrived_s: float
    ) -> AdmittedRequest:
        while self._gate == "paused" and self.waiting is None and not self.is_closed:
            await self._first_of(self._resumed.wait())
        if (closed := self._why_closed()) is not None:
            raise closed
        entry = None
        if self.waiting is not None:
            try:
                request = _queued(ask, num_sequences, priority, owner)
                entry = await self.waiting.turn(request, owner.client_timeout_s, arrived_s)
            except Overloaded:
                self._stats.refused("queue")
                raise
            if self._gate == "asleep":  # the gate has closed since the request was selected
                self._ended(entry, 0)
                self.begun(entry)
                raise Unavailable(ASLEEP, ASLEEP_RETRY_S)
        return self._admitted(ask, asyncio.get_running_loop().time() - arrived_s, entry)

    def _admitted(self, ask: RoutingRequest, waited_s: float, entry: QueueEntry | None) -> AdmittedRequest:
        try:
            return AdmittedRequest(ask, *self._admit(ask, waited_s), entry)
        except BaseException:
            self._ended(entry, 0)
            self.begun(entry)
            raise

    def _admit(self, ask: RoutingRequest, waited_s: float) -> Pair:
        instances = within_tpot(self._goals, self._members.instances)
        if self.awaits_pair and not ask.is_pooling:
            raise Unavailable(why_unavailable(instances))
        pair = self._choose(instances, ask)
        try:
            num_uncached, num_tokens = ask.num_uncached(pair[0]), ask.prompt.num_tokens
            if self._goals.ttft_s and are_linked(instances, pair[0]):
                num_uncached -= PullSources(instances, ask.prompt).num_saved(pair[0])
            check_goals(self._goals, instances, pair, num_uncached, num_tokens, waited_s)
        except Overloaded:
            self._stats.refused("slo")
            raise
        return pair

    def begun(self, entry: QueueEntry | None) -> None:
        """Records that the request was sent to the pair."""
        if entry is not None and self.waiting is not None:
            self.waiting.begun(entry)

    def _on_ended(self, stream: RequestStream, end: StreamEnd) -> None:
        self._ended(stream.admitted.entry, stream.num_tokens, end.how)

    def _ended(self, entry: QueueEntry | None, num_tokens: int, how: Ending = "failed") -> None:
        """Records the end of a request. `num_tokens` counts its prompt and its answer."""
        if entry is not None and self.waiting is not None:
            self.waiting.ended(entry, num_tokens, how)

    def _on_leg_ended(self) -> None:
        if self.waiting is not None:
            self.waiting.look()

    def set_gate(self, gate: Gate) -> None:
        """Sets whether requests without a pair may begin, must wait, or are refused."""
        if self._gate == "asleep" != gate:
            self.lost()  # the instances' states may arrive a moment later
        self._gate = gate
        resumed, self._resumed = self._resumed, asyncio.Event()
        resumed.set()
        if self.waiting is not None:
            self.waiting.pause(gate != "open")
        if gate == "asleep":
            self.end_waiting(Unavailable(ASLEEP, ASLEEP_RETRY_S))

    def _why_closed(self) -> Unavailable | None:
        if self.is_closed:
            return Unavailable(SHUTTING_DOWN)
        return Unavailable(ASLEEP, ASLEEP_RETRY_S) if self._gate == "asleep" else None

    def end_waiting(self, error: PdClusterError) -> None:
        """Ends the requests that wait in the queue."""
        if self.waiting is not None:
            self.waiting.end_all(error)

    @property
    def is_asleep(self) -> bool:
        return self._gate == "asleep"

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Ends all waits, because this process stops."""
        self._closed.set()
        if self.waiting is not None:
            self.waiting.close(Unavailable(SHUTTING_DOWN))

    async def change(self) -> None:
        """Waits until the instances may have changed, or this process stops."""
        await self._first_of(self._members.change())

    async def _first_of(self, event: Coroutine[Any, Any, object]) -> None:
        """Waits for the event, or until this process stops."""
        waiting = [asyncio.ensure_future(event), asyncio.ensure_future(self._closed.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()


def _queued(ask: RoutingRequest, num_sequences: int, priority: int, owner: RequestOwner) -> QueuedRequest:
    num_tokens = ask.prompt.num_tokens + ask.num_output_tokens
    return QueuedRequest(owner.client, num_tokens, num_sequences, priority, owner.group or PromptGroup())
