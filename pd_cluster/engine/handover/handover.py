"""One worker's links and transfers in both directions: sends and receives KV cache.

Runs on the engine's thread, except for `intercept`.
"""

from __future__ import annotations

import logging
import queue
from dataclasses import dataclass
from typing import Protocol

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import Event, HandedOver, Offered
from pd_cluster.engine.handover.exports import ExportOutcomes, Exports
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.handover_timing import HandoverTiming
from pd_cluster.engine.handover.imports import ImportOutcomes, Imports
from pd_cluster.engine.handover.links.in_lanes import InLanes
from pd_cluster.engine.handover.links.in_links import InLinks
from pd_cluster.engine.handover.links.link_ends import PeerProgress
from pd_cluster.engine.handover.links.out_link_table import OutLinkTable
from pd_cluster.engine.handover.links.out_links import OutLinks
from pd_cluster.engine.handover.shipping import ShipSizes
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.net.peer_admission import peer_key
from pd_cluster.transport.link_events import Arrived, Drained, Landed, LandFault, LinkFailed
from pd_cluster.types import Request

log = logging.getLogger(__name__)


class Outcomes(ExportOutcomes, ImportOutcomes, Protocol):
    """Receives the outcomes of legs."""


@dataclass(frozen=True, slots=True)
class HandoverTerms:
    """`is_prefill`: whether this is a prefill instance, until the scheduler changes its role.

    An import reserves blocks for `growth_tokens` further tokens.
    """

    is_prefill: bool
    growth_tokens: int
    vocab_size: int


class Handover:
    def __init__(
        self, context: HandoverContext, scheduler: StepScheduler, outcomes: Outcomes, terms: HandoverTerms
    ) -> None:
        self.is_prefill = terms.is_prefill
        self.credits: queue.SimpleQueue[tuple[str, wire.Credit]] = queue.SimpleQueue()  # a running step reads it, too
        self._context, self._scheduler = context, scheduler
        self._peers: set[str] = set()  # the live workers, name@epoch
        self._progress = PeerProgress(context.clock)
        lanes = InLanes(context, self._progress)
        self.imports = Imports(scheduler, lanes, outcomes, context.terms, terms.growth_tokens, terms.vocab_size)
        self.in_links = InLinks(context, lanes, self.imports)
        table = OutLinkTable(context, self._progress)
        self.exports = Exports(table, outcomes, context.terms, ShipSizes.of(context.endpoint.layouts))
        self.out_links = OutLinks(context, table, self.exports)
        self.timing = HandoverTiming([layout.to_info() for layout in context.endpoint.layouts])

    def tick(self) -> None:
        """Checks deadlines. Raises QuarantineFull."""
        self.out_links.tick()
        self.exports.expire()
        self.imports.expire()
        self.imports.check_quarantine(self._context.max_quarantined_share)

    def abort(self, request: Request) -> None:
        """Ends transfers that are no longer needed; landing blocks are freed once nothing writes to them."""
        self.exports.abort(request)
        self.imports.abort(request)

    def set_peers(self, peers: list[wire.PeerInfo]) -> None:
        """Sets the live workers and their current roles, including this worker's."""
        self._context.endpoint.network_policy.set_peers(peers)
        partners = [each for each in peers if not each.is_forming]
        self._peers = {peer_key(each.name, each.epoch) for each in partners}
        for own in [each for each in peers if peer_key(each.name, each.epoch) == self._context.endpoint.own]:
            if self.is_prefill != (own.role == "prefill"):
                log.info("this instance's role is now %s", own.role)
            self.is_prefill = own.role == "prefill"
        self.out_links.set_peers(list(filter(self._is_partner, partners)) if self.is_prefill else [])

    def _is_partner(self, peer: wire.PeerInfo) -> bool:
        """Whether this prefill instance sends KV cache to that peer.

        The peer must be a decode instance or, if pulls are on, another prefill instance.
        """
        if peer.role == "decode":
            return True
        is_own = peer_key(peer.name, peer.epoch) == self._context.endpoint.own
        return self._context.pulls_prefixes and peer.role == "prefill" and not is_own

    # ---- steps

    def layers_done(self, num_layers: int) -> None:
        """Ships finished layers while a step runs, including those of transfers whose credits have just arrived."""
        odd = []
        while not self.credits.empty():
            conn, credit = self.credits.get_nowait()
            if self.exports.is_valid_credit(conn, credit):
                self.exports.on_credit(conn, credit)
            else:
                odd.append((conn, credit))
        for each in odd:
            self.credits.put(each)
        self.exports.layers_done(num_layers)

    # ---- events

    def intercept(self, conn: str, body: wire.Body) -> bool:
        """Handles a message that must not wait for a step's end, on the mailbox's thread. Returns False for others."""
        match body:
            case wire.KVFrame():  # it goes directly to the link's thread
                self.in_links.route(conn, body)
            case wire.LinkValue():  # one end of a link waits for it
                self.in_links.meet(conn, body)
                self.out_links.meet(conn, body)
            case wire.Confirm(transfer_id):  # D gets the answer at once
                if self.exports.held.answer(conn, body, self._context.post.send, self._context.note):
                    self._context.report(HandedOver(conn, transfer_id, self._context.clock()))
            case wire.Credit():  # a running step reads it, too
                self.credits.put((conn, body))
                return False
            case _:
                return False
        return True

    def read(self, conn: str, peer: str, body: wire.Body) -> bool:
        """Handles another worker's message about links or transfers; returns False for other messages."""
        match body:
            case wire.Heartbeat(load):
                if load is not None and (self.in_links.table.is_open(conn) or self.out_links.knows(conn)):
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
            case wire.Pull():
                self._lend(conn, peer, body)
            case wire.Offer():
                if self.in_links.table.is_open(conn):  # otherwise the link has failed here, and the peer is notified
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

    def _lend(self, conn: str, peer: str, pull: wire.Pull) -> None:
        """Answers a pull: offers the beginning of the prompt that is cached here, or revokes the pull if none is."""
        request = Request(pull.transfer_id, pull.order, transfer_id=pull.transfer_id, peer=peer, is_pull=True)
        request.prompt_token_ids = request.prompt_token_ids[: pull.num_tokens]
        is_up = self.out_links.table.link_to(peer) == conn
        has_link = is_up or self.out_links.table.is_waking(peer, conn)
        if has_link and request.key not in self._scheduler.requests and self._scheduler.lend(request, pull.root):
            self.exports.lend(request, conn, is_up)
        else:
            self._context.post.send(conn, wire.Revoke(pull.transfer_id))

    def handle(self, event: Event) -> None:
        """Handles events of links' threads, and those of the mailbox's thread about transfers; ignores all others."""
        match event:
            case Arrived(transfer_id):
                self.imports.on_arrived(transfer_id)
            case Landed(transfer_id, first_tokens):
                self.imports.on_landed(transfer_id, first_tokens)
            case LandFault(transfer_id, reason):
                self.imports.on_fault(transfer_id, reason)
            case Drained(transfer_id):
                self.imports.on_drained(transfer_id)
            case HandedOver(conn, transfer_id, at_s):
                if (found := self.exports.complete_since(conn, transfer_id)) is not None:
                    num_tokens, since_s, is_pull = found
                    self.timing.add(self.out_links.state_of(conn), num_tokens, at_s - since_s, is_pull)
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
