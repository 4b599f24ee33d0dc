"""Which LoRA adapters are in memory, and which gives way to another. Digests only: it loads and drops nothing.

The one that was asked for least recently gives way. If requests have all of them, that one is closed: it takes no new
requests until those have ended, so that whatever waits for its room gets it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class AdapterCache:
    """`most`: the most in memory."""

    def __init__(self, most: int, present: Iterable[str]) -> None:
        """`present`: the one that was asked for least recently first."""
        self._most = most
        self._recent: dict[str, None] = dict.fromkeys(present)
        self.closing: dict[str, None] = {}

    def use(self, digest: str) -> None:
        """It is asked for, or has just been loaded."""
        self._recent.pop(digest, None)
        self._recent[digest] = None

    def drop(self, digest: str) -> None:
        self._recent.pop(digest, None)
        self.open(digest)

    def open(self, digest: str) -> None:
        """It takes requests again."""
        self.closing.pop(digest, None)

    def has_one_free(self, present: Collection[str]) -> bool:
        """`present`: those in memory, or on their way there."""
        return len(set(present)) < self._most

    def next_out(self, present: Collection[str], used: Collection[str]) -> str | None:
        """Returns the one that gives way at once; None: all of these are used, and one of them is closed."""
        order = [each for each in (*self.closing, *self._recent) if each in present]
        found = next((each for each in order if each not in used), None)
        if found is None and order and not self.closing:
            self.closing[order[0]] = None
        return found
