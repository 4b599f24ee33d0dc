"""Which interpreter settings a call in a user's process may change, and for how long."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pd_cluster.service.concurrency.interpreter_tuning import GC_THRESHOLDS, seldom_collecting


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_collector_is_as_it_was_after_the_last_of_several_calls() -> None:
    with seldom_collecting():
        assert gc.get_threshold() == GC_THRESHOLDS
        with pytest.raises(KeyError), seldom_collecting():
            raise KeyError
        assert gc.get_threshold() == GC_THRESHOLDS
    assert gc.get_threshold() == (700, 10, 10)


def test_a_collector_that_looks_even_less_or_not_at_all_stays() -> None:
    gc.set_threshold(0, 10, 10)
    with seldom_collecting():
        assert gc.get_threshold() == (0, 10, 10)
    gc.set_threshold(50_000, 20, 20)
    with seldom_collecting():
        assert gc.get_threshold() == (50_000, 1_000, 20)
    assert gc.get_threshold() == (50_000, 20, 20)
