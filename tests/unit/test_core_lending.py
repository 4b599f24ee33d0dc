"""Whether small steps use lent cores depends on measured times, and both ways are measured again regularly."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pd_cluster.model.runner.core_lending import MOST_TOKENS, NUM_TRIED, TRIED_AGAIN_S, CoreLending


class Steps:
    """Runs steps whose duration depends on whether they borrow."""

    def __init__(self, took_s: Callable[[bool], float]) -> None:
        self.borrowing = CoreLending()
        self.took_s = took_s
        self.now_s = 1000.0

    def one(self, num_tokens: int = 8, offered: tuple[bool, ...] = (True, True)) -> bool:
        """Runs a step; returns whether it borrowed at its last opportunity."""
        self.borrowing.begin(num_tokens, self.now_s)
        taken = [self.borrowing.takes(each) for each in offered]
        self.now_s += self.took_s(taken[-1])
        self.borrowing.end(self.now_s)
        return taken[-1]

    def many(self, count: int, num_tokens: int = 8) -> list[bool]:
        return [self.one(num_tokens) for _ in range(count)]


@pytest.mark.parametrize(("with_lent_s", "borrows"), [(0.010, True), (0.013, True), (0.0145, False), (0.030, False)])
def test_the_faster_way_is_taken(with_lent_s: float, borrows: bool) -> None:
    """Borrowing must save a tenth of the time, because other ranks could use the cores."""
    steps = Steps(lambda lent: with_lent_s if lent else 0.015)
    assert steps.many(2 * NUM_TRIED) == [True] * NUM_TRIED + [False] * NUM_TRIED
    assert steps.many(100) == [borrows] * 100


def test_both_ways_are_tried_again_for_each_size() -> None:
    """The choice follows when another program on the lent cores ends and starts again, separately for each size."""
    is_busy = True
    steps = Steps(lambda lent: (0.03 if is_busy else 0.01) if lent else 0.015)
    steps.many(2 * NUM_TRIED)
    assert not any(steps.many(50))
    is_busy = False
    steps.now_s += TRIED_AGAIN_S
    assert steps.many(2 * NUM_TRIED) == [True] * NUM_TRIED + [False] * NUM_TRIED
    assert all(steps.many(50)), "earlier measurements must be forgotten"
    is_busy = True
    assert sum(steps.many(20)) < 10, "measurements while borrowing must count at once"
    steps = Steps(lambda lent: 0.01 if lent else 0.02)
    assert all(steps.many(2 * NUM_TRIED + 10)[2 * NUM_TRIED :])
    steps.took_s = lambda lent: 0.02 if lent else 0.01
    assert not any(steps.many(2 * NUM_TRIED + 10, num_tokens=16)[2 * NUM_TRIED :])
    assert steps.one(num_tokens=8)
    assert not steps.one(num_tokens=31)


def test_few_steps_are_trials_and_long_ones_always_borrow() -> None:
    """Trials are slower, so they must be under 1 % of all steps; long steps borrow without trials."""
    steps = Steps(lambda lent: 0.03 if lent else 0.015)
    steps.many(2 * NUM_TRIED)
    assert sum(steps.many(5_000)) < 40
    steps = Steps(lambda lent: 1.0 if lent else 0.1)
    assert all(steps.many(50, num_tokens=MOST_TOKENS + 1))
    assert steps.one(MOST_TOKENS + 1, (False, True)), "a long step must borrow as soon as cores are lent"


def test_steps_that_share_the_memory_do_not_count() -> None:
    """A step that runs beside another instance's step shares memory bandwidth, so its time is not measured."""
    steps = Steps(lambda lent: 0.01 if lent else 0.02)
    for offered in ((False, False), (True, False), (False, True)):
        for _ in range(20):
            steps.one(offered=offered)
    assert steps.many(2 * NUM_TRIED) == [True] * NUM_TRIED + [False] * NUM_TRIED
    # A lender that computes sometimes; its cores are used in between
    steps = Steps(lambda lent: 0.1 if lent else 0.2)
    taken = [steps.one(offered=(False, True)) for _ in range(200)]
    assert taken.count(True) > 150
    assert steps.many(2 * NUM_TRIED)[-1]


def test_nothing_is_taken_that_is_not_offered() -> None:
    rng = random.Random(3)
    steps = Steps(lambda lent: rng.uniform(0.001, 0.1))
    for _ in range(2000):
        offered = rng.random() < 0.5
        taken = steps.one(rng.randrange(1, 2 * MOST_TOKENS), (offered,))
        assert offered or not taken
        steps.now_s += rng.choice((0, 0, 0, 30))
