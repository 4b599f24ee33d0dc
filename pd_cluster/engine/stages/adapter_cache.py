"""Tracks which LoRA adapters are in memory, and chooses which to evict. Digests only: loads and drops nothing.

The least recently requested adapter is evicted. If requests use all of them, that adapter is closed: it accepts no new
requests until the running ones have ended, so that waiting adapters get its memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class AdapterCache:
    """`most`: the maximum number of adapters in memory."""

    def __init__(self, most: int, present: Iterable[str]) -> None:
        """`present`: adapters in memory, the least recently requested first."""
        self._most = most
        self._recent: dict[str, None] = dict.fromkeys(present)
        self.closing: dict[str, None] = {}

    def use(self, digest: str) -> None:
        """Records that the adapter is requested, or has just been loaded."""
        self._recent.pop(digest, None)
        self._recent[digest] = None

    def drop(self, digest: str) -> None:
        self._recent.pop(digest, None)
        self.open(digest)

    def open(self, digest: str) -> None:
        """Lets the adapter accept requests again."""
        self.closing.pop(digest, None)

    def has_one_free(self, present: Collection[str]) -> bool:
        """Whether memory has room for one more. `present`: adapters that are in memory or being loaded."""
        return len(set(present)) < self._most

    def next_out(self, present: Collection[str], used: Collection[str]) -> str | None:
        """Returns the adapter to evict at once; None: all are in use, and one of them is closed."""
        order = [each for each in (*self.closing, *self._recent) if each in present]
        found = next((each for each in order if each not in used), None)
        if found is None and order and not self.closing:
            self.closing[order[0]] = None
        return found
