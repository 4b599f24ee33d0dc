"""Cached blocks that requests asked to retain: they are evicted after all others, in equal shares for their owners.

Knows nothing of contents or of time: the caller says when blocks expire.
"""

from __future__ import annotations

from collections import OrderedDict

from pd_cluster.types import Retention


class RetainedBlocks:
    """At most `most` blocks without a holder, of which each owner may have an equal part."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[str, OrderedDict[int, float]] = {}  # owner -> block -> until; least recently used first
        self._owners: dict[int, str] = {}  # by block

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, block: int) -> bool:
        return block in self._owners

    def blocks(self) -> list[int]:
        return list(self._owners)

    def add(self, block: int, retention: Retention) -> list[int]:
        """Retains a block; returns blocks of the same owner that no longer fit its share, perhaps this one."""
        own = self._of.setdefault(retention.owner, OrderedDict())
        own[block], self._owners[block] = retention.until_s, retention.owner
        share, displaced = self._most // len(self._of), list[int]()
        while len(own) > share:
            displaced.append(next(iter(own)))
            self.remove(displaced[-1])
        return displaced

    def remove(self, block: int) -> bool:
        """Forgets a block; returns whether it was retained."""
        if (owner := self._owners.pop(block, None)) is None:
            return False
        del self._of[owner][block]
        if not self._of[owner]:
            del self._of[owner]
        return True

    def first(self) -> int:
        """Returns the block to evict: the least recently used one of the owner with the most."""
        most = max(map(len, self._of.values()))
        return next(next(iter(own)) for own in self._of.values() if len(own) == most)

    def expired(self, now_s: float) -> list[int]:
        """Forgets and returns the blocks whose time is over, least recently used first."""
        found = [block for own in self._of.values() for block, until_s in own.items() if until_s <= now_s]
        for block in found:
            self.remove(block)
        return found

    def clear(self) -> None:
        self._of.clear()
        self._owners.clear()
