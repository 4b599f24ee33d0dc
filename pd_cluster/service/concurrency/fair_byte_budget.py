"""Counts memory that clients share. Knows nothing of the memory's contents."""

from __future__ import annotations

from collections import Counter


class FairByteBudget:
    """A client's share may grow up to the size of the free memory, so that memory for small pieces always remains."""

    def __init__(self, total_nbytes: int) -> None:
        self._total_nbytes = total_nbytes
        self._of: Counter[str] = Counter()  # client -> bytes
        self.taken_nbytes = 0

    def of(self, client: str) -> int:
        return self._of[client]

    def has_capacity(self, client: str, nbytes: int) -> bool:
        """Whether the client may take this many more bytes."""
        left = self._total_nbytes - self.taken_nbytes
        return self._of[client] + nbytes <= left

    def take(self, client: str, nbytes: int) -> None:
        self._of[client] += nbytes
        self.taken_nbytes += nbytes

    def give_back(self, client: str, nbytes: int) -> None:
        self.taken_nbytes -= nbytes
        self._of[client] -= nbytes
        if not self._of[client]:
            del self._of[client]
