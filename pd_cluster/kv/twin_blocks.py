"""Tracks which tokens' KV is in twins. Block i of a draft model's pool is the twin of block i of the target's pool.

A twin is valid for its leading tokens that equal the sequence's, until its block is taken again. So twins are never
allocated or freed separately. Uses only integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.types import Request


class _TwinTokens(NamedTuple):
    version: int  # the block's version
    token_ids: list[int]  # tokens whose KV is in the twin's first slots


class _ValidTokens(NamedTuple):
    """The number of a sequence's valid tokens, and its table at that time.

    Only the last blocks of a table are replaced.
    """

    block_table: list[int]
    num_valid: int


class TwinBlocks:
    """The twins of a pool's blocks.

    Comparing a block's own tokens is enough: sequences share whole beginnings, so those that hold the same version of a
    block also have equal tokens before it.
    """

    def __init__(self, blocks: BlockPool, block_size: int) -> None:
        self._blocks, self.block_size = blocks, block_size
        self._written: dict[int, _TwinTokens] = {}  # by block
        self._seen: WeakKeyDictionary[Request, _ValidTokens] = WeakKeyDictionary()

    def num_valid(self, request: Request) -> int:
        """Counts a sequence's leading tokens whose KV is in the twins of its blocks. The last token is never counted.

        No window may have passed any of the sequence's blocks.
        """
        table, size, most = request.tables[0], self.block_size, request.num_tokens - 1
        seen = self._seen.get(request)
        found = min(seen.num_valid, most) if seen is not None and seen.block_table is table else 0
        at = found // size
        while (found := at * size) < most:
            num_same = self._num_same(table[at], request.token_ids(found, min(most, found + size)))
            if num_same < size:
                found += num_same
                break
            at += 1
        found = min(found, most)
        self._seen[request] = _ValidTokens(table, found)
        return found

    def _num_same(self, block: int, token_ids: Sequence[int]) -> int:
        written = self._written.get(block)
        if written is None or written.version != self._blocks.version(block):
            return 0
        known = written.token_ids
        if known[: len(token_ids)] == token_ids:
            return len(token_ids)
        return next((at for at, (a, b) in enumerate(zip(known, token_ids, strict=False)) if a != b), len(known))

    def wrote(self, request: Request, start: int, token_ids: Sequence[int]) -> None:
        """Records that the twins have KV of these tokens.

        `start`: the index of the first one in the sequence. All earlier tokens must be valid. Twins of later tokens
        become invalid, because they may have KV of rejected drafts.
        """
        size = self.block_size
        for at in range(start // size, (start + len(token_ids) - 1) // size + 1):
            block, first = request.tables[0][at], max(start, at * size)
            fresh = list(token_ids[first - start : (at + 1) * size - start])
            version, before = self._blocks.version(block), list[int]()
            if first > at * size:
                before = self._written[block].token_ids[: first - at * size]
            self._written[block] = _TwinTokens(version, before + fresh)
        for block in request.tables[0][at + 1 :]:
            self._written.pop(block, None)
