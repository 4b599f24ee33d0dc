"""The prefill side of every transfer: sends a request's KV cache.

docs/protocol/handover.md has the state × event table; every method here is one event. This module uses no torch,
sockets or clock of its own: sends, copies and reports go through the ports that the constructor receives, so that tests
can drive the same code through any order of events.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pd_cluster import wire
from pd_cluster.engine.handover.held_transfers import HeldTransfers
from pd_cluster.engine.handover.shipping import ShipLimits, ShipProgress, ShipSizes
from pd_cluster.engine.handover.transfer_terms import TransferTerms
from pd_cluster.types import Request, Status, TokenOutput


class ExportPorts(Protocol):
    """The services that Exports needs. `conn` identifies a link's connection."""

    def link_to(self, peer: str) -> str | None:
        """Returns the connection of the link to this peer, if it is up."""

    def awaken(self, peer: str) -> bool:
        """Opens the link to this peer if it is at rest; `link_up` or `link_lost` follows.

        Returns False if it is not at rest.
        """

    def limits(self, conn: str, group: int) -> ShipLimits: ...

    def send(self, conn: str, body: wire.Body) -> None: ...

    def ship(self, conn: str, group: int, transfer_id: str, index: int, piece: wire.KVPiece) -> None:
        """Queues a KVChunk and its payload in the lanes of one group of layers."""

    def ship_end(self, conn: str, group: int, end: wire.KVEnd) -> None:
        """Queues the last message of these lanes, after all chunks."""

    def drop(self, conn: str, transfer_id: str) -> None:
        """Discards the queued messages of this transfer."""

    def progress_s(self, conn: str) -> float:
        """Returns when the peer last made progress."""


class ExportState(enum.Enum):
    AWAITING = "awaiting"  # waits for its link; has no connection
    OFFERED = "offered"
    STREAMING = "streaming"
    ENDED = "ended"


@dataclass(slots=True)
class Export:
    """One transfer. `progress`: which part of each group of layers has been sent."""

    request: Request
    conn: str
    state: ExportState
    since_s: float
    progress: list[ShipProgress]
    num_wanted: int = 0  # tokens that the peer's cache lacks in the first group of layers
    step_stop: int = 0  # prompt tokens that will be computed when the current step ends
    first_tokens: list[TokenOutput] = field(default_factory=list)


class ExportOutcomes(Protocol):
    def export_ended(self, request: Request, error: str | None) -> None:
        """Ends the leg; `error` None: the transfer was handed over."""


class Exports:
    def __init__(self, ports: ExportPorts, outcomes: ExportOutcomes, terms: TransferTerms, sizes: ShipSizes) -> None:
        self._ports = ports
        self._outcomes = outcomes
        self._clock, self._timeouts, self._note = terms.clock, terms.timeouts, terms.note
        self._sizes = sizes
        self._exports: dict[str, Export] = {}
        self._step: list[Export] = []  # exports whose prompts the current step computes
        self.held = HeldTransfers()
        self.num_handed_over = 0
        self.num_failed = 0
        self.num_expired_credits = 0
        self.num_expired_holds = 0

    def __len__(self) -> int:
        return len(self._exports)

    def lend(self, request: Request, conn: str, is_up: bool = True) -> None:
        """Offers the beginning of a prompt, which P holds for this peer, over the connection that the pull came from.

        If that link is not up yet, the offer waits for it.
        """
        progress = [ShipProgress(group, len(request.prompt_token_ids)) for group in self._sizes.groups]
        export = Export(request, conn, ExportState.AWAITING, self._clock(), progress)
        self._exports[request.transfer_id] = export
        if is_up:
            self._offer(export, conn)

    def admitted(self, request: Request) -> None:
        """Offers the transfer once P holds its blocks."""
        conn = self._ports.link_to(request.peer)
        if conn is None and not self._ports.awaken(request.peer):
            self._ended(request, f"no link from this instance to {request.peer}")
            return
        num_tokens = len(request.prompt_token_ids)
        progress = [ShipProgress(group, num_tokens) for group in self._sizes.groups]
        export = Export(request, conn or "", ExportState.AWAITING, self._clock(), progress)
        self._exports[request.transfer_id] = export
        if conn is not None:
            self._offer(export, conn)

    # ---- steps

    def computing(self, chunks: list[tuple[Request, int]]) -> bool:
        """Prepares for a step.

        Returns whether `layers_done` must be called, because some of the step's KV will be handed over.
        """
        self._step = []
        for request, num_tokens in chunks:
            export = self._exports.get(request.transfer_id) if request.leg == "prefill" else None
            if export is not None:
                export.step_stop = request.num_computed_tokens + num_tokens
                self._step.append(export)
        return bool(self._step)

    def layers_done(self, num_layers: int) -> None:
        """Ships layers once the step has written the KV of its tokens in the first `num_layers` attention layers.

        A draft head's layer is last, so exports to peers without this head are complete before it.
        """
        for export in self._step:
            if export.state is ExportState.STREAMING:
                self._ship_layers(export, num_layers)

    def computed(self, request: Request, first_tokens: list[TokenOutput]) -> None:
        """Handles a step that computed a part of the prompt.

        A step that computed the prompt's last token also chose the sequences' first tokens.
        """
        export = self._exports.get(request.transfer_id)
        if export is None:
            return
        if request.status is Status.FINISHED:  # it has only one token, so the engine has released the blocks
            self._let_go(export)
            self._revoke(export)
            return
        export.first_tokens = first_tokens
        if export.state is ExportState.STREAMING:
            self._ship(export)

    # ---- messages from the peer

    def on_credit(self, conn: str, credit: wire.Credit) -> None:
        """Starts to stream. May also be called while a step runs, if the credit is valid."""
        export = self._find(conn, credit.transfer_id)
        if export is None or export.state is not ExportState.OFFERED:
            return
        if not self.is_valid_credit(conn, credit):
            self.abort(export.request)
            wanted = ", ".join(map(str, credit.first_tokens))
            self._ended(export.request, f"{export.request.peer} sent a credit with invalid first tokens: {wanted}")
        else:
            export.state = ExportState.STREAMING
            for each, first_token in zip(export.progress, credit.first_tokens, strict=True):
                each.next_token = first_token
            export.num_wanted = len(export.request.prompt_token_ids) - credit.first_tokens[0]
            self._note(credit.transfer_id, "credited", first_token=credit.first_tokens[0])
            self._ship(export)

    def is_valid_credit(self, conn: str, credit: wire.Credit) -> bool:
        """Whether a credit is valid. An invalid credit ends its request, which is possible only between steps."""
        export = self._find(conn, credit.transfer_id)
        if export is None:
            return True
        wanted = list(zip(export.progress, credit.first_tokens, strict=False))
        is_whole = len(wanted) == len(export.progress) == len(credit.first_tokens)
        return is_whole and all(
            each.accepts(first_token, self._ports.limits(conn, group))
            for group, (each, first_token) in enumerate(wanted)
        )

    def complete_since(self, conn: str, transfer_id: str) -> tuple[int, float, bool] | None:
        """Returns how many tokens the peer wanted, when the last of them were queued, and whether this is a pull.

        None: the last tokens are not queued yet.
        """
        export = self._find(conn, transfer_id)
        if export is None or export.state is not ExportState.ENDED:
            return None
        return export.num_wanted, export.since_s, export.request.is_pull

    def on_handed_over(self, conn: str, transfer_id: str) -> None:
        """Ends the leg, because P has confirmed the transfer to D; see HeldTransfers."""
        export = self._find(conn, transfer_id)
        if export is not None:
            self._let_go(export)
            self._ended(export.request, None)

    def on_cancel(self, conn: str, cancel: wire.Cancel) -> None:
        export = self._find(conn, cancel.transfer_id)
        if export is not None:
            self._give_up(export, f"{export.request.peer} abandoned the transfer: {cancel.reason}")

    def abort(self, request: Request) -> None:
        """Withdraws a transfer that is no longer needed. The caller releases the request's blocks."""
        export = self._exports.get(request.transfer_id)
        if export is not None and not self._let_go(export):
            self._revoke(export)

    def link_up(self, peer: str, conn: str) -> None:
        """Sends the offers that waited for a link at rest."""
        for export in self._awaiting(peer):
            self._offer(export, conn)

    def link_lost(self, peer: str, reason: str) -> None:
        for export in self._awaiting(peer):
            self._give_up(export, f"the link to {peer} did not open: {reason}")

    def uses(self, conn: str) -> bool:
        """Whether a transfer is under way over this link."""
        return any(export.conn == conn for export in self._exports.values())

    def on_link_down(self, conn: str, reason: str) -> None:
        for export in [e for e in self._exports.values() if e.conn == conn]:
            self._give_up(export, f"the link to {export.request.peer} is down: {reason}")

    def expire(self) -> None:
        """Ends every transfer whose peer has made no progress within its time limit.

        A streaming transfer does not expire, because it waits only for this engine.
        """
        now_s = self._clock()
        for export in [e for e in self._exports.values() if e.state is not ExportState.STREAMING]:
            offered, awaiting = export.state is ExportState.OFFERED, export.state is ExportState.AWAITING
            limit_s = self._timeouts.credit_timeout_s if offered else self._timeouts.transfer_timeout_s
            if now_s - max(export.since_s, self._ports.progress_s(export.conn)) > limit_s:
                self.num_expired_credits += offered
                self.num_expired_holds += not offered and not awaiting
                what = "did not take the transfer" if offered else "did not finish the transfer"
                handed_over = self._let_go(export)
                if not handed_over:
                    self._revoke(export)
                reason = f"{export.request.peer} {what} within {limit_s:g} s"
                if awaiting:
                    reason = (
                        f"the link to {export.request.peer} is at rest, and the decode instance had no capacity to "
                        f"open it within {limit_s:g} s"
                    )
                self._ended(export.request, None if handed_over else reason)

    # ---- internal

    def _offer(self, export: Export, conn: str) -> None:
        request = export.request
        export.conn, export.state, export.since_s = conn, ExportState.OFFERED, self._clock()
        self._note(request.transfer_id, "offered")
        num_tokens, num_cached = len(request.prompt_token_ids), max(0, request.num_cached_tokens)
        self._ports.send(conn, wire.Offer(request.transfer_id, num_tokens, request.order.variant, num_cached))

    def _awaiting(self, peer: str) -> list[Export]:
        found = [each for each in self._exports.values() if each.state is ExportState.AWAITING]
        return [each for each in found if each.request.peer == peer]

    def _revoke(self, export: Export) -> None:
        if export.conn:
            self._ports.send(export.conn, wire.Revoke(export.request.transfer_id))

    def _ship_layers(self, export: Export, num_layers: int) -> None:
        """Ships complete blocks of the layers that the running step has finished, if they are large enough for a
        payload.
        """
        stop, least = export.step_stop, self._sizes.min_nbytes
        for group, each in enumerate(export.progress):
            limits, table = self._ports.limits(export.conn, group), export.request.tables[group]
            self._send(export, group, each.finished_layers(num_layers, stop, limits, table, least))

    def _ship(self, export: Export) -> None:
        """Ships all complete blocks that are not queued yet.

        Once the first token exists, it also ships the incomplete block, the states and the last message of each lane.
        """
        export.since_s = self._clock()
        request, done = export.request, bool(export.first_tokens) or export.request.is_pull
        num_computed = len(request.prompt_token_ids) if done else request.num_computed_tokens
        for group, each in enumerate(export.progress):
            limits = self._ports.limits(export.conn, group)
            self._send(export, group, each.computed(num_computed, limits, request.tables[group]))
        if not done:
            return
        export.state = ExportState.ENDED
        self.held.add(export.conn, request.transfer_id)
        for group, each in enumerate(export.progress):
            end = wire.KVEnd(request.transfer_id, each.num_chunks, each.num_own_tokens, export.first_tokens)
            self._ports.ship_end(export.conn, group, end)

    def _send(self, export: Export, group: int, pieces: Iterable[wire.KVPiece]) -> None:
        for piece in pieces:
            each = export.progress[group]
            self._ports.ship(export.conn, group, export.request.transfer_id, each.num_chunks, piece)
            each.num_chunks += 1

    def _ended(self, request: Request, error: str | None) -> None:
        self.num_handed_over += error is None
        self.num_failed += error is not None
        self._outcomes.export_ended(request, error)

    def _find(self, conn: str, transfer_id: str) -> Export | None:
        export = self._exports.get(transfer_id)
        return export if export is not None and export.conn == conn else None

    def _give_up(self, export: Export, error: str) -> None:
        handed_over = self._let_go(export)
        self._ended(export.request, None if handed_over else error)

    def _let_go(self, export: Export) -> bool:
        """Forgets the transfer. Returns True if P has already confirmed it to D, which then owns it."""
        transfer_id = export.request.transfer_id
        del self._exports[transfer_id]
        if export in self._step:
            self._step.remove(export)
        if export.conn:
            self._ports.drop(export.conn, transfer_id)
        return export.state is ExportState.ENDED and not self.held.take(export.conn, transfer_id)
