"""Tracks which LoRA adapters are in memory, and chooses which to evict. Uses digests; loads and drops nothing itself.

The least recently requested adapter that is not in use is evicted. If all are in use, the least recently requested one
is closed: it accepts no new requests, and once its running requests have ended, a waiting adapter gets its memory.
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
        """Records that an adapter was requested or has just been loaded."""
        self._recent.pop(digest, None)
        self._recent[digest] = None

    def drop(self, digest: str) -> None:
        self._recent.pop(digest, None)
        self.open(digest)

    def open(self, digest: str) -> None:
        """Lets the adapter accept requests again."""
        self.closing.pop(digest, None)

    def has_one_free(self, present: Collection[str]) -> bool:
        """Whether one more adapter fits. `present`: adapters that are in memory or being loaded."""
        return len(set(present)) < self._most

    def next_out(self, present: Collection[str], used: Collection[str]) -> str | None:
        """Returns the adapter to evict now; None if all are in use, and then one of them is closed."""
        order = [each for each in (*self.closing, *self._recent) if each in present]
        found = next((each for each in order if each not in used), None)
        if found is None and order and not self.closing:
            self.closing[order[0]] = None
        return found
