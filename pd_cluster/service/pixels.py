"""Bounds the memory of pictures whose prompts are not answered yet. Knows nothing of what is in them."""

from __future__ import annotations

from pd_cluster.errors import Unavailable

MAX_HELD_NBYTES = 2 << 30  # kept in case an instance is lost


class PixelBudget:
    """Counts the bytes of all pictures that this process holds."""

    def __init__(self, most: int = MAX_HELD_NBYTES) -> None:
        self.nbytes = 0
        self._most = most

    def take(self, nbytes: int) -> PixelHold:
        """Raises Unavailable if there is no room."""
        if self.nbytes + nbytes > self._most:
            raise Unavailable(f"{self.nbytes} bytes of pictures are waiting for their answers; try again")
        self.nbytes += nbytes
        return PixelHold(self, nbytes)


class PixelHold:
    """Bytes of pictures that a prompt keeps until it is answered."""

    def __init__(self, budget: PixelBudget, nbytes: int) -> None:
        self._budget: PixelBudget | None = budget
        self._nbytes = nbytes

    def release(self) -> None:
        """Further calls do nothing."""
        if self._budget is not None:
            self._budget.nbytes -= self._nbytes
            self._budget = None

    def __del__(self) -> None:
        self.release()
