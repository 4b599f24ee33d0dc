"""Maps of which a connection carries a snapshot first, and then only what has changed. Pure.

A worker's links and the list of live workers are told so: docs/protocol/membership.md, "Snapshots and deltas". The
state of both ends belongs to a connection, which keeps the order of messages and ends where one is lost, so a number
that does not follow the last one is a fault of the sender.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from pd_cluster import wire
from pd_cluster.net.peer_admission import peer_key
from pd_cluster.types import LinkState

SNAPSHOT = 1  # the number of a map that is told whole; 0: nothing is told
MOST_ENTRIES = 1 << 16  # of a map: a bound on memory

V = TypeVar("V")


class DeltaLost(Exception):
    """A delta does not follow what was received before."""


class MapDelta(NamedTuple, Generic[V]):
    changed: dict[str, V]
    gone: list[str]

    @classmethod
    def between(cls, before: Mapping[str, V], now: Mapping[str, V]) -> MapDelta[V]:
        changed = {key: value for key, value in now.items() if key not in before or before[key] != value}
        return cls(changed, [key for key in before if key not in now])

    @property
    def is_empty(self) -> bool:
        return not (self.changed or self.gone)


class DeltaReceiver(Generic[V]):
    """The receiver's map. `known` is replaced, never changed."""

    def __init__(self) -> None:
        self.known: dict[str, V] = {}
        self._number = 0  # of the last one received

    def hear(self, number: int, changed: Mapping[str, V], gone: Sequence[str]) -> None:
        """Raises DeltaLost, and changes nothing then."""
        if number != SNAPSHOT and (not self._number or number != self._number + 1):
            raise DeltaLost(f"number {number} has followed {self._number}")
        if len(changed) > MOST_ENTRIES:
            raise DeltaLost(f"{len(changed)} entries are more than {MOST_ENTRIES}")
        known = {**changed} if number == SNAPSHOT else {**self.known, **changed}
        for key in gone:
            known.pop(key, None)
        if len(known) > MOST_ENTRIES:
            raise DeltaLost(f"{len(known)} entries are more than {MOST_ENTRIES}")
        self.known, self._number = known, number


class LinkSender:
    """Tells one scheduler of a worker's links, with heartbeats."""

    def __init__(self) -> None:
        self._told: Mapping[str, LinkState] = {}
        self._number = 0

    def told(self, load: wire.Load, links: Mapping[str, LinkState]) -> wire.Load:
        """Returns a load without links as it is sent next: with those that have changed."""
        if self._number and (links is self._told or links == self._told):
            return load
        delta = MapDelta.between(self._told, links)
        self._told, self._number = links, self._number + 1
        return msgspec.structs.replace(
            load, links=delta.changed, gone_links=tuple(delta.gone), links_number=self._number
        )


class LinkReceiver:
    """Joins what one worker tells of its links."""

    def __init__(self) -> None:
        self._links = DeltaReceiver[LinkState]()

    def whole(self, load: wire.Load) -> wire.Load:
        """Returns a load that was received with all links. Raises DeltaLost."""
        if load.links_number:
            self._links.hear(load.links_number, load.links, load.gone_links)
        if load.links_number or self._links.known:
            return msgspec.structs.replace(load, links=self._links.known, gone_links=(), links_number=0)
        return load


class PeersReceiver:
    """Joins what one scheduler tells of the live workers: each term begins with all of them."""

    def __init__(self) -> None:
        self._peers = DeltaReceiver[wire.PeerInfo]()
        self._term = 0

    def whole(self, order: wire.Peers) -> wire.Peers:
        """Returns an order that was received with all peers. Raises DeltaLost."""
        if order.number != SNAPSHOT and order.term != self._term:
            raise DeltaLost(f"number {order.number} is the first of term {order.term}")
        self._peers.hear(order.number, _by_key(order.peers), order.gone)
        self._term = order.term
        return wire.Peers(list(self._peers.known.values()), order.term)


class PeersSender:
    """Tells workers of all live ones, by connection: the same to each, so what has changed is found once."""

    def __init__(self) -> None:
        self._told: dict[str, wire.PeerInfo] = {}
        self._numbers: dict[str, int] = {}  # by connection, of those that have been told
        self._term = 0

    def next(self, peers: Sequence[wire.PeerInfo], term: int, conns: Sequence[str]) -> dict[str, wire.Peers]:
        """Returns what to send over each of these connections, which are all that shall know; often nothing."""
        before, self._told = self._told, _by_key(peers)
        if term != self._term:
            self._numbers.clear()
        delta, numbers, self._term = MapDelta.between(before, self._told), self._numbers, term
        self._numbers = {conn: numbers.get(conn, 0) + (conn not in numbers or not delta.is_empty) for conn in conns}
        whole, changed = list(peers), list(delta.changed.values())
        return {
            conn: wire.Peers(whole, term) if number == SNAPSHOT else wire.Peers(changed, term, number, delta.gone)
            for conn, number in self._numbers.items()
            if number != numbers.get(conn)
        }


def _by_key(peers: Sequence[wire.PeerInfo]) -> dict[str, wire.PeerInfo]:
    return {peer_key(peer.name, peer.epoch): peer for peer in peers}
