"""A slow, obvious reference for the pool of one group of layers: objects as blocks, tuples as contents, list scans.

Shares no code with the real one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

_ticks = itertools.count()

Content = tuple[object, ...]  # (salt, all tokens up to the block's end)


@dataclass(eq=False)
class Block:
    holders: int = 0
    content: Content | None = None  # a cached full block's tokens, or those before a kept state
    dropped_at: int = 0


@dataclass(eq=False)
class ReferenceGroup:
    """`window`: tokens that a layer sees, including the querying one; None: all. `is_state`: one block per sequence."""

    num_blocks: int
    block_size: int
    swap_room: int
    window: int | None = None
    is_state: bool = False
    pool: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = [Block() for _ in range(self.num_blocks)]

    def free(self) -> list[Block]:
        return [b for b in self.pool if not b.holders and b.content is None]

    def cached(self) -> list[Block]:
        return sorted((b for b in self.pool if not b.holders and b.content is not None), key=lambda b: b.dropped_at)

    def held(self) -> list[Block]:
        return [b for b in self.pool if b.holders]

    def room(self) -> int:
        return len(self.free()) + len(self.cached())

    def room_beside(self, blocks: Sequence[Block | None]) -> int:
        return self.room() - sum(1 for b in blocks if b is not None and not b.holders)

    def take(self, count: int) -> list[Block]:
        taken = (self.free() + self.cached())[:count]
        assert len(taken) == count
        for block in taken:
            block.holders, block.content = 1, None
        return taken

    def share(self, blocks: Sequence[Block | None]) -> None:
        for block in blocks:
            if block is not None:
                block.holders += 1

    def drop(self, block: Block | None) -> None:
        if block is not None:
            block.holders -= 1
            block.dropped_at = next(_ticks)

    def has(self, content: Content) -> Block | None:
        return next((b for b in self.pool if b.content == content), None)

    def is_known_as(self, block: Block | None, content: Content) -> None:
        """Caches a block under this content, unless the block is cached already or another block has the content."""
        if block is not None and block.content is None and self.has(content) is None:
            block.content = content

    def need(self, num_tokens: int) -> int:
        return 1 if self.is_state else (num_tokens + self.block_size - 1) // self.block_size

    def is_unseen(self, at: int, num_tokens: int) -> bool:
        """Returns whether no token from `num_tokens` on sees block `at`."""
        last = (at + 1) * self.block_size - 1
        return self.window is not None and last <= num_tokens - self.window

    def unseen(self, num_tokens: int) -> int:
        return 0 if self.is_state else sum(self.is_unseen(at, num_tokens) for at in range(self.need(num_tokens)))


Mode = Literal["none", "align", "all"]
