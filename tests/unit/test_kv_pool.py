"""A CPU pool's memory is one memfd, whose pages `close` releases."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch

from pd_cluster.errors import ConfigError
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from tests.support.held import held, more_than

LAYOUT = KVLayout(2, 1, keys_and_values(16), 16, "float32")


def test_closed_it_holds_nothing() -> None:
    torch.zeros(LAYOUT.block_nbytes * 64).fill_(1.0)  # makes torch start its threads before counting
    before = held()
    with KVPool(LAYOUT, 64) as pool:
        pool.data.fill_(1.0)
        assert held()["pages of memfds"] > before["pages of memfds"]
    pool.close()
    assert more_than(before) == Counter()
    with pytest.raises(AttributeError, match="memory"):
        pool.block(0)


def test_one_that_nobody_closes_holds_nothing_either() -> None:
    before = held()
    KVPool(LAYOUT, 64).data.fill_(1.0)
    gc.collect()
    assert more_than(before) == Counter()


def test_a_view_of_a_closed_pool_reads_zeros() -> None:
    pool = KVPool(LAYOUT, 64)
    pool.data.fill_(1.0)
    view = pool.data
    pool.close()
    assert not torch.any(view)
    before = held()
    del view
    assert (before - held())["mappings of memfds"] == 1


def test_one_that_does_not_fit_holds_nothing() -> None:
    before = held()
    with pytest.raises(ConfigError, match="cannot be mapped"):
        KVPool(LAYOUT, 1 << 50)
    assert more_than(before) == Counter()
