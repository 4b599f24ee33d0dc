"""The links of a worker from prefill instances. State × event table in docs/protocol.md.

Runs on the engine's thread, except for `route`, which hands headers to the link's own thread straight from the mailbox.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.engine.links import LinkThreads, Post, Progress, Side
from pd_cluster.errors import LinkError
from pd_cluster.kv.layout import KVLayout, check_pair
from pd_cluster.transport.events import Drained, Report
from pd_cluster.transport.receiving import ReceiveThread
from pd_cluster.types import Note, note_nothing

log = logging.getLogger(__name__)


class InLinks:
    """D's end of every link. `down(conn, reason)` is told while the link's thread still acknowledges drains."""

    def __init__(
        self,
        side: Side,
        post: Post,
        threads: LinkThreads,
        report: Report,
        down: Callable[[str, str], None],
        progress: Progress,
        note: Note = note_nothing,
    ) -> None:
        self._side = side
        self._post = post
        self._make = threads
        self._report = report
        self._down = down
        self._progress = progress
        self._note = note
        self._threads: dict[str, ReceiveThread] = {}
        self._link_ids: dict[str, str] = {}
        self._received_nbytes = 0  # by links that are gone
        self._num_dropped = 0

    @property
    def received_nbytes(self) -> int:
        return self._received_nbytes + sum(t.received_nbytes for t in self._threads.values())

    @property
    def num_dropped(self) -> int:
        """KV frames that were no part of their link."""
        return self._num_dropped + sum(t.num_dropped for t in self._threads.values())

    def on_open(self, conn: str, peer: str, opened: wire.LinkOpen) -> None:
        if conn in self._threads:
            return
        try:
            self._check(opened)
            key = self._side.key(opened.link_id, peer, self._side.own)
            thread = self._make.receive_thread(
                conn, peer, opened, key, lambda body: self._post.send(conn, body), self._report, self._note
            )
        except LinkError as error:
            log.error("refused %s: %s", peer, error)
            self._post.send(conn, wire.LinkRefused(opened.link_id, str(error), error.retry))
            return
        self._link_ids[conn] = opened.link_id
        self._threads[conn] = thread
        thread.start()

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
            self._num_dropped += thread.num_dropped
            thread.close()
        self._progress.forget(conn)

    def is_open(self, conn: str) -> bool:
        return conn in self._threads

    def route(self, conn: str, frame: wire.KVFrame) -> None:
        """On the mailbox's thread."""
        thread = self._threads.get(conn)
        if thread is not None:
            thread.put(frame)

    # ---- ImportPorts

    def send(self, conn: str, body: wire.Body) -> None:
        self._post.send(conn, body)

    def precision(self, conn: str) -> str:
        thread = self._threads.get(conn)
        return thread.precision if thread is not None else ""

    def begin(self, conn: str, transfer_id: str, block_ids: list[int], first_token: int, num_tokens: int) -> None:
        thread = self._threads.get(conn)
        if thread is not None:
            thread.begin(transfer_id, block_ids, first_token, num_tokens)

    def forget(self, conn: str, transfer_id: str) -> None:
        thread = self._threads.get(conn)
        if thread is not None:
            thread.forget(transfer_id)
        else:
            self._report(Drained(transfer_id))

    def progress_s(self, conn: str) -> float:
        thread = self._threads.get(conn)
        if thread is not None:
            self._progress.moved(conn, thread.received_nbytes)
        return self._progress.at_s(conn)

    def _check(self, opened: wire.LinkOpen) -> None:
        side = self._side
        if opened.model_identity != side.model_identity:
            raise LinkError(
                f"the models differ: the prefill instance serves {opened.model_identity[:12]}, "
                f"the decode instance {side.model_identity[:12]}; start both with the same --model"
            )
        for name in opened.options.__struct_fields__:
            theirs, ours = getattr(opened.options, name), getattr(side.options, name)
            if theirs != ours:
                raise LinkError(
                    f"--kv-{name.replace('_', '-')} differs: {theirs} on the prefill instance and {ours} on the "
                    f"decode instance; start both with the same"
                )
        check_pair(KVLayout.from_info(opened.layout), side.layout)
