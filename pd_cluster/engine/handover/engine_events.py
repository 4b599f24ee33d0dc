"""Events that other threads (of the mailbox, of links, of the parent's channel) send to the engine's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from pd_cluster import wire
from pd_cluster.kv.tier_commands import TierContents, TierDone
from pd_cluster.transport.link_events import LinkEvent


@dataclass(frozen=True, slots=True)
class ConnOpened:
    conn: str
    peer: str
    kind: str


@dataclass(frozen=True, slots=True)
class ConnClosed:
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
    """The mailbox's thread has confirmed to D that this transfer is valid, so D owns it now."""

    conn: str
    transfer_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class StopEngine:
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Offered:
    """Another rank has reported its offers for a lane of this connection's link."""

    conn: str


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """The thread that loads adapters has loaded one, or has failed because of `problem`."""

    digest: str
    problem: str


@dataclass(frozen=True, slots=True)
class StageEvent:
    """Base of the events of stages in extras."""


@dataclass(frozen=True, slots=True)
class StartDrain:
    """The worker must drain: it soon accepts no more requests, and stops when all requests have ended."""


Event = (
    ConnOpened
    | ConnClosed
    | Mail
    | HandedOver
    | StopEngine
    | StartDrain
    | Offered
    | AdapterLoaded
    | TierDone
    | TierContents
    | LinkEvent
    | StageEvent
)


def handle_all(inbox: queue.SimpleQueue[Event], handle: Callable[[Event], None], wait_s: float) -> bool:
    """Handles all pending events, waiting at most `wait_s` for the first.

    Returns False to stop. Raises the error that an event reports.
    """
    try:
        event = inbox.get(timeout=wait_s) if wait_s else inbox.get_nowait()
        while True:
            if isinstance(event, StopEngine):
                if event.error is not None:
                    raise event.error
                return False
            handle(event)
            event = inbox.get_nowait()
    except queue.Empty:
        return True
