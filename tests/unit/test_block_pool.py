"""The block pool: takes all blocks or none, counts holders, and detects corruption in `check()`."""

from __future__ import annotations

import random

import pytest

from pd_cluster.errors import OutOfBlocks
from pd_cluster.kv.block_pool import BlockPool


def test_taking_is_all_or_nothing_and_releasing_counts() -> None:
    pool = BlockPool(3)
    pool.take(2)
    with pytest.raises(OutOfBlocks) as caught:
        pool.take(2)
    assert (caught.value.wanted, caught.value.free) == (2, 1)
    assert pool.num_free == 1
    assert pool.num_held == 2
    pool = BlockPool(2)
    taken = pool.take(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(taken)
    pool = BlockPool(4)
    table = pool.take(2)
    pool.check([table])
    for wrong in ([], [table, table], [[*table, 3]], [table[:1]]):
        with pytest.raises(AssertionError):
            pool.check(wrong)


def test_a_block_rests_after_its_release_or_comes_again_at_once() -> None:
    """Without `rests`, a released block is reused at once, so prefill on a CPU writes to memory in its caches."""
    pool = BlockPool(3)
    (first,) = pool.take(1)
    pool.release([first])
    assert first not in pool.take(2)
    pool = BlockPool(8, rests=False)
    assert pool.take(3) == [0, 1, 2]
    pool.release([0, 1, 2])
    assert sorted(pool.take(3)) == [0, 1, 2]
    assert pool.take(1) == [3]
    pool.check([[0, 1, 2], [3]])


def test_contents_are_forgotten_whoever_holds_them() -> None:
    """A cached block becomes free at once, a held one when released; followers are notified of both."""
    pool = BlockPool(4)
    held, cached, plain = pool.take(3)
    pool.remember(held, b"h" * 32)
    pool.remember(cached, b"c" * 32)
    pool.follow()
    pool.release([cached])
    assert (pool.num_cached, pool.num_free) == (1, 1)
    pool.forget()
    assert (pool.num_cached, pool.num_free, pool.num_resets) == (0, 2, 1)
    assert pool.find([b"h" * 32]) == pool.find([b"c" * 32]) == []
    assert pool.changes() == {b"h" * 32: None, b"c" * 32: None}
    pool.check([[held, plain]])
    pool.remember(plain, b"h" * 32)  # forgotten content may be computed again
    pool.release([held, plain])
    pool.check([])
    assert (pool.num_cached, pool.find([b"h" * 32])) == (1, [plain])


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(16)
    tables: list[list[int]] = []
    for _ in range(300):
        if tables and rng.random() < 0.5:
            pool.release(tables.pop(rng.randrange(len(tables))))
        else:
            wanted = rng.randrange(1, 8)
            if wanted <= pool.num_free:
                tables.append(pool.take(wanted))
        pool.check(tables)
        assert pool.num_free + pool.num_cached + pool.num_held == pool.num_blocks
