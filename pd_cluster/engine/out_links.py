"""The links of a worker to decode instances. State × event table in docs/protocol.md. Runs on the engine's thread."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from pd_cluster import wire
from pd_cluster.config import Timeouts
from pd_cluster.engine.links import Pool, Post, Progress
from pd_cluster.errors import LinkError
from pd_cluster.mailbox import peer_key
from pd_cluster.transport.base import KVSender
from pd_cluster.transport.threads import Report, SendThread
from pd_cluster.types import Note, note_nothing

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 5.0


@dataclass(slots=True)
class OutLink:
    info: wire.PeerInfo
    state: str = "waiting"  # waiting, opening, up, refused
    reason: str = ""
    conn: str = ""
    link_id: str = ""
    thread: SendThread | None = None
    due_s: float = 0.0  # waiting: when to try again; opening: when to give up
    backoff_s: float = FIRST_BACKOFF_S
    transport: str = ""

    def __str__(self) -> str:
        if self.state == "up":
            return f"up ({self.transport})"
        return f"{self.state}: {self.reason}" if self.reason else self.state


class OutLinks:
    """P's end of every link. `down(conn, reason)` is told before a link's state is lost."""

    def __init__(
        self,
        pool: Pool,
        post: Post,
        make_senders: Callable[[], list[KVSender]],  # may raise LinkError
        report: Report,
        down: Callable[[str, str], None],
        progress: Progress,
        clock: Callable[[], float],
        timeouts: Timeouts,
        checksum: bool,
        note: Note = note_nothing,
    ) -> None:
        self._pool = pool
        self._post = post
        self._make_senders = make_senders
        self._report = report
        self._down = down
        self._progress = progress
        self._clock = clock
        self._timeouts = timeouts
        self._checksum = checksum
        self._note = note
        self._links: dict[str, OutLink] = {}  # by peer's name@epoch
        self._by_conn: dict[str, OutLink] = {}
        self._sent_nbytes = 0  # by links that are gone

    def set_peers(self, peers: list[wire.PeerInfo]) -> None:
        """Links exactly to these."""
        wanted = {peer_key(info.name, info.epoch): info for info in peers}
        for peer in [p for p in self._links if p not in wanted]:
            link = self._links.pop(peer)
            self._close(link, "the instance is gone")
        for peer, info in wanted.items():
            self._links.setdefault(peer, OutLink(info))
        self.tick()

    def tick(self) -> None:
        now_s = self._clock()
        for link in list(self._links.values()):
            if link.state == "waiting" and now_s >= link.due_s:
                self._open(link)
            elif link.state == "opening" and now_s >= link.due_s:
                self._retry(link, f"no answer within {self._timeouts.connect_timeout_s:g} s")

    def states(self) -> dict[str, str]:
        return {peer: str(link) for peer, link in self._links.items()}

    @property
    def sent_nbytes(self) -> int:
        return self._sent_nbytes + sum(link.thread.sent_nbytes for link in self._links.values() if link.thread)

    # ---- events of the connection

    def on_opened(self, conn: str) -> None:
        link = self._by_conn.get(conn)
        if link is not None and link.thread is not None:
            body = wire.LinkOpen(
                link_id=link.link_id,
                model_identity=self._pool.model_identity,
                layout=self._pool.layout.to_info(),
                num_blocks=self._pool.num_blocks,
                offers=link.thread.offers,
            )
            self._post.send(conn, body)

    def on_answer(self, conn: str, answer: wire.LinkAnswer) -> None:
        link = self._find(conn, answer.link_id)
        if link is not None and link.thread is not None and link.state == "opening":
            link.thread.open(answer.transport)

    def on_ready(self, conn: str, ready: wire.LinkReady) -> None:
        link = self._find(conn, ready.link_id)
        if link is not None and link.state == "opening":
            link.state, link.reason, link.transport = "up", "", ready.transport
            link.backoff_s = FIRST_BACKOFF_S
            log.info("link to %s is up over %s", link.info.name, ready.transport)

    def on_refused(self, conn: str, refused: wire.LinkRefused) -> None:
        link = self._find(conn, refused.link_id)
        if link is None:
            return
        if refused.retry:
            self._retry(link, refused.reason)
        else:
            log.error("%s refuses this instance: %s", link.info.name, refused.reason)
            self._close(link, refused.reason)
            link.state, link.reason = "refused", refused.reason

    def on_down(self, conn: str, reason: str) -> None:
        """The connection was lost, or this end's thread failed."""
        link = self._by_conn.get(conn)
        if link is not None:
            self._retry(link, reason)

    def knows(self, conn: str) -> bool:
        return conn in self._by_conn

    # ---- ExportPorts

    def link_to(self, peer: str) -> str | None:
        link = self._links.get(peer)
        return link.conn if link is not None and link.state == "up" else None

    def send(self, conn: str, body: wire.Body) -> None:
        self._post.send(conn, body)

    def ship(self, conn: str, transfer_id: str, sequence: int, first_block: int, block_ids: list[int]) -> None:
        link = self._by_conn.get(conn)
        if link is not None and link.thread is not None:
            link.thread.ship(transfer_id, sequence, first_block, block_ids)

    def ship_end(self, conn: str, end: wire.KVEnd) -> None:
        link = self._by_conn.get(conn)
        if link is not None and link.thread is not None:
            link.thread.ship_end(end)

    def drop(self, conn: str, transfer_id: str) -> None:
        link = self._by_conn.get(conn)
        if link is not None and link.thread is not None:
            link.thread.drop(transfer_id)

    def progress_s(self, conn: str) -> float:
        return self._progress.at_s(conn)

    # ---- inside

    def _open(self, link: OutLink) -> None:
        info = link.info
        try:
            senders = self._make_senders()
        except LinkError as error:
            self._retry(link, str(error))
            return
        link.conn = self._post.connect(info.name, info.epoch, info.host, info.control_port)
        link.link_id = secrets.token_hex(8)
        link.state, link.due_s = "opening", self._clock() + 2 * self._timeouts.connect_timeout_s
        conn = link.conn
        link.thread = SendThread(
            conn,
            senders,
            lambda body: self._post.send(conn, body),
            self._report,
            self._checksum,
            self._pool.layout.block_nbytes,
            self._note,
        )
        self._by_conn[conn] = link

    def _retry(self, link: OutLink, reason: str) -> None:
        self._close(link, reason)
        link.state, link.reason = "waiting", reason
        link.due_s = self._clock() + link.backoff_s
        link.backoff_s = min(2 * link.backoff_s, LAST_BACKOFF_S)

    def _close(self, link: OutLink, reason: str) -> None:
        if self._by_conn.pop(link.conn, None) is None:
            return
        if link.state == "up":
            log.warning("link to %s is down: %s", link.info.name, reason)
        self._down(link.conn, reason)
        self._post.disconnect(link.conn)
        self._progress.forget(link.conn)
        if link.thread is not None:
            self._sent_nbytes += link.thread.sent_nbytes
            link.thread.close()
            link.thread = None

    def _find(self, conn: str, link_id: str) -> OutLink | None:
        link = self._by_conn.get(conn)
        return link if link is not None and link.link_id == link_id else None
