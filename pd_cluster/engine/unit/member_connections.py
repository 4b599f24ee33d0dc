"""The connections between the members of a unit, from the first `Peers` message until the members end.

docs/protocol/pairs.md, "Forming a unit", has the rules.

The mailbox's thread calls `hear`, `opened`, `read` and `closed`; the loading thread waits in `await_all`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pd_cluster import wire
from pd_cluster.engine.unit.round_sync import have_ended
from pd_cluster.errors import ConfigError, InstanceLost, called
from pd_cluster.net.peer_admission import peer_key
from pd_cluster.settings.process_configs import UnitPlace

AGAIN_S = 0.2  # between two attempts to reach a member
log = logging.getLogger(__name__)


class UnitPost(Protocol):
    """The part of the mailbox that a unit needs."""

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str: ...
    def disconnect(self, conn: str) -> None: ...
    def send(self, conn: str, body: wire.Body) -> None: ...
    def await_confirmed(self, timeout_s: float) -> bool: ...


@dataclass(slots=True)
class _Mate:
    conn: str
    info: wire.PeerInfo
    is_equal: bool = False  # the member's `UnitTerms` have arrived


@dataclass(slots=True)
class MemberConnections:
    """`terms`: this member's settings that must be equal for all members, by name.

    `lost(rank, name, reason)` is called on the mailbox's thread when the connection to a member goes down.
    """

    place: UnitPlace
    terms: Mapping[str, str]
    post: UnitPost
    lost: Callable[[int, str, str], None]
    meet: Callable[[wire.UnitKey], None]  # takes a member's key
    _named: dict[str, wire.PeerInfo] = field(default_factory=dict)  # announced members, by name@epoch
    _mates: dict[int, _Mate] = field(default_factory=dict)  # by rank
    _done: set[int] = field(default_factory=set)  # ranks that have sent `UnitDone`, including this one
    _error: BaseException | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def await_all(self, remind_s: float) -> None:
        """Waits until all members are connected. Logs the missing ones every `remind_s`.

        Raises ConfigError if a member has different settings, and InstanceLost if a member is lost.
        """
        with self._changed:
            said_s = time.monotonic()
            while self._error is None and (missing := self._missing()):
                if time.monotonic() - said_s >= remind_s:
                    log.warning("unit %s: this member waits for %s", self.place.name, ", ".join(missing))
                    said_s = time.monotonic()
                self._connect()
                self._changed.wait(AGAIN_S)
            if self._error is not None:
                raise self._error
        log.info("unit %s: all %d members are connected", self.place.name, self.place.size)

    def _missing(self) -> list[str]:
        """Returns the names of members that are not connected yet, or their ranks if their names are unknown."""
        names = {each.unit_rank: each.name for each in self._named.values()}
        here = {rank for rank, mate in self._mates.items() if mate.is_equal} | {self.place.rank}
        return [names.get(rank, f"rank {rank}") for rank in range(self.place.size) if rank not in here]

    def send(self, body: wire.Body) -> None:
        """Sends a message to all connected members."""
        if isinstance(body, wire.UnitDone):
            self._done.add(self.place.rank)
        for mate in list(self._mates.values()):
            self.post.send(mate.conn, body)

    def hosts(self) -> list[str]:
        """Returns the other members' hosts in order of rank, as the scheduler announced them."""
        return [mate.info.host for _, mate in sorted(self._mates.items())]

    def fail(self, error: BaseException) -> None:
        """Ends the wait for members with an error, because mail is no longer read. Any thread may call it."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def rank_of(self, conn: str) -> int | None:
        """Returns the rank of the member at the other end of a connection; None if it is not a member."""
        return next((rank for rank, mate in list(self._mates.items()) if mate.conn == conn and mate.is_equal), None)

    # ---- called by the mailbox's thread

    def hear(self, peers: Sequence[wire.PeerInfo]) -> None:
        """Sets the list of members, and connects to forming members of higher rank."""
        with self._changed:
            own = [each for each in peers if each.unit == self.place.name]
            self._named = {peer_key(each.name, each.epoch): each for each in own}
            self._connect()

    def _connect(self) -> None:
        """Connects to forming members of higher rank, where there is no connection yet.

        A member to which this one was not announced yet refuses the connection, so the attempt must be repeated.
        """
        for each in self._named.values():
            if each.is_forming and each.unit_rank > self.place.rank and each.unit_rank not in self._mates:
                conn = self.post.connect(each.name, each.epoch, each.host, each.control_port, each.public_key)
                self._mates[each.unit_rank] = _Mate(conn, each)

    def opened(self, conn: str) -> None:
        """Sends this member's terms over a connection that it has opened."""
        with self._changed:  # the loading thread may be about to store the connection
            if any(mate.conn == conn for mate in self._mates.values()):
                self.post.send(conn, self._own_terms())

    def read(self, conn: str, peer: str, body: wire.Body) -> bool:
        """Handles a message about forming a unit; returns False for other messages."""
        match body:
            case wire.UnitTerms():
                with self._changed:
                    self._read_terms(conn, peer, body)
                    self._changed.notify_all()
            case wire.UnitKey() if self.rank_of(conn) is not None:
                self.meet(body)
            case wire.UnitKey():
                log.warning("%s is not a member of this unit; its key is dropped", peer)
            case wire.UnitDone():
                if (rank := self.rank_of(conn)) is not None:
                    self._done.add(rank)
                return False
            case _:
                return False
        return True

    def _own_terms(self) -> wire.UnitTerms:
        return wire.UnitTerms(self.place.rank, {"size": str(self.place.size), **self.terms})

    def _read_terms(self, conn: str, peer: str, body: wire.UnitTerms) -> None:
        info, rank, mate = self._named.get(peer), body.rank, self._mates.get(body.rank)
        if mate is None and info is not None and info.unit_rank == rank != self.place.rank:
            mate = self._mates[rank] = _Mate(conn, info)  # a member of lower rank opens the connection
            self.post.send(conn, self._own_terms())
        if mate is None or mate.conn != conn:  # a new scheduler may announce the member later; the member retries
            log.warning("%s claims to be rank %d of this unit, but was not announced: ignored", peer, rank)
            self.post.disconnect(conn)
            return
        if (problem := self._difference(mate.info.name, body.terms)) and self._error is None:
            self._error = ConfigError(problem)
        mate.is_equal = True

    def _difference(self, name: str, theirs: Mapping[str, str]) -> str:
        """Returns an error that names a setting in which the member differs; "" if it differs in none."""
        ours = self._own_terms().terms
        for key in [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]:
            what = "data_parallel_size" if key == "size" else key
            return (
                f"{called(what)}: {name} has {theirs.get(key, 'none')}, but this member of the unit "
                f"{self.place.name} has {ours.get(key, 'none')}; start all members with the same value"
            )
        return ""

    def closed(self, conn: str, reason: str) -> None:
        """Handles the end of a connection. If its member had not sent its terms yet, the connection is tried again."""
        with self._changed:
            for rank, mate in list(self._mates.items()):
                if mate.conn != conn:
                    continue
                if not mate.is_equal:
                    del self._mates[rank]
                    return
                if have_ended(self._done, rank, self.place.rank):
                    return
                if self._error is None:
                    name = self.place.name
                    self._error = InstanceLost(f"{mate.info.name}, member {rank} of the unit {name}: {reason}")
                self._changed.notify_all()
                self.lost(rank, mate.info.name, reason)
