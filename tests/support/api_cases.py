"""Schemathesis' test cases for an API operation, and what must hold for a cluster after any number of bad requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.cluster import LiveCluster

if TYPE_CHECKING:
    from schemathesis import Case

MODES = ("positive", "negative")  # values of Schemathesis' GenerationMode, whose import takes a second


def each_case(operation: Any, mode: str, num_cases: int, use: Callable[[Case, random.Random], None]) -> None:
    """Generates `num_cases` cases, the same in each run, and calls `use` with each and a seeded random generator."""
    from schemathesis import GenerationMode

    @seed(num_cases)
    @settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)), choose=st.randoms(use_true_random=False))
    def make(case: Case, choose: random.Random) -> None:
        use(case, choose)

    make()


@contextmanager
def nothing_left(cluster: LiveCluster) -> Iterator[None]:
    """Asserts afterwards that all blocks are released, all processes still run, and no log has a traceback."""
    epochs = [instance["epoch"] for instance in cluster.instances()]
    yield
    cluster.assert_home()
    assert [instance["epoch"] for instance in cluster.instances()] == epochs
    for name in cluster.processes:
        log = cluster.log_file(name).read_text(errors="replace")
        assert "Traceback" not in log, log[-3000:]
