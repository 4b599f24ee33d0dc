"""Estimates of how long clients wait before they leave, and their effect on requests under overload."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator

import pytest

from pd_cluster.cluster.queueing.abandonment import LEAST_LEFT, STEP, Abandonment, AbandonmentTimes, AnswerTimes
from pd_cluster.cluster.routing.admission_queue import QueuedRequest
from pd_cluster.errors import Overloaded
from tests.support.hall import Hall


def told(times: AbandonmentTimes, outcomes: Iterator[tuple[float, bool]]) -> float:
    """Records one outcome per 0.1 s; returns the estimated median."""
    for at, (after_s, has_left) in enumerate(outcomes):
        times.note(at / 10, after_s, has_left)
    return times.median_s(at / 10)


@pytest.mark.parametrize("timeout_s", [2.0, 10.0, 300.0])
@pytest.mark.parametrize("answered_share", [0.0, 0.3, 0.9])
def test_a_timeout_is_found(timeout_s: float, answered_share: float) -> None:
    """A fixed client timeout is estimated whether few or most requests are answered before it."""
    rng = random.Random(0)
    share = answered_share
    outcomes = ((timeout_s * rng.random(), False) if rng.random() < share else (timeout_s, True) for _ in range(500))
    assert timeout_s / STEP <= told(AbandonmentTimes(), outcomes) <= timeout_s


def test_people_who_stop_some_answers_early_have_no_timeout() -> None:
    rng = random.Random(0)
    outcomes = ((rng.expovariate(0.2), rng.random() < 0.1) for _ in range(2000))
    assert told(AbandonmentTimes(), outcomes) > 20.0


def test_few_say_nothing_and_what_was_long_ago_is_forgotten() -> None:
    times = AbandonmentTimes()
    for at in range(int(LEAST_LEFT)):
        assert times.median_s(at / 10) == math.inf
        times.note(at / 10, 2.0, True)
    assert times.median_s(at / 10) == pytest.approx(2.0, rel=0.1)
    assert times.median_s(600.0) == math.inf


def test_a_client_that_leaves_says_little_of_others() -> None:
    leaving, hog, others = Abandonment(), AbandonmentTimes(), [AbandonmentTimes() for _ in range(20)]
    for at in range(400):
        leaving.note(hog, at / 3, 0.1, True)
    for at, each in enumerate(others * 10):
        leaving.note(each, 100 + at / 10, 30.0, False)
    assert leaving.abandon_after_s(hog, 134.0) == pytest.approx(0.1, rel=0.1)
    assert leaving.abandon_after_s(AbandonmentTimes(), 134.0) == math.inf


def test_a_program_that_ends_with_all_its_requests_has_left_once() -> None:
    leaving, own = Abandonment(), AbandonmentTimes()
    for _ in range(1000):
        leaving.note(own, 5.0, 3.0, True)
    assert leaving.abandon_after_s(own, 5.0) == math.inf


def test_answers_take_as_long_as_they_took_lately_by_their_size() -> None:
    answers = AnswerTimes()
    assert answers.expected_s(10) == 0.0
    for at in range(50):
        answers.note(at, 2.0, 100)
    assert answers.expected_s(100) == pytest.approx(2.0)
    assert answers.expected_s(200) == pytest.approx(4.0)
    assert answers.expected_s(100_000) == pytest.approx(8.0)
    for at in range(50, 500):
        answers.note(at, 1.0, 100)
    assert answers.expected_s(100) == pytest.approx(1.0, rel=0.05)


async def test_a_request_that_would_be_answered_too_late_is_refused_with_a_time_to_come_back() -> None:
    """Refuses a request on arrival if the expected wait is too long, otherwise when its turn comes too late."""
    hall = Hall()
    client = await hall.room.turn(QueuedRequest("a", 10, 1))
    hall.room.begun(client)
    for at in range(20):
        hall.room.abandonment.note(client.client.leave_times, asyncio.get_running_loop().time() + at / 5, 0.2, True)
    hall.close()
    (late,) = await hall.waiting(1)
    with pytest.raises(Overloaded, match=r"has waited .* the 0.19 s after") as refused:
        await late
    assert refused.value.retry_after_s >= 1
    (waiting,) = await hall.waiting(1, "a", 100)
    hall.measured(10.0)
    with pytest.raises(Overloaded, match=r"the expected wait of 10 s is too long .* the 0.19 s after"):
        await hall.visit("a")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
