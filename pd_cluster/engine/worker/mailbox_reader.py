"""Reads a worker's mail on the mailbox's thread, and turns nearly all of it into events for the engine's thread."""

from __future__ import annotations

import queue

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import ConnClosed, ConnOpened, Event, Mail, StopEngine
from pd_cluster.engine.unit.member_connections import MemberConnections
from pd_cluster.engine.worker.worker_loop import Job


class MailboxReader:
    """The mailbox's handler, for any job. `inbox` belongs to the job's loop.

    A member of a unit gets mail before it has a job. Until then, `mates` reads the members' messages, and other mail
    waits in the inbox.
    """

    def __init__(self, inbox: queue.SimpleQueue[Event], mates: MemberConnections | None = None) -> None:
        self._inbox, self._mates = inbox, mates
        self._schedulers: set[str] = set()  # connections of schedulers; only schedulers announce members
        self._job: Job | None = None

    def serve(self, job: Job) -> None:
        """Lets this job intercept mail from now on."""
        self._job = job

    def load(self) -> wire.Load:
        return wire.Load() if self._job is None else self._job.load

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        if self._mates is not None:
            if kind == "scheduler":
                self._schedulers.add(conn)
            self._mates.opened(conn)
        self._inbox.put(ConnOpened(conn, peer, kind))

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if self._mates is not None:
            if isinstance(body, wire.Peers) and conn in self._schedulers:
                self._mates.hear(body.peers)
            elif self._mates.read(conn, peer, body):
                return
        if self._job is None or not self._job.intercept(conn, body):
            self._inbox.put(Mail(conn, peer, body))

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        if self._mates is not None:
            self._schedulers.discard(conn)
            self._mates.closed(conn, reason)
        self._inbox.put(ConnClosed(conn, peer, reason))

    def on_fatal(self, error: BaseException) -> None:
        if self._mates is not None:
            self._mates.fail(error)
        self._inbox.put(StopEngine(error))
