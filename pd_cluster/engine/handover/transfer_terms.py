"""The clock, timeouts and event recorder that both directions of transfers share. Knows nothing of links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import Note, note_nothing


@dataclass(frozen=True, slots=True)
class TransferTerms:
    clock: Callable[[], float]
    timeouts: Timeouts
    note: Note = note_nothing
