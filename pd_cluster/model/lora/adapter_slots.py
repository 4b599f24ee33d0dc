"""Slots of adapters that come and go beside the steps, by the adapters' digests. Knows nothing of what is in them."""

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
    """One kind of adapters of one rank. `slots`: those that requests may have, by digest; changed in place."""

    def __init__(self, kind: str) -> None:
        """`kind`: for the log."""
        self.slots: dict[str, int] = {}
        self._kind = kind
        self._slots_given = itertools.count(NONE + 1)  # none of them twice
        self._lock = threading.Lock()

    def put(self, slot: int, folder: F) -> None:
        """Puts an adapter into a slot that no row has. Raises ModelError, and then nothing of it is there."""
        raise NotImplementedError

    def take_away(self, slot: int) -> None:
        """Forgets what is in a slot, between two steps."""
        raise NotImplementedError

    def load(self, folder: F, slot: int | None = None) -> int:
        """Loads an adapter on any thread, while steps are computed; returns its slot. Raises ModelError.

        `slot`: the one that it has on rank 0; None: the next.
        """
        with self._lock:
            known = self.slots.get(folder.digest)
            if known is not None and slot in (None, known):
                return known
            slot = self.next_slot() if slot is None else slot
            self.put(slot, folder)
            self.slots[folder.digest] = slot  # last: now requests may have it
            if known is not None:  # of a load that rank 0 has given up
                self.take_away(known)
            return slot

    def drop(self, digest: str) -> None:
        """Forgets an adapter that no request has, between two steps."""
        with self._lock:
            slot = self.slots.pop(digest, None)
            if slot is not None:
                self.take_away(slot)
                log.info("%s %s is dropped", self._kind, digest[:20])

    def next_slot(self) -> int:
        """Returns a slot that no adapter has had."""
        return next(self._slots_given)
