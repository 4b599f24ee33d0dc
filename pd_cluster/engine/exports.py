"""A request's KV cache leaves: the prefill side of every transfer.

The state × event table is in docs/protocol.md; every method here is one event. No torch, no sockets, no clock of its
own: what must be sent, copied or reported goes through the ports that the constructor is given, so that tests can drive
the very same code through any order of events.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pd_cluster import wire
from pd_cluster.config import Timeouts
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.types import Note, Request, Status, TokenOutput, note_nothing

Ended = Callable[[Request, str | None], None]  # the leg is over; None: handed over as it should be


class ExportPorts(Protocol):
    """What Exports asks of the world. `conn` is a link's connection."""

    def link_to(self, peer: str) -> str | None:
        """The connection of the link to this peer, if it is up."""

    def send(self, conn: str, body: wire.Body) -> None: ...

    def ship(self, conn: str, transfer_id: str, sequence: int, first_block: int, block_ids: list[int]) -> None:
        """Queues a KVChunk and its payload."""

    def ship_end(self, conn: str, end: wire.KVEnd) -> None:
        """Queues the last message, behind all chunks."""

    def drop(self, conn: str, transfer_id: str) -> None:
        """What is queued of this transfer need not be sent."""

    def progress_s(self, conn: str) -> float:
        """When the peer was last seen to get on with its work."""


class ExportState(enum.Enum):
    OFFERED = "offered"
    STREAMING = "streaming"
    ENDED = "ended"


@dataclass(slots=True)
class Export:
    request: Request
    conn: str
    state: ExportState
    since_s: float
    num_shipped_blocks: int = 0
    num_chunks: int = 0
    first_tokens: list[TokenOutput] = field(default_factory=list)


class Exports:
    def __init__(
        self,
        scheduler: Scheduler,
        ports: ExportPorts,
        ended: Ended,
        clock: Callable[[], float],
        timeouts: Timeouts,
        max_chunk_blocks: int,
        note: Note = note_nothing,
    ) -> None:
        self._scheduler = scheduler
        self._ports = ports
        self._ended = ended
        self._clock = clock
        self._timeouts = timeouts
        self._max_chunk_blocks = max_chunk_blocks
        self._note = note
        self._exports: dict[str, Export] = {}

    def __len__(self) -> int:
        return len(self._exports)

    def admitted(self, request: Request) -> None:
        """P's blocks are taken: offer the transfer."""
        conn = self._ports.link_to(request.peer)
        if conn is None:
            self._ended(request, f"no link from this instance to {request.peer}")
            return
        self._exports[request.transfer_id] = Export(request, conn, ExportState.OFFERED, self._clock())
        self._note(request.transfer_id, "offered")
        self._ports.send(conn, wire.Offer(request.transfer_id, len(request.prompt_token_ids)))

    def computed(self, request: Request, first_tokens: list[TokenOutput]) -> None:
        """A step computed some of the prompt, and if it reached the end, chose the first token of each sequence."""
        export = self._exports.get(request.transfer_id)
        if export is None:
            return
        if request.status is Status.FINISHED:  # on token one; the engine has released the blocks already
            self._forget(export)
            self._ports.send(export.conn, wire.Revoke(request.transfer_id))
            return
        export.first_tokens = first_tokens
        if export.state is ExportState.STREAMING:
            self._ship(export)

    def on_credit(self, conn: str, credit: wire.Credit) -> None:
        export = self._find(conn, credit.transfer_id)
        if export is None or export.state is not ExportState.OFFERED:
            return
        in_prompt = 0 <= credit.first_token <= len(export.request.prompt_token_ids)
        if not in_prompt or credit.first_token % self._scheduler.block_size:
            self.abort(export.request)
            self._ended(export.request, f"{export.request.peer} wants KV cache from token {credit.first_token} on")
        else:
            export.state = ExportState.STREAMING
            export.num_shipped_blocks = credit.first_token // self._scheduler.block_size
            self._note(credit.transfer_id, "credited", first_token=credit.first_token)
            self._ship(export)

    def on_confirm(self, conn: str, transfer_id: str) -> None:
        export = self._find(conn, transfer_id)
        held = export is not None and export.state is ExportState.ENDED
        self._ports.send(conn, wire.Confirmed(transfer_id, held))
        if export is not None and held:
            self._note(transfer_id, "confirmed")
            self._forget(export)
            self._ended(export.request, None)

    def on_cancel(self, conn: str, cancel: wire.Cancel) -> None:
        export = self._find(conn, cancel.transfer_id)
        if export is not None:
            self._forget(export)
            self._ended(export.request, f"{export.request.peer} gave the transfer up: {cancel.reason}")

    def abort(self, request: Request) -> None:
        """The request is not wanted any more. The caller releases it."""
        export = self._exports.get(request.transfer_id)
        if export is not None:
            self._forget(export)
            self._ports.send(export.conn, wire.Revoke(request.transfer_id))

    def on_link_down(self, conn: str, reason: str) -> None:
        for export in [e for e in self._exports.values() if e.conn == conn]:
            self._forget(export)
            self._ended(export.request, f"the link to {export.request.peer} is down: {reason}")

    def expire(self) -> None:
        """Ends every transfer that waits for a peer which stood still for longer than its deadline.

        While it streams it waits for nobody but this engine, however long that takes.
        """
        now_s = self._clock()
        for export in [e for e in self._exports.values() if e.state is not ExportState.STREAMING]:
            offered = export.state is ExportState.OFFERED
            limit_s = self._timeouts.credit_timeout_s if offered else self._timeouts.transfer_timeout_s
            if now_s - max(export.since_s, self._ports.progress_s(export.conn)) > limit_s:
                what = "did not take the transfer" if offered else "did not finish the transfer"
                self.abort(export.request)
                self._ended(export.request, f"{export.request.peer} {what} within {limit_s:g} s")

    def _ship(self, export: Export) -> None:
        """Everything that is complete and not yet shipped; with token one, the rest and the end."""
        request = export.request
        done = bool(export.first_tokens)
        num_prompt_blocks = self._scheduler.num_blocks_for(len(request.prompt_token_ids))
        complete = num_prompt_blocks if done else request.num_computed_tokens // self._scheduler.block_size
        export.since_s = self._clock()
        for first in range(export.num_shipped_blocks, complete, self._max_chunk_blocks):
            block_ids = request.block_table[first : min(first + self._max_chunk_blocks, complete)]
            self._ports.ship(export.conn, request.transfer_id, export.num_chunks, first, block_ids)
            export.num_chunks += 1
            export.num_shipped_blocks = first + len(block_ids)
        if done:
            export.state = ExportState.ENDED
            num_tokens = len(request.prompt_token_ids)
            end = wire.KVEnd(request.transfer_id, export.num_chunks, num_tokens, export.first_tokens)
            self._ports.ship_end(export.conn, end)

    def _find(self, conn: str, transfer_id: str) -> Export | None:
        export = self._exports.get(transfer_id)
        return export if export is not None and export.conn == conn else None

    def _forget(self, export: Export) -> None:
        del self._exports[export.request.transfer_id]
        self._ports.drop(export.conn, export.request.transfer_id)
