"""What a block contains, as a hash: the key under which another request finds it.

A block's hash covers all tokens before it too (each is chained to its parent's), the model and pool that computed it,
and the request's salt. SHA-256: a client cannot make two prompts that collide. Knows nothing of who holds a block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pd_cluster.numerics import Numerics


def root_hash(model_identity: str, numerics: str, salt: str = "") -> bytes:
    """The parent of every first block. KV of another model, of other numerics or another salt never matches."""
    parts = (model_identity, numerics, salt)
    return hashlib.sha256(b"".join(len(p.encode()).to_bytes(4, "big") + p.encode() for p in parts)).digest()


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """Whose KV may be shared: requests of the same model, numerics (and precision on the way to the pool) and salt.

    Where positions depend on a request's length, of the same length, too.
    """

    model_identity: str
    numerics: Numerics

    def root(self, salt: str, kv_precision: str = "", most_tokens: int = 0) -> bytes:
        """`most_tokens`: that the request may ever have."""
        numerics = self.numerics.digest
        if kv_precision:
            numerics += f" through {kv_precision}"
        if length := self.numerics.rope.length(most_tokens):
            numerics += f" for {length}"
        return root_hash(self.model_identity, numerics, salt)


def chain_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """One hash for each full block of these tokens, which follow those that `parent` stands for."""
    data = memoryview(array("q", token_ids)).cast("B")
    width = 8 * block_size
    hashes = []
    for start in range(0, len(data) - width + 1, width):
        parent = hashlib.sha256(parent + data[start : start + width]).digest()
        hashes.append(parent)
    return hashes


KEY_NBYTES = 8


def keys_of(hashes: Iterable[bytes]) -> bytes:
    """What others than the cache itself know of blocks by: the beginnings of their hashes, put together."""
    return b"".join(each[:KEY_NBYTES] for each in hashes)


def read_keys(keys: bytes) -> array[int]:
    """The keys as numbers; bytes behind the last whole key are none."""
    numbers = array("Q")
    numbers.frombytes(keys[: len(keys) - len(keys) % KEY_NBYTES])
    return numbers


class PrefixIndex:
    """Hash to block and back; blocks that nobody holds are kept in the order of their last use.

    Somebody may `follow` which contents are known.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._changes: dict[bytes, bool] | None = None  # content -> known now; None: nobody follows

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
            if self._changes is not None:
                self._changes[content] = True

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
        content = self._hash_of.pop(block)
        del self._block_of[content]
        if self._changes is not None:
            self._changes[content] = False
        return block

    def follow(self) -> list[bytes]:
        """Every known content; from now on `changes` tells what becomes of them."""
        if self._changes is None:
            self._changes = {}
        return list(self._block_of)

    def changes(self) -> dict[bytes, bool]:
        """Since the last call, contents that are known now (True) or not any more."""
        if not self._changes:
            return {}
        changes, self._changes = self._changes, {}
        return changes

    def check(self, holders: Sequence[int]) -> None:
        """Both directions agree, and the unheld are those that nobody holds. Raises AssertionError."""
        if {block: content for content, block in self._block_of.items()} != self._hash_of:
            raise AssertionError("hash to block and block to hash differ")
        if set(self._unheld) != {block for block in self._hash_of if holders[block] == 0}:
            raise AssertionError("a cached block is held, or one that nobody holds cannot be evicted")
