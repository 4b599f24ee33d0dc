"""`pd-cluster bench faults` without a cluster: when requests leave, what counts as complete, exact, apart and held."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from benchmarks.faults.bench import FaultsBench, make_bench
from benchmarks.faults.report import Run, first_difference, is_right, show
from benchmarks.faults.scripts import FAULTS
from benchmarks.faults.stage import Stage, is_whole
from benchmarks.faults.terms import Seen
from benchmarks.load import Answer, Load, make_asks, poisson
from pd_cluster.client.streaming import Sample
from pd_cluster.cluster.processes.launcher import Cluster
from pd_cluster.errors import ConfigError, PdClusterError

EXPECTED = [(1, 2, 3), (4, 5, 6)]
WAIT_S = 60.0


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(0)
        self.now_s += duration_s


def answer(number: int, token_ids: tuple[int, ...] = (), error: str | None = None, sent_s: float = 0.0) -> Answer:
    sample = Sample(token_ids=token_ids, error=error, itl_s=[0.1, 0.4], ttft_s=0.2, served_by=("prefill-0", "decode-1"))
    return Answer(number, sent_s, sent_s + 1, sample)


# ---- the load


def test_the_same_seed_asks_the_same() -> None:
    asks = make_asks(random.Random(3), 40)
    assert asks == make_asks(random.Random(3), 40)
    assert asks != make_asks(random.Random(4), 40)
    greedy, drawn = asks[0].body("m", "quiet 0"), asks[1].body("m", "quiet 0")
    assert (greedy["temperature"], "seed" in greedy, greedy["cache_salt"]) == (0.0, False, "quiet 0")
    assert (drawn["temperature"], drawn["seed"]) == (1.0, asks[1].seed)
    assert len({len(ask.prompt) for ask in asks}) > 20
    assert len({ask.max_tokens for ask in asks}) > 15


def test_arrivals_are_seeded_and_have_the_rate() -> None:
    gaps_s, same = poisson(random.Random(1), 20.0), poisson(random.Random(1), 20.0)
    first = [next(gaps_s) for _ in range(5000)]
    assert first == [next(same) for _ in range(5000)]
    assert sum(first) / 5000 == pytest.approx(1 / 20, rel=0.05)


def test_requests_leave_at_their_time_whatever_became_of_the_last() -> None:
    async def test() -> None:
        time, hold = FakeTime(), asyncio.Event()
        bodies: list[int] = []

        async def send(body: Mapping[str, Any]) -> Sample:
            bodies.append(body["number"])
            if body["number"] == 0:
                await hold.wait()
            if len(bodies) == 4:
                hold.set()
            return Sample()

        load = Load(lambda number: {"number": number}, [1.0, 0.5, 2.0, 0.25, 9.0], send, time.clock, time.sleep)
        await load.run(lambda number: number >= 4)
        assert bodies == [0, 1, 2, 3]
        assert {a.number: a.sent_s - 100 for a in load.answers} == {0: 1.0, 1: 1.5, 2: 3.5, 3: 3.75}

    asyncio.run(asyncio.wait_for(test(), WAIT_S))


def test_the_capacity_counts_what_ended_while_all_places_were_taken() -> None:
    async def test() -> None:
        time = FakeTime()
        running, most = 0, 0

        async def send(body: Mapping[str, Any]) -> Sample:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await time.sleep(1.0)
            running -= 1
            return Sample()

        load = Load(lambda number: {}, [], send, time.clock, time.sleep)
        rate = await load.closed_loop(10, concurrency=3)
        assert (most, len(load.answers)) == (3, 10)
        last_sent_s = max(a.sent_s for a in load.answers)
        assert rate == sum(a.ended_s <= last_sent_s for a in load.answers) / (last_sent_s - 100)

    asyncio.run(asyncio.wait_for(test(), WAIT_S))


# ---- the figures


def test_failed_and_different_requests_are_seen_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [
        answer(0, (1, 2, 3)),
        answer(1, (4, 9, 6)),
        answer(2, (1,), error="decode-0 was lost"),
        answer(3, (4, 5, 6)),
    ]
    run = Run("kill-decode", "a death", answers, EXPECTED, FAULTS["kill-decode"], Seen([0.2, 1.5]), 2, 0)
    found = {r.name.removeprefix("kill-decode "): (r.value, r.met) for r in run.results()}
    assert found["complete"] == (75.0, False)
    assert found["exact"] == (pytest.approx(200 / 3), False)
    assert found["seen after"] == (1.5, False)
    assert found["worst gap"] == (0.4, None)
    assert (found["replayed"], found["held"], found["apart"]) == ((2, None), (0, True), (0, None))
    assert not is_right([run])
    show("title", [run])
    printed = capsys.readouterr().out
    assert "request 1 (prefill-0 and decode-1) differs from token 1 on: [9, 6] instead of [5, 6]" in printed
    assert "request 2 (prefill-0 and decode-1, 1 tokens, 1.0 s) failed: decode-0 was lost" in printed
    assert "not reached: kill-decode seen after 1.5 s, the goal is 1" in printed


def test_what_met_a_dead_scheduler_is_apart_and_what_came_later_is_not() -> None:
    answers = [answer(0, error="no connection", sent_s=9.0), answer(1, (4, 5, 6), sent_s=9.5)]
    late = answer(2, error="no connection", sent_s=11.0)
    seen = Seen(served_s=[1.2], back_s=10.0)
    run = Run("kill-scheduler", "restart", answers, EXPECTED, FAULTS["kill-scheduler"], seen)
    assert (len(run.apart), run.failed, is_right([run])) == (1, [], True)
    run = Run("kill-scheduler", "restart", [*answers, late], EXPECTED, FAULTS["kill-scheduler"], seen)
    assert (len(run.apart), run.failed, is_right([run])) == (1, [late], False)


@pytest.mark.parametrize("wrong", ["held", "different"])
def test_one_held_block_or_one_other_token_is_wrong(wrong: str) -> None:
    good = answer(0, (1, 2, 3))
    bad = answer(0, (1, 2)) if wrong == "different" else good
    assert is_right([Run("rolling", "a restart", [good], EXPECTED)])
    assert not is_right([Run("rolling", "a restart", [good, bad], EXPECTED, num_held=int(wrong == "held"))])


def test_where_two_outputs_part() -> None:
    assert first_difference((1, 2, 3), (1, 5, 3)) == 1
    assert first_difference((1, 2, 3), (1, 2)) == 2


# ---- what is seen of the cluster


def instance(name: str, state: str = "ready", links: int = 0, **more: int) -> dict[str, Any]:
    counts = {"num_blocks": 10, "num_free_blocks": 6, "num_cached_blocks": 4, "num_outstanding": 0, "num_heartbeats": 5}
    up = {f"decode-{at}@1": "up (shm)" for at in range(links)}
    return {"instance_id": name, "role": name[:-2], "state": state, "links": up, **counts, **more}


def test_whole_is_everybody_ready_and_every_link_up() -> None:
    decodes = [instance("decode-0"), instance("decode-1")]
    assert is_whole([instance("prefill-0", links=2), *decodes])
    assert not is_whole([instance("prefill-0", links=1), *decodes])
    assert not is_whole([instance("prefill-0", links=2), instance("decode-0"), instance("decode-1", "loading")])
    assert not is_whole([])


def stage_of(answers: dict[str, list[Any]]) -> Stage:
    """Makes the stage of an admin address that gives these answers in turn, the last one forever."""

    def handle(request: httpx.Request) -> httpx.Response:
        found = answers[request.url.path]
        return httpx.Response(200, json=found.pop(0) if len(found) > 1 else found[0])

    cluster = SimpleNamespace(launch=SimpleNamespace(admin_url="http://admin", url="http://public"))
    return Stage(cast(Cluster, cluster), httpx.AsyncClient(transport=httpx.MockTransport(handle)))


def test_blocks_are_counted_once_every_instance_has_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.faults.stage.POLL_S", 0.0)
    first, stale = instance("decode-0"), instance("decode-0", num_heartbeats=6)
    busy = instance("decode-0", num_heartbeats=7, num_free_blocks=4, num_outstanding=1)
    home = instance("decode-0", num_heartbeats=8)
    stage = stage_of({"/instances": [{"instances": [each]} for each in (first, stale, busy, home)]})
    assert asyncio.run(stage.held()) == 0
    monkeypatch.setattr("benchmarks.faults.stage.SETTLE_TIMEOUT_S", 0.0)
    stage = stage_of({"/instances": [{"instances": [each]} for each in (first, busy)]})
    assert asyncio.run(stage.held()) == 3


def test_a_loss_that_nobody_notices_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.faults.stage.POLL_S", 0.0)
    stage = stage_of(
        {"/instances": [{"instances": [instance("decode-0", state)]} for state in ("ready", "unreachable")]}
    )
    assert asyncio.run(stage.lost("decode-0")) > 0
    monkeypatch.setattr("benchmarks.faults.stage.WHOLE_TIMEOUT_S", 0.01)
    with pytest.raises(PdClusterError, match="the loss of decode-0 was not noticed"):
        asyncio.run(stage_of({"/instances": [{"instances": [instance("decode-0")]}]}).lost("decode-0"))


def test_a_fault_waits_for_a_busy_instance_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.faults.stage.POLL_S", 0.0)
    told = [{"instances": [instance("decode-0", num_outstanding=count)]} for count in (0, 3, 4)]
    stage = stage_of({"/instances": told})
    asyncio.run(stage.busy("decode-0"))
    assert len(told) == 1
    monkeypatch.setattr("benchmarks.faults.stage.BUSY_TIMEOUT_S", 0.01)
    asyncio.run(stage_of({"/instances": [{"instances": []}]}).busy("decode-0"))


def test_replays_are_counted_in_the_run_that_they_belong_to() -> None:
    def told(**counts: int) -> dict[str, Any]:
        return {"requests": [{"request_id": name, "num_replays": count} for name, count in counts.items()]}

    async def test() -> None:
        stage = stage_of({"/requests": [told(a=0, b=0), told(a=0, b=2, c=1), told(b=2, c=1, d=1)]})
        await stage.count_replays()
        await stage.count_replays()
        assert stage.take_replays() == (2, 3)
        await stage.count_replays()
        assert stage.take_replays() == (1, 1)

    asyncio.run(test())


# ---- the command line


def test_wrong_parameters_are_named() -> None:
    with pytest.raises(ConfigError, match="--faults 'kill-all': expected some of kill-prefill,"):
        make_bench("", "kill-all", 10, 0.7, 0, quick=False)
    with pytest.raises(ConfigError, match="--load 0: "):
        make_bench("", "", 10, 0.0, 0, quick=False)


def test_the_command_can_be_repeated() -> None:
    assert FaultsBench().command == "pd-cluster bench faults --num-requests 1000 --load 0.7 --seed 0"
    bench = make_bench("m", "rolling,kill-both", 10, 0.5, 3, quick=False)
    assert (
        bench.command
        == "pd-cluster bench faults --model m --faults rolling,kill-both --num-requests 10 --load 0.5 --seed 3"
    )
    quick = make_bench("", "", 1000, 0.7, 0, quick=True)
    assert quick.command == "pd-cluster bench faults --quick --load 0.7 --seed 0"
