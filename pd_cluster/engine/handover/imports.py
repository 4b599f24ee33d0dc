"""The decode side of every transfer: receives a request's KV cache.

docs/protocol/handover.md has the state × event table; every method here is one event. This module uses no torch,
sockets or clock of its own: sends, copies and reports go through the ports that the constructor receives, so that tests
can drive the same code through any order of events.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pd_cluster import wire
from pd_cluster.engine.handover.transfer_terms import TransferTerms
from pd_cluster.engine.scheduling.group_holdings import GroupHoldings
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.step import beam_groups, beam_search
from pd_cluster.errors import QuarantineFull
from pd_cluster.types import Request, Status, TokenOutput

log = logging.getLogger(__name__)


class ImportPorts(Protocol):
    """The services that Imports needs."""

    def send(self, conn: str, body: wire.Body) -> None: ...

    def precision(self, conn: str) -> str:
        """Returns how KV cache received over this link differs from KV cache computed here; "" if it is the same."""

    def begin(
        self, conn: str, transfer_id: str, tables: Sequence[list[int]], first_tokens: Sequence[int], num_tokens: int
    ) -> None:
        """Lets the link's threads write the KV of a prompt of `num_tokens`, and its state if the model has states.

        For each group of layers, `tables` has the blocks to write, and `first_tokens` the first token that this
        instance lacks.
        """

    def forget(self, conn: str, transfer_id: str) -> None:
        """Makes the link's threads stop writing this transfer; `on_drained` follows, even if the link is down."""

    def progress_s(self, conn: str) -> float: ...

    def left_s(self, transfer_id: str) -> float:
        """Returns the expected time until the end of a transfer whose KV cache has arrived completely."""


class ImportState(enum.Enum):
    EXPECTED = "expected"  # submitted, but not offered
    OFFERED = "offered"  # offered, but not submitted
    QUEUED = "queued"
    LANDING = "landing"
    CONFIRMING = "confirming"
    DRAINING = "draining"


ABOUT_TO_JOIN = (ImportState.LANDING, ImportState.CONFIRMING)


@dataclass(slots=True)
class Import:
    transfer_id: str
    state: ImportState
    since_s: float
    conn: str = ""
    num_tokens: int = 0
    variant: str = ""
    request: Request | None = None
    num_cached_tokens: int = 0  # tokens that the peer had cached
    first_tokens: list[TokenOutput] = field(default_factory=list)
    num_wanted_tokens: int = 0  # tokens that the cache here lacks in the first group of layers; set with the credit
    is_imminent: bool = False  # its whole KV cache has arrived, and a step may wait until it joins


class ImportOutcomes(Protocol):
    def offered(self, request: Request, num_cached_tokens: int) -> None:
        """Called when an offer arrives. The peer computes the prompt, and had cached this many of its tokens."""

    def joined(self, request: Request, sequences: list[Request], first_tokens: list[TokenOutput]) -> None:
        """Called when the request's KV has arrived; these sequences take part in the next step."""

    def import_ended(self, request: Request, error: str | None) -> None:
        """Ends the leg at this instance; `error` None: another process reports the reason."""

    def pull_ended(self, request: Request, num_tokens: int) -> None:
        """Called when a pull has ended; it brought the KV cache of this many tokens."""


class Imports:
    """Transfers from peers. A landing reserves blocks for its prompt and `growth_tokens` further tokens."""

    def __init__(
        self,
        scheduler: StepScheduler,
        ports: ImportPorts,
        outcomes: ImportOutcomes,
        terms: TransferTerms,
        growth_tokens: int,
        vocab_size: int,
    ) -> None:
        self._scheduler = scheduler
        self._ports = ports
        self._outcomes = outcomes
        self._clock, self._timeouts, self._note = terms.clock, terms.timeouts, terms.note
        self._growth_tokens = growth_tokens
        self._vocab_size = vocab_size
        self._imports: dict[str, Import] = {}  # in order of their offers
        self.num_landings = 0
        self.num_wanted_tokens = self.num_landed_tokens = 0
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._imports)

    @property
    def num_expected(self) -> int:
        return sum(1 for each in self._imports.values() if each.state is ImportState.EXPECTED)

    @property
    def num_queued(self) -> int:
        return sum(1 for i in self._imports.values() if i.state in (ImportState.EXPECTED, ImportState.QUEUED))

    @property
    def num_quarantined_blocks(self) -> int:
        """Counts the landing blocks of abandoned transfers, which a transport may still write.

        Only blocks of the first group of layers count, as in the pool's other figures.
        """
        return self._num_draining_blocks(self._scheduler.groups[0], 0.0)

    def check_quarantine(self, most_share: float) -> None:
        """Raises QuarantineFull if transfers abandoned long ago hold more than this share of a group's blocks."""
        for group in self._scheduler.groups:
            num_blocks = self._num_draining_blocks(group, self._timeouts.transfer_timeout_s)
            most = math.ceil(most_share * group.blocks.num_blocks)  # rounded up: pools of states are small
            if num_blocks > most:
                raise QuarantineFull(num_blocks, most)

    def _num_draining_blocks(self, group: GroupHoldings, least_s: float) -> int:
        draining = (i for i in self._imports.values() if i.state is ImportState.DRAINING and i.request is not None)
        before_s = self._clock() - least_s
        return sum(len(group.held(i.request)) for i in draining if i.request is not None and i.since_s <= before_s)

    def num_incoming(self, batch: str) -> int:
        """Counts requests whose KV will land without further action here.

        Returns 0 if any request still waits for blocks or belongs to another batch.
        """
        total = 0
        for each in self._imports.values():
            if each.state is ImportState.DRAINING or (each.request is not None and each.request.is_pull):
                continue
            if each.request is None or each.request.batch != batch or each.state is ImportState.QUEUED:
                return 0
            total += each.request.sampling.max_tokens > 1  # with one token, P sends the whole answer
        return total

    def submit(self, request: Request) -> None:
        found = self._imports.get(request.transfer_id)
        if found is None:
            new = Import(request.transfer_id, ImportState.EXPECTED, self._clock(), request=request)
            self._imports[request.transfer_id] = new
        elif found.state is ImportState.OFFERED:
            found.request = request
            found.state = ImportState.QUEUED
            self._check_offer(found)
        else:
            self._outcomes.import_ended(request, f"transfer {request.transfer_id} is under way for another request")

    def pull(self, request: Request, conn: str) -> None:
        """Requests the beginning of a prompt from a peer, over the link from that peer, and expects its offer."""
        found = Import(request.transfer_id, ImportState.EXPECTED, self._clock(), conn, request=request)
        self._imports[request.transfer_id] = found
        num_tokens, root = len(request.prompt_token_ids), self._scheduler.root(request)
        self._ports.send(conn, wire.Pull(request.transfer_id, request.order, num_tokens, root))

    def on_offer(self, conn: str, offer: wire.Offer, peer: str = "") -> None:
        """Handles an offer from `peer` (name@epoch) over its connection."""
        found = self._imports.pop(offer.transfer_id, None)
        if found is not None and found.state is not ImportState.EXPECTED:
            self._imports[offer.transfer_id] = found  # a repeated offer; the first one counts
            return
        request = found.request if found is not None else None
        if found is not None and request is not None and peer not in ("", request.peer):
            shown = {"transfer_id": offer.transfer_id}
            log.warning("%s offers %s, which %s should offer", peer, offer.transfer_id, request.peer, extra=shown)
            self._imports[offer.transfer_id] = found
            return
        state = ImportState.OFFERED if request is None else ImportState.QUEUED
        offered = Import(offer.transfer_id, state, self._clock(), conn, offer.num_tokens, offer.variant, request)
        offered.num_cached_tokens = offer.num_cached_tokens
        self._imports[offer.transfer_id] = offered
        self._note(offer.transfer_id, "offered")
        self._check_offer(offered)

    def credit(self) -> None:
        """Reserves landing blocks for queued offers, by priority and then by arrival, while there are enough blocks.

        An offer gets blocks in all groups of layers or in none.
        """
        queued = [i for i in self._imports.values() if i.state is ImportState.QUEUED]
        for waiting in sorted(queued, key=lambda i: i.request.priority if i.request is not None else 0):
            request = waiting.request
            assert request is not None
            request.kv_precision = self._ports.precision(waiting.conn)
            growth = 0 if request.is_pull else min(request.sampling.max_tokens, self._growth_tokens)
            num_tokens = waiting.num_tokens + growth
            if not self._scheduler.can_land(request, num_tokens):
                if request.is_pull:
                    continue
                return
            first_tokens = self._scheduler.land(request, num_tokens)
            waiting.state = ImportState.LANDING
            waiting.since_s = self._clock()
            waiting.num_wanted_tokens = waiting.num_tokens - first_tokens[0]
            self.num_wanted_tokens += 0 if request.is_pull else waiting.num_wanted_tokens
            self._ports.begin(waiting.conn, waiting.transfer_id, request.tables, first_tokens, waiting.num_tokens)
            self._note(waiting.transfer_id, "credited", first_token=first_tokens[0])
            self._ports.send(waiting.conn, wire.Credit(waiting.transfer_id, first_tokens))

    @property
    def imminent_s(self) -> float | None:
        """Returns the expected seconds until a request joins whose whole KV cache has arrived; None: there is none.

        The request's transfer lacks only the last message or P's answer. Transfers for which a step has already waited
        in vain do not count.
        """
        found = [each for each in self._imports.values() if each.is_imminent and each.state in ABOUT_TO_JOIN]
        return min((self._ports.left_s(each.transfer_id) for each in found), default=None)

    def mark_late(self) -> None:
        """Marks as late the imminent transfers that should have joined by now, so that no step waits for them again."""
        for each in self._imports.values():
            if each.is_imminent and not self._ports.left_s(each.transfer_id):
                each.is_imminent = False

    def on_arrived(self, transfer_id: str) -> None:
        found = self._imports.get(transfer_id)
        if found is not None and found.state is ImportState.LANDING:
            found.is_imminent = True

    def on_landed(self, transfer_id: str, first_tokens: list[TokenOutput]) -> None:
        """Waits for P's answer to the `Confirm` that the link's thread has sent, perhaps during a step.

        P may refuse the transfer.
        """
        found = self._imports.get(transfer_id)
        if found is None or found.state is not ImportState.LANDING:
            return
        if not self._are_first_tokens(found.request, first_tokens):
            self.on_fault(transfer_id, "the first-token outputs do not belong to this request")
        else:
            found.state = ImportState.CONFIRMING
            found.since_s = self._clock()
            found.first_tokens = first_tokens

    def on_confirmed(self, conn: str, answer: wire.Confirmed) -> None:
        found = self._find(conn, answer.transfer_id)
        if found is None or found.state is not ImportState.CONFIRMING or found.request is None:
            return
        if not answer.held:
            self._give_up(found, "the prefill instance had already released the KV cache")
            return
        request = found.request
        del self._imports[answer.transfer_id]
        if request.is_pull:
            self._scheduler.keep_pulled(request)
            self._outcomes.pull_ended(request, found.num_wanted_tokens)
            return
        self.num_landings += 1
        self.num_landed_tokens += found.num_wanted_tokens
        self._note(answer.transfer_id, "confirmed")
        self._scheduler.landed(request)
        start = beam_groups.start if request.sampling.beam_width else StepScheduler.start_sequences
        sequences = start(self._scheduler, request, found.first_tokens)
        self._outcomes.joined(request, sequences, found.first_tokens)

    def on_fault(self, transfer_id: str, reason: str) -> None:
        """Cancels a transfer because the link's thread could not land it."""
        found = self._imports.get(transfer_id)
        if found is not None and found.state is ImportState.LANDING:
            self._ports.send(found.conn, wire.Cancel(transfer_id, reason))
            self._give_up(found, reason)

    def on_revoke(self, conn: str, transfer_id: str) -> None:
        found = self._find(conn, transfer_id)
        if found is not None:
            self._give_up(found, None)

    def abort(self, request: Request) -> None:
        """Ends a transfer that is no longer needed.

        Does not wait; landing blocks are freed after the last write to them.
        """
        found = self._imports.get(request.transfer_id)
        if found is not None and found.state is not ImportState.DRAINING:
            if found.conn:
                self._ports.send(found.conn, wire.Cancel(found.transfer_id, "aborted"))
            self._give_up(found, None)

    def on_link_down(self, conn: str, reason: str) -> None:
        for found in [i for i in self._imports.values() if i.conn == conn]:
            peer = found.request.peer if found.request is not None else "the prefill instance"
            self._give_up(found, f"the link from {peer} is down: {reason}")

    def on_drained(self, transfer_id: str) -> None:
        found = self._imports.get(transfer_id)
        if found is not None and found.state is ImportState.DRAINING:
            del self._imports[transfer_id]
            if found.request is not None and found.request.status is Status.LANDING:
                self._scheduler.finish(found.request)

    def expire(self) -> None:
        now_s = self._clock()
        for found in list(self._imports.values()):
            if found.state in (ImportState.LANDING, ImportState.CONFIRMING, ImportState.OFFERED):
                alive_s = found.since_s
                if found.state is not ImportState.OFFERED:
                    alive_s = max(alive_s, self._ports.progress_s(found.conn))
                if now_s - alive_s > self._timeouts.transfer_timeout_s:
                    self.num_expired += 1
                    reason = f"the transfer made no progress for {self._timeouts.transfer_timeout_s:g} s"
                    self._ports.send(found.conn, wire.Cancel(found.transfer_id, reason))
                    self._give_up(found, reason)

    def _check_offer(self, found: Import) -> None:
        reason = _mismatch(found, found.request) if found.request is not None else ""
        if reason:
            self._ports.send(found.conn, wire.Cancel(found.transfer_id, reason))
            self._give_up(found, reason)
        elif found.request is not None and found.request.is_pull:
            del found.request.prompt_token_ids[found.num_tokens :]
        elif found.request is not None:
            self._outcomes.offered(found.request, found.num_cached_tokens)

    def _are_first_tokens(self, request: Request | None, tokens: list[TokenOutput]) -> bool:
        """Whether these are valid tokens for position 0 of each sequence, and at least one sequence continues.

        A pull has no first tokens.
        """
        if request is not None and request.is_pull:
            return not tokens
        if request is not None and request.sampling.beam_width:
            return beam_search.are_first_tokens(request, tokens, self._vocab_size)
        if request is None or len(tokens) != request.sampling.n or all(t.finish_reason is not None for t in tokens):
            return False
        expected = [(request.request_id, request.attempt, index, 0) for index in range(request.sampling.n)]
        found = [(t.request_id, t.attempt, t.index, t.position) for t in tokens]
        return found == expected and all(0 <= t.token_id < self._vocab_size for t in tokens)

    def _give_up(self, found: Import, error: str | None) -> None:
        """Ends the leg. `error` None: the peer or the scheduler reports the reason.

        Landing blocks are freed later, by `on_drained`.
        """
        if found.state is ImportState.DRAINING:
            return
        request = found.request
        if found.state in (ImportState.LANDING, ImportState.CONFIRMING):
            found.state = ImportState.DRAINING
            found.since_s = self._clock()
            self._ports.forget(found.conn, found.transfer_id)
        else:
            del self._imports[found.transfer_id]
        if request is not None and request.is_pull:
            self._outcomes.pull_ended(request, 0)
        elif request is not None:
            self._outcomes.import_ended(request, error)

    def _find(self, conn: str, transfer_id: str) -> Import | None:
        found = self._imports.get(transfer_id)
        return found if found is not None and found.conn == conn else None


def _mismatch(found: Import, request: Request) -> str:
    """Returns why an offer does not match the request's prompt, or ""."""
    num_tokens = len(request.prompt_token_ids)
    if request.is_pull:
        num_tokens = min(num_tokens, max(found.num_tokens, request.num_cached_tokens + 1))
    if found.num_tokens != num_tokens:
        return f"offered {found.num_tokens} tokens for a prompt of {len(request.prompt_token_ids)}"
    if found.variant != request.order.variant:
        offered, wanted = (each[:12] or "no adapter" for each in (found.variant, request.order.variant))
        return f"offered KV cache with {offered} for a request with {wanted}"
    return ""
