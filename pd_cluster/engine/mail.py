"""Reads a worker's mail on the mailbox's thread; nearly all of it becomes an event for the engine's thread.

Three kinds must not wait for a step: KV headers go straight to their link's thread, credits to a queue that a running
step reads, and the question whether a transfer still stands is answered at once.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.engine.handover.events import ConnClosed, ConnOpened, Event, HandedOver, Mail, StopEngine
from pd_cluster.engine.handover.handover import Handover
from pd_cluster.types import Note


class Mailroom:
    """The mailbox's handler. `send` is the mailbox's own; `load` returns the load for heartbeats."""

    def __init__(
        self,
        inbox: queue.SimpleQueue[Event],
        handover: Handover,
        send: Callable[[str, wire.Body], None],
        note: Note,
        load: Callable[[], wire.Load],
        meet: Callable[[str, wire.LinkValue], None] = lambda conn, value: None,
    ) -> None:
        """`meet`: a link to an encoder that waits for a key, if there is one."""
        self._inbox = inbox
        self._handover = handover
        self._send = send
        self._note = note
        self.load = load
        self._meet = meet

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self._inbox.put(ConnOpened(conn, peer, kind))

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        handover = self._handover
        match body:
            case wire.KVFrame():
                handover.in_links.route(conn, body)
            case wire.LinkValue():  # one end of a link waits for it; no step is involved
                handover.in_links.meet(conn, body)
                handover.out_links.meet(conn, body)
                self._meet(conn, body)
            case wire.Confirm(transfer_id):
                if handover.exports.held.answer(conn, body, self._send, self._note):
                    self._inbox.put(HandedOver(conn, transfer_id))
            case wire.Credit():
                handover.credits.put((conn, body))  # read by a running step
                self._inbox.put(Mail(conn, peer, body))
            case _:
                self._inbox.put(Mail(conn, peer, body))

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self._inbox.put(ConnClosed(conn, peer, reason))

    def on_fatal(self, error: BaseException) -> None:
        self._inbox.put(StopEngine(error))
