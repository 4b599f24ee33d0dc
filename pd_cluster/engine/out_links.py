"""The links of a worker to decode instances. State × event table in docs/protocol.md. Runs on the engine's thread."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from pd_cluster import wire
from pd_cluster.config import Timeouts
from pd_cluster.engine.exports import ShipLimits
from pd_cluster.engine.links import LinkThreads, Post, Progress, Side
from pd_cluster.errors import LinkError
from pd_cluster.kv.layout import KVLayout, check_pair
from pd_cluster.mailbox import peer_key
from pd_cluster.transport.events import Report
from pd_cluster.transport.sending import SendThread
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
    precision: str = ""
    peer_block_size: int = 0  # tokens
    answered: set[wire.TransportName] = field(default_factory=set)  # transports that the peer has chosen so far
    used_s: float = 0.0  # when something was last sent over it

    def __str__(self) -> str:
        if self.state == "up":
            return f"up ({self.transport}, {self.precision})" if self.precision else f"up ({self.transport})"
        return f"{self.state}: {self.reason}" if self.reason else self.state


class OutLinks:
    """P's end of every link. `down(conn, reason)` is told before a link's state is lost."""

    def __init__(
        self,
        side: Side,
        post: Post,
        threads: LinkThreads,
        report: Report,
        down: Callable[[str, str], None],
        progress: Progress,
        clock: Callable[[], float],
        timeouts: Timeouts,
        note: Note = note_nothing,
    ) -> None:
        self._side = side
        self._post = post
        self._make = threads
        self._report = report
        self._down = down
        self._progress = progress
        self._clock = clock
        self._timeouts = timeouts
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
                self._retry(link, f"no answer within {3 * self._timeouts.connect_timeout_s:g} s")
            elif link.state == "up" and now_s - link.used_s > self._timeouts.link_keepalive_s:
                link.used_s = now_s
                if link.thread is not None:
                    link.thread.probe()

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
                model_identity=self._side.model_identity,
                layout=self._side.layout.to_info(),
                num_blocks=self._side.num_blocks,
                offers=link.thread.offers,
                options=self._side.options,
                probe_seed=self._side.probe_seed,
            )
            self._post.send(conn, body)

    def on_answer(self, conn: str, answer: wire.LinkAnswer) -> None:
        link = self._find(conn, answer.link_id)
        if link is None or link.thread is None or link.state != "opening":
            return
        if answer.transport in link.answered:
            self._retry(link, f"{link.info.name} chose {answer.transport} twice")
            return
        link.answered.add(answer.transport)
        peer = KVLayout.from_info(answer.layout)
        try:
            check_pair(self._side.layout, peer)
        except LinkError as error:
            self._refuse(link, str(error))
            return
        link.peer_block_size = peer.block_size
        link.due_s = self._opening_deadline_s()
        link.thread.open(answer.transport, self._side.layout, peer)

    def on_ready(self, conn: str, ready: wire.LinkReady) -> None:
        link = self._find(conn, ready.link_id)
        if link is not None and link.thread is not None and link.state == "opening":
            link.thread.settle()
            link.state, link.reason = "up", ""
            link.transport, link.precision = ready.transport, ready.precision
            link.backoff_s, link.used_s = FIRST_BACKOFF_S, self._clock()
            log.info("link to %s is up over %s", link.info.name, ready.transport)

    def on_refused(self, conn: str, refused: wire.LinkRefused) -> None:
        link = self._find(conn, refused.link_id)
        if link is None:
            return
        if refused.retry:
            self._retry(link, refused.reason)
        else:
            self._refuse(link, refused.reason)

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

    def limits(self, conn: str) -> ShipLimits:
        link = self._by_conn.get(conn)
        if link is None or link.thread is None or not link.peer_block_size:
            return ShipLimits(self._side.layout.block_size, self._side.layout.block_nbytes)
        return ShipLimits(link.peer_block_size, link.thread.max_payload_nbytes)

    def ship(self, conn: str, transfer_id: str, index: int, piece: wire.KVPiece) -> None:
        link = self._by_conn.get(conn)
        if link is not None and link.thread is not None:
            link.used_s = self._clock()
            link.thread.ship(transfer_id, index, piece)

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
        conn = link.conn = self._post.connect(info.name, info.epoch, info.host, info.control_port)
        link.link_id = secrets.token_hex(8)
        link.answered.clear()
        key = self._side.key(link.link_id, self._side.own, peer_key(info.name, info.epoch))
        try:
            link.thread = self._make.send_thread(
                conn, key, lambda body: self._post.send(conn, body), self._report, self._note
            )
        except LinkError as error:
            self._post.disconnect(conn)
            self._retry(link, str(error))
            return
        link.state, link.due_s = "opening", self._opening_deadline_s()
        self._by_conn[conn] = link

    def _opening_deadline_s(self) -> float:
        """For each transport that D tries: it opens, then the probe comes."""
        return self._clock() + 3 * self._timeouts.connect_timeout_s

    def _refuse(self, link: OutLink, reason: str) -> None:
        log.error("%s and this instance cannot be a pair: %s", link.info.name, reason)
        self._close(link, reason)
        link.state, link.reason = "refused", reason

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
