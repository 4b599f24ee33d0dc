"""Retained blocks are evicted last, within their owner's share and their time; a live request may take any."""

from __future__ import annotations

from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.types import Retention


def cached(pool: BlockPool, names: str, retention: Retention | None = None) -> None:
    """Caches a block for each letter; the first is the least recently used."""
    for name in names:
        (block,) = pool.take(1)
        pool.remember(block, name.encode())
        pool.release([block], retention)


def known(pool: BlockPool, names: str) -> str:
    return "".join(name for name in names if name.encode() in pool)


def test_retained_blocks_go_last() -> None:
    pool = BlockPool(8)
    cached(pool, "ab", Retention("key", 10.0))
    cached(pool, "cdefgh")
    held = pool.take(6)
    assert known(pool, "abcdefgh") == "ab"
    assert pool.num_available == 2
    held += pool.take(2)  # a live request may take any block
    assert known(pool, "ab") == ""
    pool.release(held)
    pool.check([])


def test_an_owner_has_its_share_of_half_the_pool() -> None:
    pool = BlockPool(8)
    cached(pool, "ab", Retention("one", 10.0))
    cached(pool, "cdef", Retention("two", 10.0))  # has two of four
    cached(pool, "gh")
    held = pool.take(4)
    assert known(pool, "abcdefgh") == "abef"
    pool.release(held)
    pool.check([])


def test_a_retention_ends() -> None:
    pool = BlockPool(4)
    cached(pool, "ab", Retention("key", 10.0))
    cached(pool, "cd")
    pool.expire(9.0)
    pool.check([])
    pool.expire(10.0)
    held = pool.take(2)
    assert known(pool, "abcd") == "cd"  # used later
    pool.release(held)
    pool.check([])


def test_a_shared_block_is_held_and_dropped_again() -> None:
    pool = BlockPool(4)
    cached(pool, "a", Retention("key", 10.0))
    block = pool.block_of(b"a")
    assert block is not None
    pool.share([block])
    assert pool.num_available == 3
    pool.release([block])
    assert pool.num_available == 4
    pool.forget()
    assert pool.num_free == 4
    pool.check([])
