"""The links from a prefill instance to encoders. State × event table in docs/protocol/handover.md.

Runs on the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pd_cluster import wire
from pd_cluster.engine.handover.links.link_ends import Post
from pd_cluster.engine.handover.links.network_policy import NetworkPolicy
from pd_cluster.engine.handover.links.out_link import FIRST_BACKOFF_S, LAST_BACKOFF_S, WAITING
from pd_cluster.errors import told
from pd_cluster.extras.encoders.feature_events import EncoderReached, EncoderUnreached, FeatureEvent
from pd_cluster.extras.encoders.feature_files import PAIRS, SHM, FeatureEndpoint, Shape, ways
from pd_cluster.extras.encoders.feature_reader import FeatureReader
from pd_cluster.net.peer_admission import peer_key
from pd_cluster.numerics import Numerics
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.transport_table import AUTO, needs_trusted_network
from pd_cluster.types import LinkState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncoderTerms:
    """The model and numerics that both ends of a link must share, and the transports that this end allows."""

    model_identity: str
    numerics: Numerics
    place: FeatureEndpoint
    kv_transport: str = AUTO
    network_policy: NetworkPolicy = field(default_factory=NetworkPolicy)

    @property
    def ways(self) -> list[wire.TransportName]:
        return ways(self.kv_transport)

    def problem(self, asked: wire.EncoderOpen) -> str:
        """Returns why an encoder with these terms cannot serve a prefill instance; "" if it can."""
        if asked.model_identity != self.model_identity:
            return (
                f"the encoder serves another model ({self.model_identity[:12]}) than the prefill instance "
                f"({asked.model_identity[:12]}); start all with the same --model"
            )
        own, others = self.numerics, asked.numerics
        for name in ("device", "dtype", "hf_overrides"):
            if (mine := getattr(own, name)) != (its := getattr(others, name)):
                flag = name.replace("_", "-")
                return (
                    f"the encoder has --{flag} {mine}, the prefill instance --{flag} {its}; start both with the same "
                    f"value"
                )
        if not set(self.ways) & set(asked.transports):
            return (
                f"features need a transport that --kv-transport allows at both ends: {' or '.join((SHM, *PAIRS))} "
                f"(the encoder has {self.kv_transport}); omit the flag, or run without encoders"
            )
        return ""


@dataclass(slots=True)
class _Link:
    info: wire.PeerInfo
    state: LinkState = WAITING
    conn: str = ""
    due_s: float = 0.0  # waiting: time of the next attempt; opening: the deadline
    backoff_s: float = FIRST_BACKOFF_S
    num_steps: int = 0  # the encoder's number of steps in the last heartbeat
    progress_s: float = 0.0  # the time when `num_steps` last grew


class EncoderLinks:
    """Keeps a link to each encoder. Calls `lost(conn, reason)` when a connection will deliver no more features."""

    def __init__(
        self,
        terms: EncoderTerms,
        post: Post,
        report: Callable[[FeatureEvent], None],
        lost: Callable[[str, str], None],
        clock: Callable[[], float],
        timeouts: Timeouts,
    ) -> None:
        self._terms, self._post, self._report, self._lost = terms, post, report, lost
        self._clock, self._timeouts = clock, timeouts
        self._links: dict[str, _Link] = {}  # by the encoder's name@epoch
        self._readers: dict[str, FeatureReader] = {}  # by connection; the mailbox's thread also reads it

    def set_peers(self, peers: list[wire.PeerInfo]) -> None:
        """Keeps links to exactly these encoders."""
        wanted = {peer_key(info.name, info.epoch): info for info in peers}
        for peer in [peer for peer in self._links if peer not in wanted]:
            self._close(self._links.pop(peer), "the scheduler no longer needs it")
        for peer, info in wanted.items():
            self._links.setdefault(peer, _Link(info))
        self.tick()

    def tick(self) -> None:
        now_s = self._clock()
        for link in self._links.values():
            if link.state.phase == "waiting" and now_s >= link.due_s:
                self._open(link)
            elif link.state.phase == "opening" and now_s >= link.due_s:
                self._retry(link, f"no answer within {3 * self._timeouts.connect_timeout_s:g} s")

    def states(self) -> dict[str, LinkState]:
        return {peer: link.state for peer, link in self._links.items()}

    def knows(self, conn: str) -> bool:
        return self._by_conn(conn) is not None

    def conn_to(self, peer: str) -> str:
        """Returns the connection to an encoder; "" if the link is not up."""
        link = self._links.get(peer)
        return link.conn if link is not None and link.state.is_open else ""

    def heard(self, conn: str, num_steps: int) -> None:
        """Records the encoder's number of steps; a new number means that it has computed images for some instance."""
        link = self._by_conn(conn)
        if link is not None and num_steps != link.num_steps:
            link.num_steps, link.progress_s = num_steps, self._clock()

    def progress_s(self, conn: str) -> float:
        """Returns when this instance last heard that the encoder had computed an image."""
        link = self._by_conn(conn)
        return link.progress_s if link is not None else 0.0

    def fetch(self, conn: str, done: wire.EncodeDone, shape: Shape | None) -> None:
        """Starts to read features; FeaturesRead or `lost` follows.

        `shape` None: no leg needs the features, but they may still arrive.
        """
        if (reader := self._readers.get(conn)) is not None:
            reader.read(done, shape)

    def meet(self, conn: str, value: wire.LinkValue) -> None:
        """Passes an encoder's link value to its reader. Runs on the mailbox's thread."""
        if (reader := self._readers.get(conn)) is not None:
            reader.meeting.put(value.key, value.value)

    # ---- events

    def on_opened(self, conn: str) -> None:
        if (link := self._by_conn(conn)) is None:
            return
        terms, ways = self._terms, self._ways_to(link)
        if terms.ways and not ways:
            self._refuse(link, terms.network_policy.problem(peer_key(link.info.name, link.info.epoch)))
            return
        self._post.send(conn, wire.EncoderOpen(terms.model_identity, terms.numerics, ways))

    def on_closed(self, conn: str, reason: str) -> None:
        if (link := self._by_conn(conn)) is not None:
            self._retry(link, reason)

    def on_answer(self, conn: str, answer: wire.EncoderAnswer) -> None:
        link = self._by_conn(conn)
        if link is None or link.state.phase != "opening" or conn in self._readers:
            return
        if answer.problem:
            self._refuse(link, answer.problem)
            return
        if answer.group and answer.transport not in self._ways_to(link):
            self._refuse(link, f"the encoder chose {answer.transport!r:.40}, which this instance does not allow")
            return
        post = partial(self._post.send, conn)
        self._readers[conn] = FeatureReader(conn, answer, self._terms.place, post, self._report)

    def handle(self, event: EncoderReached | EncoderUnreached) -> None:
        link = self._by_conn(event.conn)
        if link is None:
            return
        if isinstance(event, EncoderReached):
            link.state, link.backoff_s = LinkState("up", (event.transport,)), FIRST_BACKOFF_S
            log.info("link to %s is up over %s", link.info.name, link.state.over)
        elif event.retry:
            self._retry(link, event.reason)
        else:
            way_out = self._terms.network_policy.problem(peer_key(link.info.name, link.info.epoch))
            way_out = way_out or f"on another host, both need a --kv-transport that allows {' or '.join(PAIRS)}"
            self._refuse(link, f"{event.reason}; {way_out}")

    # ---- internal

    def _ways_to(self, link: _Link) -> list[wire.TransportName]:
        """Returns the transports over which features may come from this encoder."""
        problem = self._terms.network_policy.problem(peer_key(link.info.name, link.info.epoch))
        return [each for each in self._terms.ways if not (problem and needs_trusted_network(each))]

    def _by_conn(self, conn: str) -> _Link | None:
        return next((link for link in self._links.values() if link.conn == conn), None) if conn else None

    def _open(self, link: _Link) -> None:
        info = link.info
        link.conn = self._post.connect(info.name, info.epoch, info.host, info.control_port, info.public_key)
        link.state = LinkState("opening", reason=link.state.reason)
        link.due_s = self._clock() + 3 * self._timeouts.connect_timeout_s

    def _refuse(self, link: _Link, reason: str) -> None:
        log.error("%s cannot compute images for this instance: %s", link.info.name, told(reason))
        self._close(link, reason)
        link.state = LinkState("refused", reason=reason)

    def _retry(self, link: _Link, reason: str) -> None:
        self._close(link, reason)
        link.state, link.due_s = LinkState("waiting", reason=reason), self._clock() + link.backoff_s
        link.backoff_s = min(2 * link.backoff_s, LAST_BACKOFF_S)

    def _close(self, link: _Link, reason: str) -> None:
        conn, link.conn = link.conn, ""
        if not conn:
            return
        if (reader := self._readers.pop(conn, None)) is not None:
            reader.close()
        if link.state.is_open:
            log.warning("link to %s is down: %s", link.info.name, told(reason))
        self._post.disconnect(conn)
        self._lost(conn, f"the link to {link.info.name} is down: {reason}")
