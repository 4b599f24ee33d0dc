"""Hashes the contents of blocks.

A block's hash is the key under which another request finds the block. It covers the block's tokens and all earlier ones
(it is chained to the previous block's hash), the model and pool that computed it, and the request's variant and salt.
It is a SHA-256, so clients cannot construct prompts that collide. Knows nothing of blocks' holders.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass

from pd_cluster.kv.kv_event_log import KVEventLog
from pd_cluster.kv.retained_blocks import RetainedBlocks
from pd_cluster.numerics import Numerics
from pd_cluster.types import RequestSpec, Retention, RopePositions, Span

KV_VERSION = 1  # increase it when the bits of KV cache change, because blocks in files and stores outlive a process


def root_hash(*parts: str) -> bytes:
    """Returns the parent of every first block. KV matches only if all parts of the roots are equal."""
    return hashlib.sha256(b"".join(len(p.encode()).to_bytes(4, "big") + p.encode() for p in parts)).digest()


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """Limits sharing of KV to requests with the same model, variant, numerics, transfer precision and salt.

    If positions depend on a request's length, the lengths must also be equal. Pooled prompts, which are computed in
    chunks of one size, share blocks only with each other. Blocks with a draft head's layers are shared only with
    requests that have the same draft head (`KVLayout.draft_head`).
    """

    model_identity: str
    numerics: Numerics
    draft_head: str = ""

    def root(self, order: RequestSpec, kv_precision: str = "") -> bytes:
        numerics = self.numerics.digest
        if kv_precision:
            numerics += f" through {kv_precision}"
        if length := self.numerics.rope.length(order.most_tokens):
            numerics += f" for {length}"
        if order.pooling is not None:  # chunks are fixed, so a pooled prompt's tokens determine every bit of its blocks
            numerics += " in fixed chunks"
        if self.draft_head:
            numerics += f" with {self.draft_head}"
        variant = (order.variant,) if order.variant else ()
        return root_hash(self.model_identity, numerics, order.cache_salt, *variant)


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Returns eight bytes per token, in the machine's byte order. Making an array instead takes three times as long."""
    return struct.pack(f"{len(token_ids)}q", *token_ids)


def chain_hashes(
    parent: bytes,
    token_ids: Sequence[int],
    block_size: int,
    first: int = 0,
    spans: Sequence[Span] = (),
    rope_positions: RopePositions | None = None,
) -> list[bytes]:
    """Returns one hash for each full block of these tokens, which follow the tokens that `parent` covers.

    `first`: the prompt's position at which these tokens begin. `spans` and `rope_positions` use the prompt's positions.
    """
    data = memoryview(token_bytes(token_ids))
    width, sha256 = 8 * block_size, hashlib.sha256
    hashes = []
    if not spans and rope_positions is None:
        for start in range(0, len(data) - width + 1, width):
            parent = sha256(parent + data[start : start + width]).digest()
            hashes.append(parent)
        return hashes
    for start in range(0, len(data) - width + 1, width):
        contents = _contents(spans, first + start // 8, block_size) if spans else b""
        if rope_positions is not None:
            contents += _positions_hash(rope_positions, first + start // 8, block_size)
        parent = sha256(parent + data[start : start + width] + contents).digest()
        hashes.append(parent)
    return hashes


def prompt_hashes(order: RequestSpec, root: bytes, block_size: int, num_blocks: int) -> list[bytes]:
    """Returns the hashes of the prompt's first blocks, at least `num_blocks` if it has that many full blocks.

    They are kept with the request's spec, so that a process with a router and engines computes them only once.
    """
    known = order.block_hashes.setdefault((root, block_size), [])
    first, stop = len(known) * block_size, min(num_blocks, len(order.prompt_token_ids) // block_size) * block_size
    if first < stop:
        parent, token_ids = known[-1] if known else root, order.prompt_token_ids[first:stop]
        known += chain_hashes(parent, token_ids, block_size, first, order.spans, order.rope_positions)
    return known


def _contents(spans: Sequence[Span], start: int, block_size: int) -> bytes:
    """Returns a block's content besides tokens (spans with their positions), in a collision-free form."""
    here = [span for span in spans if span.start < start + block_size and span.stop > start]
    places = array("q", (number for span in here for number in (span.start - start, span.stop - start)))
    return places.tobytes() + b"".join(hashlib.sha256(span.digest).digest() for span in here)


def _positions_hash(rope_positions: RopePositions, start: int, block_size: int) -> bytes:
    """Returns the hash of a block's rotary positions; empty if they equal the tokens' indices.

    The hash has 32 bytes and `_contents` a multiple of 48, so different combinations never have the same bytes.
    """
    rows = rope_positions.between(start, start + block_size)
    if all(row == rows[0] for row in rows):
        rows = rows[:1]
    if rows == [list(range(start, start + block_size))]:
        return b""
    return hashlib.sha256(array("q", (position for row in rows for position in row))).digest()


KEY_NBYTES = 8


def keys_of(hashes: Iterable[bytes]) -> bytes:
    """Returns the keys that identify blocks in messages: the beginnings of their hashes, joined."""
    return b"".join(each[:KEY_NBYTES] for each in hashes)


def read_keys(keys: bytes) -> array[int]:
    """Returns the keys as integers. Ignores bytes after the last whole key."""
    numbers = array("Q")
    numbers.frombytes(keys[: len(keys) - len(keys) % KEY_NBYTES])
    return numbers


class PrefixIndex:
    """Maps hashes to blocks and back, and keeps blocks without a holder in the order of their last use.

    A caller may `follow` the set of known contents.
    """

    def __init__(self, most_retained: int = 0) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        # Blocks without a holder, the least recently used first. Only blocks that no longer fit their owner's share of
        # retained blocks have a retention here.
        self._unheld: OrderedDict[int, Retention | None] = OrderedDict()
        self._retained = RetainedBlocks[int](most_retained)  # evicted after those in `_unheld`
        self._changes: set[bytes] | None = None  # contents that appeared or disappeared; None: there is no follower
        self.log: KVEventLog | None = None

    @property
    def num_unheld(self) -> int:
        return len(self._unheld) + len(self._retained)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the longest known prefix."""
        found = []
        for each in hashes:
            block = self._block_of.get(each)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, block: int, content: bytes) -> bool:
        """Records a content, unless another block already has it. Returns whether it was recorded."""
        if content in self._block_of or block in self._hash_of:
            return False
        self._block_of[content] = block
        self._hash_of[block] = content
        if self._changes is not None:
            self._changes.add(content)
        return True

    def knows(self, block: int) -> bool:
        return block in self._hash_of

    def is_unheld(self, block: int) -> bool:
        return block in self._unheld or block in self._retained

    def dropped(self, block: int, retention: Retention | None = None) -> None:
        """Makes a block without holders evictable, after all blocks that were dropped earlier."""
        if retention is None:
            self._unheld[block] = None
            return
        self._unheld.update(self._retained.add(block, retention))

    def held(self, block: int) -> None:
        """Protects a block from eviction, because it is held again."""
        if self._retained.remove(block) is None:
            del self._unheld[block]

    def expire(self, now_s: float) -> None:
        """Ends retentions that have expired. Their blocks are evicted first, because all others were used later."""
        for block in reversed(self._retained.expired(now_s) if len(self._retained) else ()):
            self._unheld[block] = None
            self._unheld.move_to_end(block, last=False)

    def __contains__(self, content: bytes) -> bool:
        return content in self._block_of

    @property
    def known(self) -> KeysView[bytes]:
        return self._block_of.keys()

    def block_of(self, content: bytes) -> int | None:
        return self._block_of.get(content)

    def evict(self) -> tuple[int, bytes, Retention | None]:
        """Forgets the least recently used block without a holder. Returns the block, its content and its retention."""
        if self._unheld:
            block, retention = self._unheld.popitem(last=False)
        else:
            block = next(self._retained.in_order())
            retention = self._retained.remove(block)
        content = self._hash_of[block]
        self.remove(content)
        return block, content, retention

    def remove(self, content: bytes) -> int | None:
        """Forgets a content. Returns the block that had it, if any."""
        if (block := self._block_of.pop(content, None)) is None:
            return None
        del self._hash_of[block]
        self._unheld.pop(block, None)
        self._retained.remove(block)
        if self._changes is not None:
            self._changes.add(content)
        if self.log is not None:
            self.log.removed(content)
        return block

    def forget(self) -> list[int]:
        """Forgets all contents. Returns the blocks without a holder, the least recently used first."""
        if self._changes is not None:
            self._changes.update(self._block_of)
        if self.log is not None:
            self.log.cleared()
        blocks = [*self._unheld, *self._retained.blocks()]
        self._block_of.clear()
        self._hash_of.clear()
        self._unheld.clear()
        self._retained.clear()
        return blocks

    def follow(self) -> list[bytes]:
        """Returns all known contents. From now on, `changes` reports changes."""
        if self._changes is None:
            self._changes = set()
        return list(self._block_of)

    def changes(self) -> set[bytes]:
        """Returns the contents that appeared or disappeared since the last call."""
        if not self._changes:
            return set()
        changes, self._changes = self._changes, set()
        return changes

    def check(self, holders: Sequence[int]) -> None:
        """Checks that both directions agree, and that exactly the blocks without a holder are evictable.

        Raises AssertionError.
        """
        if {block: content for content, block in self._block_of.items()} != self._hash_of:
            raise AssertionError("hash to block and block to hash differ")
        if {*self._unheld, *self._retained.blocks()} != {block for block in self._hash_of if holders[block] == 0}:
            raise AssertionError("a cached block is held, or a block without holders cannot be evicted")
