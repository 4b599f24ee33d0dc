"""Counts the holders of each block, and tracks which blocks' contents may be reused. Knows nothing of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from pd_cluster.errors import OutOfBlocks
from pd_cluster.kv.host_tier import HostTier
from pd_cluster.kv.kv_event_log import KVEventLog
from pd_cluster.kv.prefix_index import PrefixIndex
from pd_cluster.types import Retention, Tier


class BlockPool:
    """A block is free (no holder, no content), cached (no holder, a known content) or held by one or more.

    num_blocks = free + cached + held; `check()` tests this. `take` returns free blocks before cached ones, and cached
    blocks in the order of their last use, retained ones last. With `rests`, `take` returns free blocks in the order of
    their release, so that each stays free as long as possible. Otherwise it returns the block released last, because
    its memory is still in the processor's caches.
    """

    def __init__(self, num_blocks: int, rests: bool = True, tier: HostTier | None = None) -> None:
        """`tier` receives evicted blocks."""
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks) if rests else reversed(range(num_blocks)))
        self._take_free = self._free.popleft if rests else self._free.pop
        self._holders = [0] * num_blocks
        self._versions = [0] * num_blocks
        self._index = PrefixIndex(num_blocks // 2)
        self.tier = tier
        self.num_resets = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Counts blocks without a holder whose contents may be reused."""
        return self._index.num_unheld

    @property
    def num_available(self) -> int:
        """Counts blocks that `take` could return."""
        return self.num_free + self.num_cached

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def take(self, num_blocks: int) -> list[int]:
        """Takes this many blocks. If there are fewer, takes none and raises OutOfBlocks(wanted, free)."""
        if num_blocks > self.num_available:
            raise OutOfBlocks(wanted=num_blocks, free=self.num_available)
        taken = [self._take_free() if self._free else self._evict() for _ in range(num_blocks)]
        for block in taken:
            self._holders[block] = 1
            self._versions[block] += 1
        return taken

    def version(self, block: int) -> int:
        """Returns how many times the block was taken. Until it is taken again, content is only appended to it."""
        return self._versions[block]

    def _evict(self) -> int:
        block, content, retention = self._index.evict()
        if self.tier is not None:
            self.tier.store(block, content, retention)
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one holder to each block; cached blocks become held."""
        for block in blocks:
            if self._holders[block] == 0:
                self._index.held(block)
            self._holders[block] += 1

    def release(self, blocks: Sequence[int], retention: Retention | None = None) -> None:
        """Removes one holder from each block. Raises AssertionError for a block without a holder.

        With `retention`, the blocks that become cached are evicted after others; retained blocks fill at most half of
        the pool. The last blocks are released first, so that the end of a cached prefix is evicted before its
        beginning.
        """
        for block in reversed(blocks):
            if self._holders[block] <= 0:
                raise AssertionError(f"block {block} released more often than taken")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._index.knows(block):
                    self._index.dropped(block, retention)
                else:
                    self._free.append(block)

    def expire(self, now_s: float) -> None:
        """Ends retentions that have expired."""
        self._index.expire(now_s)
        if self.tier is not None:
            self.tier.expire(now_s)

    def is_shared(self, block: int) -> bool:
        return self._holders[block] > 1

    def has_content(self, block: int) -> bool:
        """Whether the block has a known content and so must not be written."""
        return self._index.knows(block)

    def drop(self, content: bytes) -> None:
        """Forgets a content. Its block becomes free if it has no holder."""
        block = self._index.remove(content)
        if block is not None and not self._holders[block]:
            self._free.append(block)

    def block_of(self, content: bytes) -> int | None:
        """Returns the block with this content. Call `share` before other blocks are taken."""
        return self._index.block_of(content)

    # ---- contents

    def remember(self, block: int, content: bytes) -> bool:
        """Records the content of a full block, which must not be written as long as it has this content.

        Returns False if another block already has the content.
        """
        return self._index.add(block, content)

    @property
    def log(self) -> KVEventLog | None:
        """The log of contents that appear and disappear. The caller of `remember` must add the new ones."""
        return self._index.log

    @log.setter
    def log(self, log: KVEventLog) -> None:
        self._index.log = log
        self.follow()  # so that `changes` also reports contents of lower tiers

    def start_log(self, block_size: int) -> KVEventLog:
        """Starts a log of blocks of `block_size` tokens. The caller must pass `changes` to the log's `moved`."""
        self.log = log = KVEventLog(block_size)
        return log

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the longest prefix with known contents. Call `share` before other blocks are taken."""
        return self._index.find(hashes)

    def __contains__(self, content: bytes) -> bool:
        """Whether a block has this content."""
        return content in self._index

    def forget(self) -> None:
        """Forgets all contents. Cached blocks become free at once, held ones when they are released."""
        self._free.extend(self._index.forget())
        if self.tier is not None:
            self.tier.forget()
            if self.log is not None:
                self.log.moved(self.tier.contents)  # contents on disk remain
        self.num_resets += 1

    def follow(self) -> dict[bytes, Tier]:
        """Returns all known contents and their tiers. From now on, `changes` reports changes."""
        known: dict[bytes, Tier] = dict.fromkeys(self._index.follow(), "device")
        return known if self.tier is None else {**self.tier.contents, **known}

    def changes(self) -> dict[bytes, Tier | None]:
        """Returns the contents that appeared, disappeared or changed tiers since the last call; None: in no tier."""
        changes, tier = self._index.changes(), self.tier
        known = self._index.known
        if tier is None:
            return {content: "device" if content in known else None for content in changes}
        changes |= tier.changes()
        return {content: "device" if content in known else tier.place(content) for content in changes}

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """Counts how many of these blocks have no holder, and so would no longer be available once shared."""
        return sum(1 for block in blocks if self._index.is_unheld(block))

    def check(self, block_tables: list[list[int]]) -> None:
        """Checks that these tables account for all holders of all blocks. Raises AssertionError with the difference."""
        counted = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                counted[block] += 1
        if counted != self._holders:
            wrong = [block for block in range(self.num_blocks) if counted[block] != self._holders[block]]
            raise AssertionError(f"the holders of blocks {wrong[:8]} do not match the {len(block_tables)} block tables")
        self._index.check(self._holders)
        if self.tier is not None:
            self.tier.check()
        free = set(self._free)
        if len(free) != len(self._free) or any(self._holders[b] or self._index.knows(b) for b in free):
            raise AssertionError("the free list has a block twice, or a held or cached block")
        if len(free) + self.num_cached + self.num_blocks - counted.count(0) != self.num_blocks:
            raise AssertionError("a block is neither free nor cached nor held")
