"""Tracks which transfers are still valid. This is the only state that two threads of a prefill worker change."""

from __future__ import annotations

from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.types import Note


class HeldTransfers:
    """Transfers whose KV cache is complete and still in its blocks. Two threads may take one; only the first gets it.

    A thread that takes it for a `Confirm` may confirm it to D; a thread that takes it to abandon it may release the
    blocks.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], None] = {}  # each operation of a dict is atomic

    def add(self, conn: str, transfer_id: str) -> None:
        self._held[conn, transfer_id] = None

    def take(self, conn: str, transfer_id: str) -> bool:
        return self._held.pop((conn, transfer_id), False) is None

    def answer(self, conn: str, confirm: wire.Confirm, send: Callable[[str, wire.Body], None], note: Note) -> bool:
        """Answers D whether the transfer is valid; returns True if D owns it now. The mailbox's thread calls it."""
        transfer_id = confirm.transfer_id
        is_held = self.take(conn, transfer_id)
        if is_held:
            note(transfer_id, "confirmed")
        send(conn, wire.Confirmed(transfer_id, is_held))
        return is_held

    def __len__(self) -> int:
        return len(self._held)
