"""What a block contains, as a hash: the key under which another request finds it.

A block's hash covers all tokens before it too (each is chained to its parent's), the model and pool that computed it,
and the request's salt. SHA-256: a client cannot make two prompts that collide. Knows nothing of who holds a block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


def root_hash(model_identity: str, dtype: str, salt: str = "") -> bytes:
    """The parent of every first block. KV of another model, precision or salt never matches."""
    parts = (model_identity, dtype, salt)
    return hashlib.sha256(b"".join(len(p.encode()).to_bytes(4, "big") + p.encode() for p in parts)).digest()


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """Whose KV may be shared: requests of the same model, precision (the pool's, and on the way to it) and salt."""

    model_identity: str
    dtype: str

    def root(self, salt: str, kv_precision: str = "") -> bytes:
        dtype = f"{self.dtype} through {kv_precision}" if kv_precision else self.dtype
        return root_hash(self.model_identity, dtype, salt)


def chain_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """One hash for each full block of these tokens, which follow those that `parent` stands for."""
    data = memoryview(array("q", token_ids)).cast("B")
    width = 8 * block_size
    hashes = []
    for start in range(0, len(data) - width + 1, width):
        parent = hashlib.sha256(parent + data[start : start + width]).digest()
        hashes.append(parent)
    return hashes


class PrefixIndex:
    """Hash to block and back; blocks that nobody holds are kept in the order of their last use."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_unheld(self) -> int:
        return len(self._unheld)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix."""
        found = []
        for each in hashes:
            block = self._block_of.get(each)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, block: int, content: bytes) -> None:
        """The first block with a content keeps it; a second one with the same stays unknown."""
        if content not in self._block_of and block not in self._hash_of:
            self._block_of[content] = block
            self._hash_of[block] = content

    def knows(self, block: int) -> bool:
        return block in self._hash_of

    def is_unheld(self, block: int) -> bool:
        return block in self._unheld

    def dropped(self, block: int) -> None:
        """Its last holder let go: it can be evicted, after all that were dropped before."""
        self._unheld[block] = None

    def held(self, block: int) -> None:
        """Somebody holds it again."""
        del self._unheld[block]

    def evict(self) -> int:
        """Forgets the least recently used block that nobody holds, and returns it."""
        block, _ = self._unheld.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block

    def check(self, holders: Sequence[int]) -> None:
        """Both directions agree, and the unheld are those that nobody holds. Raises AssertionError."""
        if {block: content for content, block in self._block_of.items()} != self._hash_of:
            raise AssertionError("hash to block and block to hash differ")
        if set(self._unheld) != {block for block in self._hash_of if holders[block] == 0}:
            raise AssertionError("a cached block is held, or one that nobody holds cannot be evicted")
