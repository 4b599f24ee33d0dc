"""One worker's links and transfers in both directions: KV cache is handed over and taken in here.

Runs on the engine's thread, except for the calls that mail.py makes on the mailbox's.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pd_cluster import wire
from pd_cluster.engine.handover.events import Event, HandedOver, Offered
from pd_cluster.engine.handover.exports import Exports
from pd_cluster.engine.handover.imports import Imports
from pd_cluster.engine.handover.in_links import InLinks
from pd_cluster.engine.handover.links import LaneEnds, PeerProgress, Post, Side
from pd_cluster.engine.handover.out_links import OutLinks
from pd_cluster.engine.handover.pairs import LinkPlaces, Rests
from pd_cluster.engine.handover.tails import Tails
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.net.admission import peer_key
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.events import Arrived, Drained, Landed, LandFault, LinkFailed
from pd_cluster.types import Note, Request, TokenOutput

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Means:
    """The surroundings that a worker's links and transfers share.

    `report` takes events from their threads to the engine's thread.
    """

    side: Side
    post: Post
    ends: LaneEnds
    report: Callable[[Event], None]
    clock: Callable[[], float]
    timeouts: Timeouts
    note: Note
    kv_open_links: int = 0
    max_quarantined_blocks: int | None = None  # None: any number


class Outcomes(Protocol):
    """Receives the outcomes of legs; `error` None: handed over, or reported elsewhere."""

    def offered(self, request: Request, num_cached_tokens: int) -> None: ...
    def export_ended(self, request: Request, error: str | None) -> None: ...
    def import_ended(self, request: Request, error: str | None) -> None: ...
    def joined(self, request: Request, sequences: list[Request], first_tokens: list[TokenOutput]) -> None: ...


class Handover:
    """`is_prefill`: the role until the scheduler changes it. An offer reserves room for `growth_tokens` more."""

    def __init__(
        self,
        means: Means,
        scheduler: StepScheduler,
        outcomes: Outcomes,
        is_prefill: bool,
        growth_tokens: int,
        vocab_size: int,
    ) -> None:
        side, clock, timeouts, note = means.side, means.clock, means.timeouts, means.note
        self.is_prefill = is_prefill
        self.credits: queue.SimpleQueue[tuple[str, wire.Credit]] = queue.SimpleQueue()  # also read while a step runs
        self._means = means
        self._peers: set[str] = set()  # the live workers, name@epoch
        self._progress = PeerProgress(clock)
        self.in_links = InLinks(
            side,
            means.post,
            means.ends,
            means.report,
            self._in_down,
            self._progress,
            note,
            LinkPlaces(means.kv_open_links),
            Tails(clock),
        )
        rests = Rests(
            means.kv_open_links,
            uses=lambda conn: self.exports.uses(conn),
            woken=lambda peer, conn: self.exports.link_up(peer, conn),
            lost=lambda peer, reason: self.exports.link_lost(peer, reason),
        )
        self.out_links = OutLinks(
            side, means.post, means.ends, means.report, self._out_down, self._progress, clock, timeouts, note, rests
        )
        self.exports = Exports(
            scheduler,
            self.out_links,
            outcomes.export_ended,
            clock,
            timeouts,
            side.layout.num_layers,
            side.layout.block_nbytes,
            note=note,
        )
        self.imports = Imports(
            scheduler,
            self.in_links,
            outcomes.import_ended,
            outcomes.joined,
            clock,
            timeouts,
            growth_tokens,
            vocab_size,
            note,
            outcomes.offered,
        )

    def tick(self) -> None:
        """Checks deadlines. Raises QuarantineFull."""
        self.out_links.tick()
        self.exports.expire()
        self.imports.expire()
        if self._means.max_quarantined_blocks is not None:
            self.imports.check_quarantine(self._means.max_quarantined_blocks)

    def abort(self, request: Request) -> None:
        """Ends transfers that are no longer wanted; landing blocks are freed once nothing writes to them."""
        self.exports.abort(request)
        self.imports.abort(request)

    def set_peers(self, peers: list[wire.PeerInfo]) -> None:
        """Learns which workers are alive and their current roles, this worker's included."""
        self._peers = {peer_key(each.name, each.epoch) for each in peers}
        self._means.side.crossing.hear(peers)
        for own in [each for each in peers if peer_key(each.name, each.epoch) == self._means.side.own]:
            if self.is_prefill != (own.role == "prefill"):
                log.info("this instance is %s now", own.role)
            self.is_prefill = own.role == "prefill"
        self.out_links.set_peers([each for each in peers if each.role == "decode"] if self.is_prefill else [])

    # ---- a step

    def layers_done(self, num_layers: int) -> None:
        """Ships finished layers while a step runs, also for a credit that has just arrived."""
        odd = []
        while not self.credits.empty():
            conn, credit = self.credits.get_nowait()
            if self.exports.makes_sense(conn, credit):
                self.exports.on_credit(conn, credit)
            else:
                odd.append((conn, credit))
        for each in odd:
            self.credits.put(each)
        self.exports.layers_done(num_layers)

    # ---- events

    def read(self, conn: str, peer: str, body: wire.Body) -> bool:
        """Handles another worker's message about links or transfers; False: the message is about something else."""
        match body:
            case wire.Heartbeat(load):
                if load is not None and (self.in_links.is_open(conn) or self.out_links.knows(conn)):
                    self._progress.heard(conn, load)
            case wire.LinkOpen() if not self.out_links.knows(conn):
                self.in_links.on_open(conn, peer, body, peer in self._peers)
            case wire.LinkAnswer():
                self.out_links.on_answer(conn, body)
            case wire.LinkReady():
                self.out_links.on_ready(conn, body)
            case wire.LinkRefused():
                self.out_links.on_refused(conn, body)
            case wire.LinkRest() if self.out_links.knows(conn):
                self.out_links.on_rest(conn, body)
            case wire.LinkRest():
                self.in_links.on_rest(conn, body)
            case wire.LinkYield():
                self.out_links.on_yield(conn, body)
            case wire.LinkQueued():
                self.out_links.on_queued(conn, body)
            case wire.Offer():
                if self.in_links.is_open(conn):  # otherwise it has failed here, and the peer is notified
                    self.imports.on_offer(conn, body, peer)
            case wire.Credit():
                while not self.credits.empty():
                    self.exports.on_credit(*self.credits.get_nowait())
            case wire.Revoke():
                self.imports.on_revoke(conn, body.transfer_id)
            case wire.Cancel():
                self.exports.on_cancel(conn, body)
            case wire.Confirmed():
                self.imports.on_confirmed(conn, body)
            case _:
                return False
        return True

    def handle(self, event: Event) -> None:
        """Handles an event of a link's thread, or of the mailbox's thread about a transfer; ignores others."""
        match event:
            case Arrived(transfer_id):
                self.imports.on_arrived(transfer_id)
            case Landed(transfer_id, first_tokens):
                self.imports.on_landed(transfer_id, first_tokens)
            case LandFault(transfer_id, reason):
                self.imports.on_fault(transfer_id, reason)
            case Drained(transfer_id):
                self.imports.on_drained(transfer_id)
            case HandedOver(conn, transfer_id):
                self.exports.on_handed_over(conn, transfer_id)
            case Offered(conn):
                self.out_links.on_offered(conn)
            case LinkFailed(conn, reason):
                self.out_links.on_down(conn, reason)
                self.in_links.on_failed(conn, reason)

    def opened(self, conn: str) -> None:
        self.out_links.on_opened(conn)

    def closed(self, conn: str, reason: str) -> None:
        self.out_links.on_down(conn, reason)
        self.in_links.on_down(conn, reason)

    def _out_down(self, conn: str, reason: str) -> None:
        self.exports.on_link_down(conn, reason)

    def _in_down(self, conn: str, reason: str) -> None:
        self.imports.on_link_down(conn, reason)
