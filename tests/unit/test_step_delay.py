"""When a decode step waits for more sequences to join, and what ends the wait."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pd_cluster.engine.handover.tail_latency import TailLatency
from pd_cluster.engine.scheduling import step_delay
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.scheduling.step_delay import LandingWait, StepDelay
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.transport.link_events import Arrived, Drained, Landed, LandFault
from pd_cluster.types import Request, RequestSpec, Sampling


@dataclass
class PendingLandings:
    num: int = 0
    num_landings: int = 0

    def num_incoming(self, batch: str) -> int:
        return self.num if batch == "a 0" else 0


class World:
    def __init__(self, num_running: int, num_coming: int) -> None:
        self.now_s = 100.0
        self.scheduler = StepScheduler([LayerGroup(BlockPool(100))], StepSizes(4, 100, 1000))
        self.coming = PendingLandings(num_coming)
        self.step_delay = StepDelay(self.scheduler, self.coming, lambda: self.now_s)
        for at in range(num_running):
            self.land(f"r{at}")

    def land(self, name: str, batch: str = "a") -> Request:
        request = Request(name, RequestSpec([1, 2, 3], Sampling(max_tokens=4), batch=batch), leg="decode")
        self.scheduler.land(request, 4)
        self.scheduler.landed(request)
        request.output_token_ids.append(5)
        self.coming.num_landings += 1
        assert self.step_delay.waits is not None  # checked before every step
        return request


def test_a_step_waits_while_many_more_are_on_their_way() -> None:
    for num_running, num_coming in ((1, step_delay.MAX_INCOMING + 1), (4, 4 * step_delay.MAX_INCOMING + 1), (1, 50)):
        world = World(num_running, num_coming)
        assert world.step_delay.waits
        world.coming.num = step_delay.MAX_INCOMING * num_running
        assert not world.step_delay.waits
    assert not World(0, 50).step_delay.waits, "without running sequences nothing must wait"


def test_one_who_is_read_along_and_prompts_to_compute_here_end_the_wait() -> None:
    world = World(3, 50)
    assert world.step_delay.waits
    world.land("streamed", batch="")
    assert not world.step_delay.waits
    world = World(3, 50)
    world.scheduler.add(Request("resumed", RequestSpec([1, 2, 3], Sampling(max_tokens=4), batch="a")))
    assert not world.step_delay.waits
    world.scheduler.plan()  # admitted, so it runs, but its prompt is not computed yet
    assert not world.scheduler.waiting
    assert not world.step_delay.waits


def test_the_wait_has_an_end() -> None:
    world = World(3, 50)
    world.now_s += step_delay.MAX_WAIT_S
    assert world.step_delay.waits
    world.now_s += 0.01
    assert not world.step_delay.waits
    world.land("late")
    assert world.step_delay.waits


# ---- waiting for a landing


@dataclass
class Waiting:
    """A LandingWait with a test clock; the next landing is expected after `imminent_s`."""

    imminent_s: float | None = None
    now_s: float = 100.0

    def __post_init__(self) -> None:
        self.wait = LandingWait(self, lambda: self.now_s)

    def mark_late(self) -> None:
        self.imminent_s = None

    def left_s(self, step_s: float, num_running: int = 2) -> float:
        return self.wait.left_s(step_s, num_running)


def test_a_step_waits_a_moment_for_what_is_about_to_join() -> None:
    world = Waiting()
    assert world.left_s(0.04) == 0
    world.imminent_s = 0.0
    assert Waiting(0.0).left_s(0.0) == 0, "no step may wait before one was measured"
    assert world.left_s(0.04) == pytest.approx(0.04 * step_delay.MAX_LANDING_DELAY_SHARE)
    world.now_s += 0.004
    assert world.left_s(0.04) == pytest.approx(0.04 * step_delay.MAX_LANDING_DELAY_SHARE - 0.004)
    world.imminent_s = None  # the landing has joined
    assert world.left_s(0.04) == 0
    world = Waiting(0.003)
    assert world.left_s(0.04, 20) == 0, "many sequences must not lose more than one gains"
    assert world.left_s(0.04, 10) == pytest.approx(0.004)


def test_a_late_one_is_not_waited_for_again() -> None:
    """A paused peer must not slow down every step; another landing is awaited."""
    world = Waiting(0.0)
    assert world.left_s(9.0) == pytest.approx(step_delay.MAX_LANDING_DELAY_S)
    world.now_s += step_delay.MAX_LANDING_DELAY_S
    assert world.left_s(9.0) == 0
    assert world.imminent_s is None
    world.imminent_s = 0.0  # another landing
    assert world.left_s(9.0) == pytest.approx(step_delay.MAX_LANDING_DELAY_S)


def test_no_step_waits_in_vain() -> None:
    """A step does not wait for a landing expected too late for it; a later step may."""
    world = Waiting(0.012)
    assert world.left_s(0.04) == 0
    world.imminent_s = 0.008
    assert world.left_s(0.04) == pytest.approx(0.04 * step_delay.MAX_LANDING_DELAY_SHARE)
    world.now_s += 0.009
    world.imminent_s = 0.0  # overdue
    assert world.left_s(0.04) == pytest.approx(0.001)
    world.imminent_s = 0.012  # the first has joined; this is another one
    assert world.left_s(0.04) == 0


def test_the_end_of_a_transfer_takes_as_long_as_those_before() -> None:
    now_s = [100.0]
    tail_latency = TailLatency(lambda: now_s[0])

    def comes(name: str, tail_s: float) -> None:
        tail_latency.note(Arrived(name))
        now_s[0] += tail_s
        tail_latency.note(Landed(name, [], 0))

    tail_latency.note(Arrived("first"))
    assert tail_latency.left_s("first") == 0  # nothing is known
    now_s[0] += 0.01
    tail_latency.note(Landed("first", [], 0))
    tail_latency.note(Arrived("second"))
    assert tail_latency.left_s("second") == pytest.approx(0.01)
    now_s[0] += 0.004
    assert tail_latency.left_s("second") == pytest.approx(0.006)
    now_s[0] += 0.1
    assert tail_latency.left_s("second") == 0  # overdue
    tail_latency.note(LandFault("second", "cut"))
    for _ in range(50):
        comes("slower", 0.02)
    tail_latency.note(Arrived("last"))
    assert tail_latency.left_s("last") == pytest.approx(0.02, rel=0.01)
    tail_latency.note(Drained("last"))
    assert not len(tail_latency)
    assert tail_latency.left_s("last") == 0
