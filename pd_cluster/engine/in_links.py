"""The links of a worker from prefill instances. State × event table in docs/protocol.md.

Runs on the engine's thread, except for `route`, which hands headers to the link's own thread straight from the mailbox.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.engine.links import Pool, Post, Progress
from pd_cluster.errors import LinkError
from pd_cluster.kv.layout import KVLayout, check_pair
from pd_cluster.transport.base import KVReceiver
from pd_cluster.transport.threads import Drained, ReceiveThread, Report
from pd_cluster.types import Note, note_nothing

log = logging.getLogger(__name__)


class InLinks:
    """D's end of every link. `down(conn, reason)` is told while the link's thread still acknowledges drains."""

    def __init__(
        self,
        pool: Pool,
        post: Post,
        make_receivers: Callable[[str, wire.LinkOpen], list[KVReceiver]],  # may raise LinkError
        report: Report,
        down: Callable[[str, str], None],
        progress: Progress,
        note: Note = note_nothing,
    ) -> None:
        self._pool = pool
        self._post = post
        self._make_receivers = make_receivers
        self._report = report
        self._down = down
        self._progress = progress
        self._note = note
        self._threads: dict[str, ReceiveThread] = {}
        self._link_ids: dict[str, str] = {}
        self._received_nbytes = 0

    @property
    def received_nbytes(self) -> int:
        return self._received_nbytes + sum(t.received_nbytes for t in self._threads.values())

    def on_open(self, conn: str, peer: str, opened: wire.LinkOpen) -> None:
        if conn in self._threads:
            return
        try:
            self._check(opened)
            receivers = self._make_receivers(peer, opened)
        except LinkError as error:
            log.error("refused %s: %s", peer, error)
            self._post.send(conn, wire.LinkRefused(opened.link_id, str(error), error.retry))
            return
        self._link_ids[conn] = opened.link_id
        self._threads[conn] = ReceiveThread(
            conn, opened.link_id, receivers, lambda body: self._post.send(conn, body), self._report, self._note
        )

    def on_failed(self, conn: str, reason: str) -> None:
        """This end's thread failed: P shall open a new link."""
        if conn in self._threads:
            self._post.send(conn, wire.LinkRefused(self._link_ids[conn], reason, True))
            self.on_down(conn, reason)

    def on_down(self, conn: str, reason: str) -> None:
        self._down(conn, reason)
        thread = self._threads.get(conn)
        if thread is not None:
            del self._threads[conn], self._link_ids[conn]
            self._received_nbytes += thread.received_nbytes
            thread.close()
        self._progress.forget(conn)

    def is_open(self, conn: str) -> bool:
        return conn in self._threads

    def route(self, conn: str, body: wire.KVChunk | wire.KVEnd) -> None:
        """On the mailbox's thread."""
        thread = self._threads.get(conn)
        if thread is not None:
            thread.put(body)

    # ---- ImportPorts

    def send(self, conn: str, body: wire.Body) -> None:
        self._post.send(conn, body)

    def begin(self, conn: str, transfer_id: str, block_ids: list[int], first_block: int) -> None:
        thread = self._threads.get(conn)
        if thread is not None:
            thread.begin(transfer_id, block_ids, first_block)

    def forget(self, conn: str, transfer_id: str) -> None:
        thread = self._threads.get(conn)
        if thread is not None:
            thread.forget(transfer_id)
        else:
            self._report(Drained(transfer_id))

    def progress_s(self, conn: str) -> float:
        return self._progress.at_s(conn)

    def _check(self, opened: wire.LinkOpen) -> None:
        if opened.model_identity != self._pool.model_identity:
            raise LinkError(
                f"the models differ: the prefill instance serves {opened.model_identity[:12]}, "
                f"the decode instance {self._pool.model_identity[:12]}; start both with the same --model"
            )
        check_pair(KVLayout.from_info(opened.layout), self._pool.layout)
