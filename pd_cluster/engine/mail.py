"""Reads a worker's mail on the mailbox's thread; nearly all of it becomes an event for the engine's thread."""

from __future__ import annotations

import queue

from pd_cluster import wire
from pd_cluster.engine.handover.events import ConnClosed, ConnOpened, Event, Mail, StopEngine
from pd_cluster.engine.loop import Job


class Mailroom:
    """The mailbox's handler, for a job of any kind. `inbox` is its loop's."""

    def __init__(self, inbox: queue.SimpleQueue[Event], job: Job) -> None:
        self._inbox, self._job = inbox, job

    def load(self) -> wire.Load:
        return self._job.load

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self._inbox.put(ConnOpened(conn, peer, kind))

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if not self._job.intercept(conn, body):
            self._inbox.put(Mail(conn, peer, body))

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self._inbox.put(ConnClosed(conn, peer, reason))

    def on_fatal(self, error: BaseException) -> None:
        self._inbox.put(StopEngine(error))
