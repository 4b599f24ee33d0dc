"""Counts who holds which block. Knows nothing of tensors, tokens or requests."""

from __future__ import annotations

from collections import deque

from pd_cluster.errors import OutOfBlocks


class BlockPool:
    """A block is free (0 holders) or held by one or more; `check()` proves it.

    Blocks are handed out in order of release, so a block that was just given back rests longest.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without a holder whose contents could still serve a prefix. None before there is a prefix cache."""
        return 0

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    def take(self, num_blocks: int) -> list[int]:
        """All or nothing. Raises OutOfBlocks(wanted, free)."""
        if num_blocks > len(self._free):
            raise OutOfBlocks(wanted=num_blocks, free=len(self._free))
        taken = [self._free.popleft() for _ in range(num_blocks)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def release(self, blocks: list[int]) -> None:
        """One holder less for each. Releasing a free block is a bug of the caller, not of a request."""
        for block in blocks:
            if self._holders[block] <= 0:
                raise AssertionError(f"block {block} released more often than taken")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)

    def check(self, block_tables: list[list[int]]) -> None:
        """Proves that exactly these tables hold exactly what is held. Raises AssertionError with the difference."""
        counted = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                counted[block] += 1
        wrong = [block for block in range(self.num_blocks) if counted[block] != self._holders[block]]
        if wrong:
            raise AssertionError(f"holders of blocks {wrong[:8]} are wrong: requests hold {len(block_tables)} tables")
        free = set(self._free)
        if len(free) != len(self._free) or any(self._holders[block] for block in free):
            raise AssertionError("the free list has a block twice, or one that is held")
        if len(free) + sum(1 for holders in self._holders if holders) != self.num_blocks:
            raise AssertionError("a block is neither free nor held")
