"""Assigns slots to adapters by digest. Adapters are loaded at any time, but dropped only between steps."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

NONE = 0  # the slot of rows without an adapter


class Folder(Protocol):
    @property
    def digest(self) -> str: ...


F = TypeVar("F", bound=Folder)


class SlotTable(Generic[F]):
    """The adapters of one type on one rank. `slots`: the slots that requests may use, by digest, updated in place."""

    def __init__(self, kind: str) -> None:
        """`kind`: the type's name in log messages."""
        self.slots: dict[str, int] = {}
        self._kind = kind
        self._slots_given = itertools.count(NONE + 1)  # slots are never reused
        self._lock = threading.Lock()

    def put(self, slot: int, folder: F) -> None:
        """Loads an adapter into a slot that no row uses. If it raises ModelError, the slot is empty."""
        raise NotImplementedError

    def clear_slot(self, slot: int) -> None:
        """Removes the content of a slot. Call it between steps."""
        raise NotImplementedError

    def load(self, folder: F, slot: int | None = None) -> int:
        """Loads an adapter and returns its slot; any thread may call this while steps are computed. Raises ModelError.

        `slot`: the adapter's slot on rank 0; None: the next free slot.
        """
        with self._lock:
            known = self.slots.get(folder.digest)
            if known is not None and slot in (None, known):
                return known
            slot = self.next_slot() if slot is None else slot
            self.put(slot, folder)
            self.slots[folder.digest] = slot  # stored last: from now on requests may use the adapter
            if known is not None:  # left by an earlier load that rank 0 has abandoned
                self.clear_slot(known)
            return slot

    def drop(self, digest: str) -> None:
        """Removes an adapter that no request uses. Call it between steps."""
        with self._lock:
            slot = self.slots.pop(digest, None)
            if slot is not None:
                self.clear_slot(slot)
                log.info("%s %s was dropped", self._kind, digest[:20])

    def next_slot(self) -> int:
        """Returns a slot that no adapter has used yet."""
        return next(self._slots_given)
