"""Retained blocks are evicted last, within their owner's share and their lifetime; live requests may take any."""

from __future__ import annotations

from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.host_tier import HostTier, LoadCost
from pd_cluster.kv.lower_tier import LowerTier
from pd_cluster.kv.tier_commands import TierDone, Write
from pd_cluster.types import Retention


def cached(pool: BlockPool, names: str, retention: Retention | None = None) -> None:
    """Caches a block for each letter, from least to most recently used."""
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
    cached(pool, "cdef", Retention("two", 10.0))  # its share is two of four
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
    assert known(pool, "abcd") == "cd"  # more recently used
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


# ---- tiers


class TieredPool:
    """A pool over host memory and a disk tier, whose commands succeed at once."""

    def __init__(self, num_blocks: int, num_slots: int, num_files: int) -> None:
        self.host = HostTier(num_slots, 0, LoadCost(16))
        self.pool = BlockPool(num_blocks, tier=self.host)
        self.disk = LowerTier("disk", self.host, num_files, 1, 16, lambda: 0.0)
        self.disk.opened(0, [])
        self.host.lower = [self.disk]

    def cached(self, names: str, retention: Retention | None = None) -> None:
        for name in names:
            self.host.begin(lambda *move: None)
            cached(self.pool, name, retention)
            while commands := self.disk.take_commands():
                for each in commands:
                    if isinstance(each, Write):
                        self.disk.done(TierDone("disk", each.job, 0, 1))
        self.host.check()
        self.pool.check([])

    def on_host(self, names: str) -> str:
        return "".join(name for name in names if name.encode() in self.host)

    def on_disk(self, names: str) -> str:
        return "".join(name for name in names if name.encode() in self.disk)


def test_tiers_drop_retained_blocks_after_others() -> None:
    """Includes retained blocks that the device evicted early because they exceeded their owner's share there."""
    tiers = TieredPool(num_blocks=2, num_slots=6, num_files=8)
    tiers.cached("abc", Retention("key", 10.0))
    tiers.cached("defghijklm")
    names = "abcdefghijklm"
    assert (known(tiers.pool, names), tiers.on_host(names), tiers.on_disk(names)) == ("cm", "abijkl", "abghijkl")
    tiers.pool.expire(10.0)
    tiers.cached("nopqrstu")
    assert tiers.on_host("ab") == tiers.on_disk("ab") == ""


def test_owners_share_host_memory() -> None:
    tiers = TieredPool(num_blocks=2, num_slots=8, num_files=12)
    tiers.cached("ab", Retention("one", 10.0))
    tiers.cached("cdef", Retention("two", 10.0))  # its share is two of four
    tiers.cached("ghijkl")
    assert known(tiers.pool, "abcdefghijkl") == "bl"
    assert tiers.on_host("abcdefghijkl") == "aefghijk"
    tiers.pool.forget()
    tiers.host.check()
