"""Sends a map over a connection: first a snapshot, then only the changes. Pure.

A worker's links and the list of live workers are sent this way: docs/protocol/membership.md, "Snapshots and deltas".
Both ends keep their state for one connection, which preserves the order of messages and closes if a message is lost. A
number that does not follow the last one is therefore the sender's fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from pd_cluster import wire
from pd_cluster.net.peer_admission import peer_key
from pd_cluster.types import LinkState

SNAPSHOT = 1  # the number of a snapshot; 0: no map is sent
MOST_ENTRIES = 1 << 16  # the most entries of a map; limits its memory

V = TypeVar("V")


class DeltaLost(Exception):
    """A delta does not follow the last message that was received."""


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
    """The receiver's map. `known` is replaced, never mutated."""

    def __init__(self) -> None:
        self.known: dict[str, V] = {}
        self._number = 0  # of the last message received

    def apply(self, number: int, changed: Mapping[str, V], gone: Sequence[str]) -> None:
        """Merges a snapshot or delta. Raises DeltaLost, without changing the map."""
        if number != SNAPSHOT and (not self._number or number != self._number + 1):
            raise DeltaLost(f"number {number} does not follow {self._number}")
        if len(changed) > MOST_ENTRIES:
            raise DeltaLost(f"{len(changed)} entries are more than {MOST_ENTRIES}")
        known = {**changed} if number == SNAPSHOT else {**self.known, **changed}
        for key in gone:
            known.pop(key, None)
        if len(known) > MOST_ENTRIES:
            raise DeltaLost(f"{len(known)} entries are more than {MOST_ENTRIES}")
        self.known, self._number = known, number


class LinkSender:
    """Adds a worker's links to its heartbeats for one scheduler."""

    def __init__(self) -> None:
        self._sent: Mapping[str, LinkState] = {}
        self._number = 0

    def with_changes(self, load: wire.Load, links: Mapping[str, LinkState]) -> wire.Load:
        """Adds the links that changed since the last heartbeat to a load without links."""
        if self._number and (links is self._sent or links == self._sent):
            return load
        delta = MapDelta.between(self._sent, links)
        self._sent, self._number = links, self._number + 1
        return msgspec.structs.replace(
            load, links=delta.changed, gone_links=tuple(delta.gone), links_number=self._number
        )


class LinkReceiver:
    """Merges the links that one worker sends."""

    def __init__(self) -> None:
        self._links = DeltaReceiver[LinkState]()

    def merged(self, load: wire.Load) -> wire.Load:
        """Returns a received load with all links. Raises DeltaLost."""
        if load.links_number:
            self._links.apply(load.links_number, load.links, load.gone_links)
        if load.links_number or self._links.known:
            return msgspec.structs.replace(load, links=self._links.known, gone_links=(), links_number=0)
        return load


class PeersReceiver:
    """Merges one scheduler's list of live workers; each term begins with a snapshot."""

    def __init__(self) -> None:
        self._peers = DeltaReceiver[wire.PeerInfo]()
        self._term = 0

    def merged(self, order: wire.Peers) -> wire.Peers:
        """Returns a received order with all peers. Raises DeltaLost."""
        if order.number != SNAPSHOT and order.term != self._term:
            raise DeltaLost(f"number {order.number} is the first of term {order.term}")
        self._peers.apply(order.number, _by_key(order.peers), order.gone)
        self._term = order.term
        return wire.Peers(list(self._peers.known.values()), order.term)


class PeersSender:
    """Sends workers the list of live workers. All receive the same list, so its changes are computed once."""

    def __init__(self) -> None:
        self._sent: dict[str, wire.PeerInfo] = {}
        self._numbers: dict[str, int] = {}  # connection -> the number of the last message sent over it
        self._term = 0

    def next(self, peers: Sequence[wire.PeerInfo], term: int, conns: Sequence[str]) -> dict[str, wire.Peers]:
        """Returns connection -> message, often empty. `conns`: all existing connections."""
        before, self._sent = self._sent, _by_key(peers)
        if term != self._term:
            self._numbers.clear()
        delta, numbers, self._term = MapDelta.between(before, self._sent), self._numbers, term
        self._numbers = {conn: numbers.get(conn, 0) + (conn not in numbers or not delta.is_empty) for conn in conns}
        whole, changed = list(peers), list(delta.changed.values())
        return {
            conn: wire.Peers(whole, term) if number == SNAPSHOT else wire.Peers(changed, term, number, delta.gone)
            for conn, number in self._numbers.items()
            if number != numbers.get(conn)
        }


def _by_key(peers: Sequence[wire.PeerInfo]) -> dict[str, wire.PeerInfo]:
    return {peer_key(peer.name, peer.epoch): peer for peer in peers}
