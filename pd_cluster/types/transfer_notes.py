"""Events of a transfer, for traces."""

from __future__ import annotations

from typing import Protocol


class Note(Protocol):
    """Records a transfer's events, from any thread and without blocking; engine/leg_trace.py implements one."""

    def __call__(self, transfer_id: str, what: str, **numbers: int) -> None: ...


def note_nothing(transfer_id: str, what: str, **numbers: int) -> None:
    """Discards the event."""
