"""Holds requests for a limited time until the cluster has capacity; those that would wait longer are refused at once.

The expected wait is computed from the requests ahead and the recent admission rate. fair_queue.py decides the order;
spare_capacity.py decides whether a request fits. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_cluster.cluster.instances.roster import Members
from pd_cluster.cluster.placement.spare_capacity import spare_capacity
from pd_cluster.cluster.queueing.abandonment import Abandonment
from pd_cluster.cluster.queueing.fair_queue import Client, FairQueue, QueueEntry
from pd_cluster.cluster.streams.request_origin import PromptGroup
from pd_cluster.cluster.streams.request_stream import Ending
from pd_cluster.errors import Overloaded, PdClusterError

MAX_WAITING = 1 << 14  # this and the next limit bound the queue's memory
MAX_WAITING_TOKENS = 1 << 22
MOST_RETRY_S = 60  # longer estimates are unreliable
MEASURED_S = 10.0  # time constant of the counts' decay: an event of this age has the weight 1/e
SAFE = 0.7  # an expected wait may take up this share of the allowed wait: estimates have errors
# a rate is trusted once requests have waited for MIN_MEASURED_S and MIN_MEASURED requests have begun
MIN_MEASURED_S = 0.5
MIN_MEASURED = 8.0


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request whose tokens are known. `client`: the name by which requests share the queue."""

    client: str
    num_tokens: int
    num_sequences: int
    priority: int = 0
    group: PromptGroup = field(default_factory=PromptGroup)


class AdmissionRate:
    """The recent rate at which requests began while others waited, in tokens/s."""

    def __init__(self, now_s: float) -> None:
        self._at_s = now_s
        self._began_s = -math.inf  # when the last request began
        self._num_begun = self._num_tokens = self._waited_s = 0.0

    def passed(self, now_s: float, waited: bool) -> None:
        """Advances the time; `waited`: whether any request has waited since the last call."""
        took_s = max(0.0, now_s - self._at_s)
        fade = math.exp(-took_s / MEASURED_S) if waited else 1.0
        self._at_s = now_s
        self._num_begun *= fade
        self._num_tokens *= fade
        self._waited_s = self._waited_s * fade + (took_s if waited else 0.0)

    def began(self, num_tokens: int) -> None:
        """Counts a request that begins.

        Drops older counts after a pause, such as a restart, a lost instance or an idle hour.
        """
        if self._at_s - self._began_s > MEASURED_S:
            self._num_begun = self._num_tokens = self._waited_s = 0.0
        self._began_s = self._at_s
        self._num_begun += 1
        self._num_tokens += num_tokens

    @property
    def tokens_per_s(self) -> float:
        """Returns the rate, or 0 while it is unknown."""
        is_known = self._waited_s >= MIN_MEASURED_S and self._num_begun >= MIN_MEASURED
        return self._num_tokens / self._waited_s if is_known else 0.0


class WaitLimit(NamedTuple):
    most_s: float
    name: str


class AwaitedTurn(NamedTuple):
    came: asyncio.Future[None]
    group: PromptGroup


class AdmissionQueue:
    def __init__(
        self,
        max_wait_s: float,
        members: Members,
        limit_name: str = "--max-queue-time",
        has_priorities: bool = False,
    ) -> None:
        """`max_wait_s`: 0 for no limit. `limit_name`: the flag that sets it.

        `has_priorities`: later arrivals may overtake waiting requests, so requests are refused only after a wait, not
        by a prediction.
        """
        self._max_wait_s = max_wait_s or math.inf
        self._limit_name, self._has_priorities = limit_name, has_priorities
        self._members = members
        self._loop = asyncio.get_running_loop()
        self.queue = FairQueue()
        self.rate = AdmissionRate(self._loop.time())
        self.abandonment = Abandonment()
        self._turns: dict[QueueEntry, AwaitedTurn] = {}
        self._is_paused = False
        self._is_beginning = False  # a request was selected, but it has not been sent yet
        self._following: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return self.queue.num_waiting

    @property
    def num_tokens(self) -> int:
        return self.queue.num_tokens

    # ---- before a request is read: only its client and rough size are known

    def arrives(self, name: str, num_tokens: int, client_timeout_s: float = math.inf) -> Client:
        """Registers an arriving request; the caller must call `departs` later. Raises Overloaded if it would wait too
        long.
        """
        client = self.queue.client(name, self._loop.time())
        self._check(client, num_tokens, client_timeout_s)
        client.num_arriving_tokens += num_tokens
        return client

    def departs(self, client: Client, num_tokens: int) -> None:
        client.num_arriving_tokens -= num_tokens

    def _check(self, client: Client, num_tokens: int, client_timeout_s: float) -> None:
        queue = self.queue
        if not queue.num_waiting:
            return
        is_full = queue.num_waiting >= MAX_WAITING or queue.num_tokens >= MAX_WAITING_TOKENS
        if is_full and queue.has_more_than_share(client, MAX_WAITING, MAX_WAITING_TOKENS):
            raise Overloaded(f"{queue.num_waiting} requests are already waiting, which is the limit", 1)
        if self._has_priorities or self._begins_at_once(client):
            return
        wait_s, limit = self._expected_s(client), self._limit(client, num_tokens, client_timeout_s)
        if wait_s > SAFE * limit.most_s:
            raise Overloaded(
                f"the server is busy: the expected wait of {wait_s:.2g} s is too long for {limit.name}",
                _retry_s(wait_s, limit.most_s),
            )

    def _begins_at_once(self, client: Client) -> bool:
        """Whether there is capacity for a new request and no waiting request may use it."""
        may = self._may_begin()
        return may is not None and may(QueueEntry(client, 0, 1)) and self.queue.next(may) is None

    def _expected_s(self, client: Client) -> float:
        """Returns the expected wait; 0 while the rate is unknown."""
        rate = self._measured()
        return self.queue.tokens_before(client) / rate if rate else 0.0

    def _limit(self, client: Client, num_tokens: int, client_timeout_s: float) -> WaitLimit:
        """Returns the shortest of a request's limits."""
        found = WaitLimit(self._max_wait_s, f"the {self._max_wait_s:g} s of {self._limit_name}")
        if client_timeout_s < found.most_s:
            found = WaitLimit(client_timeout_s, f"the {client_timeout_s:g} s of the client's own timeout")
        now_s = self._loop.time()
        most_s = self.abandonment.most_wait_s(client.leave_times, num_tokens, now_s)
        if most_s < found.most_s:
            after_s = self.abandonment.abandon_after_s(client.leave_times, now_s)
            found = WaitLimit(most_s, f"the {after_s:.2g} s after which clients have recently left")
        return found

    # ---- a request whose tokens are known

    def at_once(self, request: QueuedRequest) -> QueueEntry | None:
        """Returns the entry of a request that need not wait; None if it must wait, and the caller must await `turn`."""
        if self.queue.num_waiting or self._is_beginning or (may := self._may_begin()) is None:
            return None
        now_s = self._loop.time()
        entry = self._entry(request, now_s, now_s)
        if not may(entry):
            return None
        self._is_beginning = request.group.has_begun = True
        self.rate.passed(now_s, waited=False)
        self._begin(entry, now_s)
        return entry

    async def turn(
        self, request: QueuedRequest, client_timeout_s: float = math.inf, since_s: float | None = None
    ) -> QueueEntry:
        """Waits until there is capacity and the request is next. The caller must call `begun` or `ended` before it
        awaits anything.

        `since_s`: when the request began to wait, by the event loop's clock; None: now. Raises Overloaded if it has
        waited as long as allowed, or is expected to wait longer.
        """
        now_s, group, num_tokens = self._loop.time(), request.group, request.num_tokens
        if (entry := self.at_once(request)) is not None:
            return entry
        entry = self._entry(request, now_s, now_s if since_s is None else since_s)
        client = entry.client
        if not group.is_let_in:
            self._check(client, num_tokens, client_timeout_s)
            group.is_let_in = True
        self._measured()
        self.queue.join(entry)
        turn: asyncio.Future[None] = self._loop.create_future()
        self._turns[entry] = AwaitedTurn(turn, group)
        limit = self._limit(client, num_tokens, client_timeout_s)
        left_s = limit.most_s - (now_s - entry.arrived_s)
        if self._following is None:
            self._following = asyncio.ensure_future(self._follow())
        self.look()  # this request may fit where earlier ones do not
        try:
            await asyncio.wait([turn], timeout=max(0.0, left_s) if left_s < math.inf else None)
            if not turn.done() and not group.has_begun:
                why = "paused by an operator" if self._is_paused else "busy"
                raise Overloaded(
                    f"the server is {why}: the request has waited for {limit.name}",
                    _retry_s(self._expected_s(client), limit.most_s),
                )
            await turn
        except BaseException as error:
            self._gives_up(entry, has_left=isinstance(error, asyncio.CancelledError))
            raise
        group.has_begun = True
        return entry

    def _entry(self, request: QueuedRequest, now_s: float, arrived_s: float) -> QueueEntry:
        client = self.queue.client(request.client, now_s)
        return QueueEntry(client, request.num_tokens, request.num_sequences, request.priority, arrived_s=arrived_s)

    def begun(self, entry: QueueEntry) -> None:
        """Records that the request was sent, and lets the next one begin if it fits."""
        self._is_beginning = False
        self.look()

    def ended(self, entry: QueueEntry, num_tokens: int, how: Ending = "failed") -> None:
        """Ends a request; `num_tokens` is its actual cost. Must also be called for a request that was never sent."""
        self.queue.end(entry, num_tokens)
        if how == "failed":
            return
        now_s = self._loop.time()
        self.abandonment.note(entry.client.leave_times, now_s, now_s - entry.arrived_s, has_left=how == "left")
        if how == "answered":
            self.abandonment.answers.note(now_s, now_s - entry.begun_s, entry.num_tokens)

    def look(self) -> None:
        """Lets the next request begin if there is capacity. Called when an instance has finished some work."""
        if not self.queue.num_waiting or self._is_beginning or (may := self._may_begin()) is None:
            return
        entry = self._next(may)
        if entry is None:
            return
        self._measured()
        self.rate.began(entry.num_tokens)
        self._begin(entry, self._loop.time())
        self._is_beginning = True
        turn = self._turns.pop(entry).came
        if not turn.done():  # otherwise its caller has just given up and cleans up itself
            turn.set_result(None)

    def close(self, error: PdClusterError) -> None:
        """Ends all waiting requests with this error, and stops following the instances."""
        self.end_all(error)
        if self._following is not None:
            self._following.cancel()

    def end_all(self, error: PdClusterError) -> None:
        """Ends all waiting requests with this error."""
        turns, self._turns = self._turns, {}
        for entry, turn in turns.items():
            self.queue.leave(entry)
            if not turn.came.done():
                turn.came.set_exception(error)

    def pause(self, is_paused: bool) -> None:
        """Prevents requests from beginning while `is_paused`."""
        self._is_paused = is_paused
        self.look()

    # ----

    def _begin(self, entry: QueueEntry, now_s: float) -> None:
        entry.begun_s = now_s
        self.queue.begin(entry)

    def _next(self, may: Callable[[QueueEntry], bool]) -> QueueEntry | None:
        """Returns the next request, and refuses earlier ones whose answers would come too late."""
        while (entry := self.queue.next(may)) is not None:
            now_s = self._loop.time()
            most_s = SAFE * self.abandonment.most_wait_s(entry.client.leave_times, entry.num_tokens, now_s)
            turn, group = self._turns[entry]
            if turn.done() or group.has_begun or now_s - entry.arrived_s <= most_s:
                return entry
            limit = self._limit(entry.client, entry.num_tokens, math.inf)
            self.queue.leave(entry)
            del self._turns[entry]
            retry_s = _retry_s(self._expected_s(entry.client), limit.most_s)
            turn.set_exception(
                Overloaded(f"the server is busy: the request has waited too long for {limit.name}", retry_s)
            )
        return None

    def _gives_up(self, entry: QueueEntry, has_left: bool) -> None:
        if has_left:
            now_s = self._loop.time()
            self.abandonment.note(entry.client.leave_times, now_s, now_s - entry.arrived_s, has_left=True)
        turn = self._turns.pop(entry, None)
        if turn is not None:
            turn.came.cancel()
        self.queue.leave(entry)
        if entry.has_begun:  # it was selected just before its caller gave up
            self.ended(entry, 0)
            self.begun(entry)

    def _measured(self) -> float:
        self.rate.passed(self._loop.time(), waited=self.queue.num_waiting > 0)
        return self.rate.tokens_per_s

    def _may_begin(self) -> Callable[[QueueEntry], bool] | None:
        """Returns a test that tells whether a request may begin now; None if no request may.

        The last slots are reserved for clients that stay within their share even with the request's sequences. If all
        slots are taken, prompts of clients below their share may still be computed, so that a client that holds all
        slots cannot shut others out.
        """
        spare = spare_capacity(self._members.instances)
        if self._is_paused or not spare.for_prompts:
            return None
        longest = spare.longest
        if spare.for_sequences and spare.for_all:
            return lambda entry: entry.num_tokens <= longest
        others = self.queue.sharing(self._loop.time())
        if spare.for_sequences:
            return lambda entry: entry.num_tokens <= longest and others.excess(entry) <= 0
        return lambda entry: entry.num_tokens <= longest and others.excess(entry) < 0

    async def _follow(self) -> None:
        """While requests wait, tries to begin the next one after every change of an instance."""
        try:
            while self.queue.num_waiting:
                await self._members.change()
                self.look()
        finally:
            self._following = None


def _retry_s(wait_s: float, limit_s: float) -> int:
    """Returns the seconds after which the wait, which is too long now, would be short enough."""
    over_s = wait_s - SAFE * limit_s
    return min(MOST_RETRY_S, max(1, math.ceil(over_s))) if over_s < math.inf else MOST_RETRY_S
