"""Decides whose work is next when clients share a few places, such as threads or processes. Uses no clock, loop or
thread.

A client holds at most half of the places, rounded up, so that other clients' work can begin at once, no matter how much
work one client sends. A free place goes to the client that holds the fewest places; among equal clients, to the client
whose last turn was longest ago.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Generic, TypeVar

from pd_cluster.errors import NoCapacity

T = TypeVar("T")

current_client: ContextVar[str] = ContextVar("current_client", default="")
"""The client of the request that this task serves: its key's tenant, or its address; "": no client."""


class FairSlots(Generic[T]):
    def __init__(self, num_places: int, most_waiting: int | None = None) -> None:
        """`most_waiting`: the number of waiting pieces of work beyond which only clients with less than their share may
        add more.
        """
        self._num_free, self._most_held = num_places, -(-num_places // 2)
        self._most_waiting = most_waiting
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # the client with the oldest last turn first
        self._held: Counter[str] = Counter()
        self.num_waiting = 0

    @property
    def num_held(self) -> int:
        return self._held.total()

    def join(self, client: str, piece: T) -> None:
        """Adds a piece that waits. Raises NoCapacity if the client's waiting pieces have reached its share."""
        own, most = len(self._waiting.get(client, ())), self._most_waiting
        num_clients = len(self._waiting) + (client not in self._waiting)
        if most is not None and self.num_waiting >= most and own * num_clients >= most:
            raise NoCapacity(f"{self.num_waiting} jobs are waiting already, {own} of them yours; try again")
        self._waiting.setdefault(client, deque()).append(piece)
        self.num_waiting += 1

    def leave(self, client: str, piece: T) -> None:
        """Removes a piece if it still waits."""
        pieces = self._waiting.get(client)
        if pieces is None or piece not in pieces:
            return
        pieces.remove(piece)
        self.num_waiting -= 1
        if not pieces:
            del self._waiting[client]

    def next(self, may: Callable[[str], bool] = lambda client: True) -> tuple[str, T] | None:
        """Gives a free place to a piece; returns the client and the piece, or None if no piece may begin.

        The caller must call `ended` later.

        `may`: whether a client's pieces may begin; it applies in addition to the shares.
        """
        waiting = self._waiting if self._num_free else ()
        able = [client for client in waiting if self._held[client] < self._most_held and may(client)]
        if not able:
            return None
        client = min(able, key=lambda each: self._held[each])
        pieces = self._waiting[client]
        piece = pieces.popleft()
        if pieces:
            self._waiting.move_to_end(client)
        else:
            del self._waiting[client]
        self.num_waiting -= 1
        self._num_free -= 1
        self._held[client] += 1
        return client, piece

    def ended(self, client: str) -> None:
        """Gives a client's place back."""
        self._num_free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]

    def clear(self) -> list[T]:
        """Removes and returns all waiting pieces."""
        pieces = [piece for pieces in self._waiting.values() for piece in pieces]
        self._waiting.clear()
        self.num_waiting = 0
        return pieces
