"""Cached blocks that requests asked to retain.

They are evicted after all others, and owners have equal shares. Knows nothing of contents, and has no clock: the caller
passes the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from pd_cluster.types import Retention

Block = TypeVar("Block", int, bytes)


class RetainedBlocks(Generic[Block]):
    """At most `most` blocks without a holder, with an equal share for each owner.

    A block is identified by its number or by its content.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[str, OrderedDict[Block, float]] = {}  # owner -> block -> expiry; least recently used first
        self._owners: dict[Block, str] = {}  # by block

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, block: Block) -> bool:
        return block in self._owners

    def blocks(self) -> list[Block]:
        return list(self._owners)

    def add(self, block: Block, retention: Retention) -> list[tuple[Block, Retention]]:
        """Retains a block. Returns blocks of the same owner that no longer fit its share, possibly also this one."""
        own = self._of.setdefault(retention.owner, OrderedDict())
        own[block], self._owners[block] = retention.until_s, retention.owner
        share, displaced = self._most // len(self._of), list[tuple[Block, Retention]]()
        while len(own) > share:
            first, until_s = next(iter(own.items()))
            displaced.append((first, Retention(retention.owner, until_s)))
            self.remove(first)
        return displaced

    def remove(self, block: Block) -> Retention | None:
        """Forgets a block. Returns its retention, or None if it was not retained."""
        if (owner := self._owners.pop(block, None)) is None:
            return None
        retention = Retention(owner, self._of[owner].pop(block))
        if not self._of[owner]:
            del self._of[owner]
        return retention

    def used(self, block: Block) -> None:
        """Makes a retained block the most recently used one of its owner."""
        self._of[self._owners[block]].move_to_end(block)

    def in_order(self) -> Iterator[Block]:
        """Yields blocks in order of eviction: first those of the owner with most blocks, least recently used first."""
        if len(self._of) == 1:  # the usual case
            yield from next(iter(self._of.values()))
            return
        for own in sorted(self._of.values(), key=len, reverse=True):
            yield from own

    def expired(self, now_s: float) -> list[Block]:
        """Forgets and returns the expired blocks, each owner's least recently used first."""
        found = [block for own in self._of.values() for block, until_s in own.items() if until_s <= now_s]
        for block in found:
            self.remove(block)
        return found

    def clear(self) -> None:
        self._of.clear()
        self._owners.clear()
