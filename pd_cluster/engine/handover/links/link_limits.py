"""Chooses which links with communicators may be open, for both ends. Tables in docs/protocol/pairs.md, "Links at rest".

out_links.py and in_links.py open, rest and close the links.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_cluster import wire
from pd_cluster.engine.handover.links.out_link import OutLink


@dataclass(frozen=True, slots=True)
class OutLinkLimit:
    """Decides when P's links rest. At most `most` links have open communicators; 0: any number."""

    most: int = 0

    def wish(self, link: OutLink, links: Iterable[OutLink]) -> wire.PairWish | None:
        """Returns the wish to send in the link's LinkOpen; None: the link must wait for capacity."""
        has_capacity = not self.most or sum(each.has_pair for each in links) < self.most
        if link.awaited_s is None and not link.is_unproven:
            return "free" if has_capacity else "none"
        return "now" if has_capacity else None

    def choose(self, links: Iterable[OutLink], now_s: float, uses: Callable[[str], bool]) -> None:
        """Marks links that must rest so that waiting links get capacity: idle ones first, then the least recently used.

        A marked link that is in use takes no further transfers and rests once its current ones have ended.
        `uses(conn)`: whether a transfer is under way over the link.
        """
        if not self.most:
            return
        every = list(links)
        num_wanted = sum(each.has_pair for each in every) + sum(each.waits_for_pair(now_s) for each in every)
        able = [each for each in every if each.state.is_open and each.has_pair]
        num_leaving = sum(each.must_rest for each in able)
        rest = sorted((each for each in able if not each.must_rest), key=lambda e: (uses(e.conn), e.used_s))
        for link in rest[: max(0, num_wanted - self.most - num_leaving)]:
            link.must_rest = True


class Queued(NamedTuple):
    conn: str
    peer: str
    opened: wire.LinkOpen


@dataclass(slots=True)
class InLinkLimit:
    """D's links with communicators: those that have capacity, and a queue of those that wait for it."""

    most: int = 0
    queue: list[Queued] = field(default_factory=list)
    _used: dict[str, int] = field(default_factory=dict)  # connection -> when a landing last began over it
    _asked: set[str] = field(default_factory=set)
    _clock: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def has_capacity(self) -> bool:
        return not self.most or len(self._used) < self.most

    def is_queued(self, conn: str) -> bool:
        return any(each.conn == conn for each in self.queue)

    def take(self, conn: str) -> None:
        self._used[conn] = next(self._clock)

    def use(self, conn: str) -> None:
        if conn in self._used:
            self._used[conn] = next(self._clock)

    def leave(self, conn: str) -> None:
        """Gives the connection's capacity back, or ends its wait for capacity."""
        self._used.pop(conn, None)
        self._asked.discard(conn)
        self.queue[:] = [each for each in self.queue if each.conn != conn]

    def to_ask(self) -> list[str]:
        """Returns links that should be asked to rest, one for each waiting link; returns no link twice."""
        able = sorted(self._used.keys() - self._asked, key=self._used.__getitem__)
        chosen = able[: max(0, len(self.queue) - len(self._asked))]
        self._asked.update(chosen)
        return chosen

    def next(self) -> Queued | None:
        """Takes the next link from the queue if there is capacity."""
        return self.queue.pop(0) if self.queue and self.has_capacity else None
