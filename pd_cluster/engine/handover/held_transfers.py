"""Tracks which transfers are still valid. This is the only state that two threads of a prefill worker change."""

from __future__ import annotations

from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.types import Note


class HeldTransfers:
    """Transfers whose KV cache is complete and still in its blocks.

    Two threads may take a transfer; only the first gets it. The mailbox's thread takes a transfer to
    confirm it to D; the engine's thread takes an abandoned transfer to release its blocks.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], None] = {}  # each operation of a dict is atomic

    def add(self, conn: str, transfer_id: str) -> None:
        self._held[conn, transfer_id] = None

    def take(self, conn: str, transfer_id: str) -> bool:
        return self._held.pop((conn, transfer_id), False) is None

    def answer(self, conn: str, confirm: wire.Confirm, send: Callable[[str, wire.Body], None], note: Note) -> bool:
        """Answers a Confirm: whether the transfer is valid. Returns True if D owns it now.

        The mailbox's thread calls this.
        """
        transfer_id = confirm.transfer_id
        is_held = self.take(conn, transfer_id)
        if is_held:
            note(transfer_id, "confirmed")
        send(conn, wire.Confirmed(transfer_id, is_held))
        return is_held

    def __len__(self) -> int:
        return len(self._held)
