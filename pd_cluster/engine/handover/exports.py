"""A request's KV cache leaves: the prefill side of every transfer.

The state × event table is in docs/protocol.md; every method here is one event. No torch, no sockets, no clock of its
own: sends, copies and reports go through the ports that the constructor receives, so that tests can drive the same code
through any order of events.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from pd_cluster import wire
from pd_cluster.engine.handover.held import Held
from pd_cluster.engine.handover.terms import TransferTerms
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.types import Request, Status, TokenOutput

MIN_GROUP_NBYTES = 1 << 20  # fewer bytes of finished layers wait for more


@dataclass(frozen=True, slots=True)
class ShipLimits:
    """The limits that a link's other end and its transport set for pieces."""

    peer_block_size: int  # tokens
    max_payload_nbytes: int
    num_layers: int  # that travel: all, or all but a draft head's


class ExportPorts(Protocol):
    """The services that Exports needs. `conn` is a link's connection."""

    def link_to(self, peer: str) -> str | None:
        """Returns the connection of the link to this peer, if it is up."""

    def awaken(self, peer: str) -> bool:
        """Opens a link that rests: `link_up` or `link_lost` follows. False: none to this peer rests."""

    def limits(self, conn: str) -> ShipLimits: ...

    def send(self, conn: str, body: wire.Body) -> None: ...

    def ship(self, conn: str, transfer_id: str, index: int, piece: wire.KVPiece) -> None:
        """Queues a KVChunk and its payload."""

    def ship_end(self, conn: str, end: wire.KVEnd) -> None:
        """Queues the last message, after all chunks."""

    def drop(self, conn: str, transfer_id: str) -> None:
        """Discards the queued messages of this transfer."""

    def progress_s(self, conn: str) -> float:
        """Returns when the peer last made progress."""


class ExportState(enum.Enum):
    AWAITING = "awaiting"  # its link; it has no connection
    OFFERED = "offered"
    STREAMING = "streaming"
    ENDED = "ended"


@dataclass(slots=True)
class Export:
    """All tokens before `next_token` are queued in all layers that travel, those up to `step_stop` in `num_layers`."""

    request: Request
    conn: str
    state: ExportState
    since_s: float
    next_token: int = 0
    step_stop: int = 0  # prompt tokens that will be computed when the current step has ended
    num_layers: int = 0
    num_chunks: int = 0
    first_tokens: list[TokenOutput] = field(default_factory=list)


class ExportOutcomes(Protocol):
    def export_ended(self, request: Request, error: str | None) -> None:
        """The leg is over; None: it was handed over as intended."""


@dataclass(frozen=True, slots=True)
class ShipSizes:
    """A block's share of each layer decides how many finished layers make a payload."""

    layer_nbytes: int  # of a block, in the largest layer
    min_group_nbytes: int = MIN_GROUP_NBYTES


class Exports:
    def __init__(
        self,
        scheduler: StepScheduler,
        ports: ExportPorts,
        outcomes: ExportOutcomes,
        terms: TransferTerms,
        sizes: ShipSizes,
    ) -> None:
        self._scheduler = scheduler
        self._ports = ports
        self._outcomes = outcomes
        self._clock, self._timeouts, self._note = terms.clock, terms.timeouts, terms.note
        self._layer_nbytes, self._min_group_nbytes = sizes.layer_nbytes, sizes.min_group_nbytes
        self._exports: dict[str, Export] = {}
        self._step: list[Export] = []  # those whose prompts the current step computes
        self.held = Held()
        self.num_handed_over = 0
        self.num_failed = 0
        self.num_expired_credits = 0
        self.num_expired_holds = 0

    def __len__(self) -> int:
        return len(self._exports)

    def admitted(self, request: Request) -> None:
        """Offers the transfer once P holds its blocks."""
        conn = self._ports.link_to(request.peer)
        if conn is None and not self._ports.awaken(request.peer):
            self._ended(request, f"no link from this instance to {request.peer}")
            return
        export = Export(request, conn or "", ExportState.AWAITING, self._clock())
        self._exports[request.transfer_id] = export
        if conn is not None:
            self._offer(export, conn)

    # ---- a step

    def computing(self, chunks: list[tuple[Request, int]]) -> bool:
        """Prepares for a step; returns whether any of it will be handed over, so that `layers_done` must be called."""
        self._step = []
        for request, num_tokens in chunks:
            export = self._exports.get(request.transfer_id) if request.leg == "prefill" else None
            if export is not None:
                export.step_stop = request.num_computed_tokens + num_tokens
                self._step.append(export)
        return bool(self._step)

    def layers_done(self, num_layers: int) -> None:
        """Ships layers: the step has written the KV of its tokens in the first `num_layers` layers.

        A draft head's layer comes last: exports to peers without this head have ended their step before it.
        """
        for export in self._step:
            if export.state is ExportState.STREAMING:
                self._ship_layers(export, num_layers)

    def computed(self, request: Request, first_tokens: list[TokenOutput]) -> None:
        """Handles a step over the prompt; one that reached the end also chose the first token of each sequence."""
        export = self._exports.get(request.transfer_id)
        if export is None:
            return
        if request.status is Status.FINISHED:  # with token one; the engine has released the blocks already
            self._let_go(export)
            self._revoke(export)
            return
        export.first_tokens = first_tokens
        if export.state is ExportState.STREAMING:
            self._ship(export)

    # ---- messages of the peer

    def on_credit(self, conn: str, credit: wire.Credit) -> None:
        """Starts streaming. Also called while a step runs, if the credit makes sense."""
        export = self._find(conn, credit.transfer_id)
        if export is None or export.state is not ExportState.OFFERED:
            return
        if not self.makes_sense(conn, credit):
            self.abort(export.request)
            self._ended(export.request, f"{export.request.peer} wants KV cache from token {credit.first_token} on")
        else:
            export.state = ExportState.STREAMING
            export.next_token = credit.first_token
            self._note(credit.transfer_id, "credited", first_token=credit.first_token)
            self._ship(export)

    def makes_sense(self, conn: str, credit: wire.Credit) -> bool:
        """Whether a credit is valid; an invalid one ends its request, and so must wait until no step runs."""
        export = self._find(conn, credit.transfer_id)
        if export is None:
            return True
        in_prompt = 0 <= credit.first_token <= len(export.request.prompt_token_ids)
        return in_prompt and credit.first_token % self._ports.limits(conn).peer_block_size == 0

    def on_handed_over(self, conn: str, transfer_id: str) -> None:
        """Ends the leg: D has received the answer that the transfer still stood; see Held."""
        export = self._find(conn, transfer_id)
        if export is not None:
            self._let_go(export)
            self._ended(export.request, None)

    def on_cancel(self, conn: str, cancel: wire.Cancel) -> None:
        export = self._find(conn, cancel.transfer_id)
        if export is not None:
            self._give_up(export, f"{export.request.peer} gave the transfer up: {cancel.reason}")

    def abort(self, request: Request) -> None:
        """Withdraws a transfer that is no longer wanted. The caller releases the request."""
        export = self._exports.get(request.transfer_id)
        if export is not None and not self._let_go(export):
            self._revoke(export)

    def link_up(self, peer: str, conn: str) -> None:
        """Offers what has waited for a link that rested."""
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
        """Ends every transfer whose peer has made no progress for longer than its lease.

        A streaming transfer waits only for this engine, for as long as that takes.
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
                    reason = f"the link to {export.request.peer} rests, and had no place within {limit_s:g} s"
                self._ended(export.request, None if handed_over else reason)

    # ---- inside

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
        """Ships the layers that the running step has finished in complete blocks, if they are worth a payload."""
        stop, first = self._complete(export, export.step_stop), export.num_layers
        if stop <= export.next_token or num_layers <= first:
            return
        most = self._ports.limits(export.conn).num_layers
        num_layers, is_last = min(num_layers, most), num_layers >= most
        num_blocks = len(self._blocks(export, export.next_token, stop))
        if is_last or (num_layers - first) * num_blocks * self._layer_nbytes >= self._min_group_nbytes:
            self._send(export, stop, first, num_layers)

    def _ship(self, export: Export) -> None:
        """Ships everything complete that is not queued yet; with token one, the rest and the end."""
        export.since_s = self._clock()
        done = bool(export.first_tokens)
        num_computed = len(export.request.prompt_token_ids) if done else export.request.num_computed_tokens
        stop = self._complete(export, num_computed)
        if stop > export.next_token:
            self._send(export, stop, export.num_layers, self._ports.limits(export.conn).num_layers)
        if done:
            export.state = ExportState.ENDED
            transfer_id, num_tokens = export.request.transfer_id, len(export.request.prompt_token_ids)
            self.held.add(export.conn, transfer_id)
            self._ports.ship_end(
                export.conn, wire.KVEnd(transfer_id, export.num_chunks, num_tokens, export.first_tokens)
            )

    def _send(self, export: Export, stop: int, first_layer: int, stop_layer: int) -> None:
        """Sends tokens from `next_token` to `stop` in these layers, in pieces of whole blocks that fit a payload."""
        limits, size = self._ports.limits(export.conn), self._scheduler.block_size
        num_layers = stop_layer - first_layer
        num_blocks = max(1, limits.max_payload_nbytes // (num_layers * self._layer_nbytes))
        start = export.next_token
        while start < stop:
            end = min(stop, (start // size + num_blocks) * size)
            blocks = self._blocks(export, start, end)
            piece = wire.KVPiece(start, end - start, first_layer, num_layers, blocks)
            self._ports.ship(export.conn, export.request.transfer_id, export.num_chunks, piece)
            export.num_chunks += 1
            start = end
        if stop_layer == limits.num_layers:
            export.next_token, export.num_layers = stop, 0
        else:
            export.num_layers = stop_layer

    def _complete(self, export: Export, num_tokens: int) -> int:
        """Returns how many of the prompt's first tokens are in blocks that will not be written again."""
        size, num_prompt = self._scheduler.block_size, len(export.request.prompt_token_ids)
        return num_prompt if num_tokens >= num_prompt else num_tokens // size * size

    def _blocks(self, export: Export, start: int, stop: int) -> list[int]:
        size = self._scheduler.block_size
        return export.request.tables[0][start // size : -(-stop // size)]

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
        """Forgets the transfer; True when D already has the confirmation that it stood: then it is D's."""
        transfer_id = export.request.transfer_id
        del self._exports[transfer_id]
        if export in self._step:
            self._step.remove(export)
        if export.conn:
            self._ports.drop(export.conn, transfer_id)
        return export.state is ExportState.ENDED and not self.held.take(export.conn, transfer_id)
