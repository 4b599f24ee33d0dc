"""What reaches the engine's thread from others: the mailbox, the links' threads, the parent."""

from __future__ import annotations

from dataclasses import dataclass

from pd_cluster import wire
from pd_cluster.engine.gather import Gather
from pd_cluster.transport.events import LinkEvent


@dataclass(frozen=True, slots=True)
class Opened:
    conn: str
    peer: str
    kind: str


@dataclass(frozen=True, slots=True)
class Closed:
    conn: str
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Mail:
    conn: str
    peer: str
    body: wire.Body


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The mailbox's thread has told D that this transfer stood: it is D's now."""

    conn: str
    transfer_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class OfLane:
    """A link has several lanes, and this is of one of them: `gather` knows when all have said it."""

    gather: Gather
    lane: int
    event: LinkEvent


@dataclass(frozen=True, slots=True)
class Offered:
    """Another rank has told what it offers in a lane of this connection's link."""

    conn: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing more, and stop when what is here has ended."""


Event = Opened | Closed | Mail | HandedOver | Stop | Drain | OfLane | Offered | LinkEvent
