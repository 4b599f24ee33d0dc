"""Admits connections: counts them in total and by address, and tracks which are idle and for how long.

A connection is busy while one of its requests is answered; otherwise it is idle. The limits apply to busy connections.
Some further connections are admitted, so that probes are answered when a limit is reached. When these are used up, too,
each new connection replaces the one that has been idle longest. Knows nothing of sockets or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from pd_cluster.errors import Overloaded, Unavailable
from pd_cluster.settings.routing_settings import ConnectionLimits

HEAD_TIMEOUT_S = 10.0  # the time from connect, or from a later request's first byte, to the end of its headers
BODY_TIMEOUT_S = 65.0  # the time from the headers' end to the body's end; routes answer with an error after 60 s
PARTING_TIMEOUT_S = 2.0  # the time that a rejected client has to read the reason
NUM_SPARE_PER_HOST = 16


class LimitedConnection(Protocol):
    """The limiter's view of a connection."""

    def evict(self) -> None:
        """Closes the connection at once; it has no request."""

    def expire(self) -> bool:
        """Times out a slow client. Returns False if the client is not at fault; it then gets as much time again."""


class _Nobody:
    """Placeholder for a connection that has ended."""

    def evict(self) -> None:
        return

    def expire(self) -> bool:
        return True


NOBODY: LimitedConnection = _Nobody()


class ConnectionState(Enum):
    IDLE = "idle"
    BUSY = "busy"
    PROBED = "probed"  # answering a probe, which is never refused
    GONE = "gone"


@dataclass(slots=True, eq=False)
class _Host:
    """The connections from one address."""

    num_open: int = 0
    num_busy: int = 0
    idle: dict[AdmittedConnection, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class AdmittedConnection:
    """One connection, from its admission to its end."""

    connection: LimitedConnection
    address: str
    descriptor: int
    host: _Host
    state: ConnectionState = ConnectionState.IDLE


class Deadlines:
    """Connections with the same timeout, so that they expire in the order in which they started."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._ends_s: dict[AdmittedConnection, float] = {}

    def begin(self, admitted: AdmittedConnection) -> None:
        """Starts the timeout unless it is running."""
        if admitted not in self._ends_s:
            self._ends_s[admitted] = self._clock() + self._timeout_s

    def end(self, admitted: AdmittedConnection) -> None:
        self._ends_s.pop(admitted, None)

    def sweep(self) -> None:
        now_s = self._clock()
        late = []
        for admitted, end_s in self._ends_s.items():
            if end_s > now_s:
                break
            late.append(admitted)
        for admitted in late:
            self.end(admitted)
            if not admitted.connection.expire():
                self.begin(admitted)


class ConnectionLimiter:
    """Limits the connections of one listener. `num_descriptors` is how many this process may have open."""

    def __init__(
        self, limits: ConnectionLimits, num_descriptors: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self.heads = Deadlines(HEAD_TIMEOUT_S, clock)
        self.bodies = Deadlines(BODY_TIMEOUT_S, clock)
        self.partings = Deadlines(PARTING_TIMEOUT_S, clock)
        # The system assigns the lowest free descriptor, so a high number means that few are left.
        self._end_of_admitted = num_descriptors - limits.num_kept_descriptors
        self._end_of_requests = self._end_of_admitted - min(limits.spare, max(4, self._end_of_admitted // 8))
        self._num_beyond = 0  # connections with a high descriptor
        self._idle: dict[AdmittedConnection, None] = {}  # idle longest first
        self._hosts: dict[str, _Host] = {}
        self.num_open = 0
        self.num_busy = 0

    def admit(self, connection: LimitedConnection, address: str, descriptor: int) -> AdmittedConnection | None:
        """Admits a connection, and starts the timeout of its first headers; None if there is no idle one to replace.

        `address` is "" for connections without an address, such as those of a Unix socket.
        """
        host = self._hosts.get(address) or _Host()
        limits = self.limits
        if limits.per_host and address and host.num_open >= limits.per_host + NUM_SPARE_PER_HOST:
            has_capacity = self._evict(host.idle)
        elif self.num_open >= limits.total + limits.spare or descriptor >= self._end_of_admitted or self._num_beyond:
            has_capacity = self._evict(self._idle)
        else:
            has_capacity = True
        if not has_capacity:
            return None
        self._hosts[address] = host
        host.num_open += 1
        self.num_open += 1
        self._num_beyond += descriptor >= self._end_of_admitted
        admitted = AdmittedConnection(connection, address, descriptor, host)
        self._idle[admitted] = host.idle[admitted] = None
        self.heads.begin(admitted)
        return admitted

    def evict_idle(self) -> bool:
        """Closes the connection that has been idle longest. Returns False if none is idle."""
        return self._evict(self._idle)

    def _evict(self, idle: dict[AdmittedConnection, None]) -> bool:
        admitted = next(iter(idle), None)
        if admitted is None:
            return False
        connection = admitted.connection
        self.left(admitted)
        connection.evict()
        return True

    def _breaks_up_a_crowd(self, admitted: AdmittedConnection) -> bool:
        """Closes the connection that has been idle longest, if most are idle, because these hold the low descriptors.

        Returns whether it did. If most connections have requests, the few idle ones are new or are probes.
        """
        is_crowd = len(self._idle) > 2 * self.num_busy and next(iter(self._idle)) is not admitted
        return is_crowd and self._evict(self._idle)

    def begin_request(self, admitted: AdmittedConnection, is_probe: bool) -> None:
        """Makes a connection busy. Raises Unavailable or Overloaded. Probes are never refused or counted as busy."""
        if admitted.state is not ConnectionState.IDLE:  # a pipelined request is not counted again
            return
        if is_probe:
            self._move(admitted, ConnectionState.PROBED)
            return
        limits, host = self.limits, admitted.host
        if limits.per_host and admitted.address and host.num_busy >= limits.per_host:
            raise Overloaded(
                f"this address has {host.num_busy} connections with requests, the most that one address may have "
                f"(--max-connections-per-host); wait for some of them"
            )
        is_short = admitted.descriptor >= self._end_of_requests and not self._breaks_up_a_crowd(admitted)
        if self.num_busy >= limits.total or is_short:
            raise Unavailable(
                f"{self.num_busy} connections have requests, and this server takes no more (--max-connections, "
                f"ulimit -n); try again"
            )
        self._move(admitted, ConnectionState.BUSY)

    def end_request(self, admitted: AdmittedConnection) -> None:
        if admitted.state in (ConnectionState.BUSY, ConnectionState.PROBED):
            self._move(admitted, ConnectionState.IDLE)

    def left(self, admitted: AdmittedConnection) -> None:
        """Records the end of a connection in any state. Further calls do nothing."""
        if admitted.state is ConnectionState.GONE:
            return
        for deadlines in (self.heads, self.bodies, self.partings):
            deadlines.end(admitted)
        self._move(admitted, ConnectionState.GONE)
        admitted.connection = NOBODY  # breaks the cycle: the connection refers to this object
        self.num_open -= 1
        self._num_beyond -= admitted.descriptor >= self._end_of_admitted
        admitted.host.num_open -= 1
        if not admitted.host.num_open:
            del self._hosts[admitted.address]

    def sweep(self) -> None:
        """Expires late connections; must be called about once a second."""
        for deadlines in (self.heads, self.bodies, self.partings):
            deadlines.sweep()

    def _move(self, admitted: AdmittedConnection, state: ConnectionState) -> None:
        host = admitted.host
        if admitted.state is ConnectionState.IDLE:
            del self._idle[admitted], host.idle[admitted]
        elif admitted.state is ConnectionState.BUSY:
            self.num_busy -= 1
            host.num_busy -= 1
        if state is ConnectionState.IDLE:
            self._idle[admitted] = host.idle[admitted] = None
        elif state is ConnectionState.BUSY:
            self.num_busy += 1
            host.num_busy += 1
        admitted.state = state
