"""Orders waiting requests fairly: clients share the cluster's work, token for token.

Uses start-time fair queueing over tokens, which engines call virtual token counters: each client has a counter of the
tokens that were processed for it, and the client with the lowest counter is next. Shares are those of deficit round
robin, without a quantum. An answer's cost is unknown in advance, so a request counts with an estimate when it begins
and with its actual tokens when it ends. A client that had no waiting request begins at the others' level, even if
requests of it are running: unused shares cannot be saved up.

Pure: no clock, no event loop.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_cluster.cluster.queueing.abandonment import AbandonmentTimes
from pd_cluster.types import INT32_MAX

RECENT_S = 30.0  # clients seen within this time share the slots
MAX_CLIENTS = 4096  # the most clients without work in progress that are remembered


@dataclass(slots=True)
class Client:
    name: str
    num_served_tokens: float = 0.0  # the counter
    num_sequences: int = 0  # begun and not ended
    num_begun: int = 0  # requests begun and not ended
    num_arriving_tokens: int = 0  # tokens of requests being read and tokenized, estimated by their size
    num_waiting_tokens: int = 0  # tokens of waiting requests, except those of batches, which come after all others
    waiting: list[tuple[int, int, QueueEntry]] = field(default_factory=list)  # a heap: by priority, then by arrival
    seen_s: float = 0.0
    leave_times: AbandonmentTimes = field(default_factory=AbandonmentTimes, repr=False)

    @property
    def is_idle(self) -> bool:
        return not (self.num_begun or self.waiting or self.num_arriving_tokens)

    def num_tokens_until(self, at_tokens: float, least_tokens: float) -> int:
        """Counts the tokens of its requests that begin before its counter reaches `at_tokens`.

        The first waiting request counts in full, even beyond `at_tokens`. Arriving requests count only up to
        `at_tokens`, because they may never be complete, and their sizes are only the senders' claims.
        `least_tokens`: the level at which a client begins.
        """
        ahead = self.num_tokens_ahead
        counter = self.num_served_tokens if self.waiting else max(self.num_served_tokens, least_tokens)
        if not ahead or counter > at_tokens:
            return 0
        first = self.waiting[0][2].num_tokens if self.waiting else 0
        return min(ahead, int(at_tokens - counter) + first)

    @property
    def num_tokens_ahead(self) -> int:
        return self.num_waiting_tokens + self.num_arriving_tokens


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A request. `num_tokens`: its expected tokens, prompt and answer. Times are by the caller's clock."""

    client: Client
    num_tokens: int
    num_sequences: int
    priority: int = 0
    is_waiting: bool = False
    has_begun: bool = False
    arrived_s: float = 0.0
    begun_s: float = 0.0

    @property
    def num_tokens_ahead(self) -> int:
        """The tokens that other requests may have to wait for; 0 for a batch's request, which comes last."""
        return self.num_tokens if self.priority <= INT32_MAX else 0


class SlotShares(NamedTuple):
    """The number of clients that share the slots, and the number of their running sequences."""

    num_clients: int
    num_sequences: int

    def excess(self, entry: QueueEntry) -> int:
        """Returns by how many sequences the entry's client would exceed the clients' mean if the entry began.

        The result is multiplied by the number of clients, so that it is a whole number.
        """
        own = entry.client.num_sequences + entry.num_sequences
        return own * self.num_clients - (self.num_sequences + entry.num_sequences)


class FairQueue:
    def __init__(self) -> None:
        self.clients: OrderedDict[str, Client] = OrderedDict()  # most recently seen last
        self._waiting: dict[str, Client] = {}  # clients with waiting requests
        self._num_joined = 0
        self._now_tokens = 0.0  # the counter of the client that began last, at which a new client begins
        self.num_waiting = 0
        self.num_tokens = 0  # of all waiting requests

    def client(self, name: str, now_s: float) -> Client:
        """Returns the client of this name, marked as just seen."""
        client = self.clients.get(name)
        if client is None:
            self._forget(now_s)
            client = self.clients[name] = Client(name)
        if not client.waiting:
            client.num_served_tokens = max(client.num_served_tokens, self._least_tokens())
        client.seen_s = now_s
        self.clients.move_to_end(name)
        return client

    def join(self, entry: QueueEntry) -> None:
        """Adds a request to the queue."""
        entry.is_waiting = True
        self._num_joined += 1
        self._waiting[entry.client.name] = entry.client
        heapq.heappush(entry.client.waiting, (entry.priority, self._num_joined, entry))
        entry.client.num_waiting_tokens += entry.num_tokens_ahead
        self.num_waiting += 1
        self.num_tokens += entry.num_tokens

    def leave(self, entry: QueueEntry) -> None:
        """Removes a request that begins or leaves. A second call does nothing."""
        if not entry.is_waiting:
            return
        entry.is_waiting = False
        client = entry.client
        client.num_waiting_tokens -= entry.num_tokens_ahead
        self.num_waiting -= 1
        self.num_tokens -= entry.num_tokens
        while client.waiting and not client.waiting[0][2].is_waiting:
            heapq.heappop(client.waiting)
        if not client.waiting:
            self._waiting.pop(client.name, None)

    def next(self, may_begin: Callable[[QueueEntry], bool]) -> QueueEntry | None:
        """Returns the next request: among the clients' first requests that may begin, the one with the first priority,
        then the lowest counter.
        """
        firsts = [client.waiting[0][2] for client in self._waiting.values()]
        able = [entry for entry in firsts if may_begin(entry)]
        return min(able, key=lambda entry: (entry.priority, entry.client.num_served_tokens), default=None)

    def begin(self, entry: QueueEntry) -> None:
        self.leave(entry)
        entry.has_begun = True
        client = entry.client
        self._now_tokens = max(self._now_tokens, client.num_served_tokens)
        client.num_served_tokens += entry.num_tokens
        client.num_sequences += entry.num_sequences
        client.num_begun += 1

    def end(self, entry: QueueEntry, num_tokens: int) -> None:
        """Ends a request that began; `num_tokens` is its actual cost."""
        client = entry.client
        client.num_served_tokens += num_tokens - entry.num_tokens
        client.num_sequences -= entry.num_sequences
        client.num_begun -= 1

    def sharing(self, now_s: float) -> SlotShares:
        """Counts the running sequences of clients that are active or were recently."""
        here = [each for each in self.clients.values() if not each.is_idle or now_s - each.seen_s <= RECENT_S]
        return SlotShares(max(1, len(here)), sum(each.num_sequences for each in here))

    def tokens_before(self, client: Client) -> int:
        """Counts the tokens to be served before a request that this client sends now.

        These are all tokens of its own requests, and those tokens of other clients that come earlier by the counters.
        """
        at_tokens, least_tokens = client.num_served_tokens + client.num_tokens_ahead, self._least_tokens()
        others = [each for each in self.clients.values() if each is not client]
        before = [each.num_tokens_until(at_tokens, least_tokens) for each in others]
        return client.num_tokens_ahead + sum(before)

    def has_more_than_share(self, client: Client, most: int, most_tokens: int) -> bool:
        """Whether a client has at least its share of the given limits of waiting requests and tokens."""
        num_clients = len(self._waiting) + (not client.waiting)
        return len(client.waiting) * num_clients >= most or client.num_waiting_tokens * num_clients >= most_tokens

    def _least_tokens(self) -> float:
        """Returns the level at which a client begins: no higher than the counter of any waiting client."""
        return min([self._now_tokens, *(each.num_served_tokens for each in self._waiting.values())])

    def _forget(self, now_s: float) -> None:
        """Removes clients that have been absent for long and, if there are too many clients, those absent longest."""
        forgotten: list[str] = []
        for name, client in self.clients.items():  # the one absent longest comes first
            if now_s - client.seen_s <= RECENT_S and len(self.clients) - len(forgotten) < MAX_CLIENTS:
                break
            if client.is_idle:
                forgotten.append(name)
        for name in forgotten:
            del self.clients[name]
