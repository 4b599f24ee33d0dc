"""Reads an encoder's mail on the mailbox's thread."""

from __future__ import annotations

import queue

from pd_cluster import wire
from pd_cluster.engine.encode.worker import EncodeWorker
from pd_cluster.engine.handover.events import ConnClosed, ConnOpened, Event, Mail, StopEngine


class EncoderMail:
    """The mailbox's handler: everything becomes an event for the encoder's thread."""

    def __init__(self, inbox: queue.SimpleQueue[Event], worker: EncodeWorker) -> None:
        self._inbox, self._worker = inbox, worker

    def load(self) -> wire.Load:
        return self._worker.load

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self._inbox.put(ConnOpened(conn, peer, kind))

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if isinstance(body, wire.LinkValue):  # an end of a pair waits for it
            self._worker.meet(conn, body)
        else:
            self._inbox.put(Mail(conn, peer, body))

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self._inbox.put(ConnClosed(conn, peer, reason))

    def on_fatal(self, error: BaseException) -> None:
        self._inbox.put(StopEngine(error))
