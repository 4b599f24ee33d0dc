"""Request counters: in one process, reported by several, and summed while processes die and restart."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from typing import Any, cast

import msgspec
import prometheus_client
import pytest

from pd_cluster import wire
from pd_cluster.cluster.members import membership_mirror as mirror_module
from pd_cluster.cluster.members.membership_mirror import MembershipMirror
from pd_cluster.cluster.placement.wait_prediction import Goals
from pd_cluster.cluster.processes.api_processes import ApiProcesses
from pd_cluster.cluster.records.request_stats import BOUNDS, COUNTERS, Histogram, Outcome, RequestStats, added
from pd_cluster.cluster.records.request_timeline import Timeline, WorkerClock
from pd_cluster.errors import GenerationError, Overloaded, Unavailable
from pd_cluster.process_messages import AllStats, ApiReport, Busy, OthersBusy, Stats, ToApi
from pd_cluster.settings.process_configs import ApiProcessConfig
from pd_cluster.types import LegEnd, Sampling, TokenOutput
from pd_cluster.wire import TraceEvent
from tests.support.router_world import PROMPT, World, rest_of, token, turns

# ---- a histogram


@pytest.mark.parametrize("name", list(BOUNDS))
def test_a_histogram_counts_as_prometheus_own_does(name: str) -> None:
    rng, bounds = random.Random(name), BOUNDS[name]
    values = [*bounds, 0.0, *(rng.lognormvariate(0, 4) for _ in range(500))]
    histogram = Histogram(bounds)
    reference = prometheus_client.Histogram("x", "x", buckets=bounds, registry=None)
    for value in values:
        histogram.observe(value)
        reference.observe(value)
    (family,) = reference.collect()
    samples = {each.labels.get("le", each.name): each.value for each in family.samples}
    assert [sum(histogram.counts[: at + 1]) for at in range(len(bounds) + 1)] == [
        samples[prometheus_client.utils.floatToGoString(bound)] for bound in (*bounds, float("inf"))
    ]
    assert histogram.total == samples["x_sum"]


# ---- a request


class Counted(World):
    """A world whose clock advances only when the test sets it."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.now_s = 100.0
        self.router.stats.clock = lambda: self.now_s

    @property
    def told(self) -> Stats:
        return self.router.stats.snapshot()

    def counters(self) -> dict[str, int]:
        """Returns all counters that are not 0, except those of arrivals."""
        counters = self.told.counters.items()
        return {name: number for name, number in counters if number and not name.startswith("arrived_")}

    def seen(self, *names: str) -> list[tuple[int, float]]:
        """Returns (number of values, their sum) of each histogram."""
        found = [self.told.histograms[name] for name in names]
        return [(sum(buckets.counts), buckets.total_e6 / 1e6) for buckets in found]

    def say(self, at_s: float, *tokens: TokenOutput, conn: str = "to-decode-0") -> None:
        self.now_s = at_s
        self.outputs(conn, *tokens)


async def test_a_request_from_arrival_to_last_token() -> None:
    world = Counted()
    serving, first, name = await world.begin(Sampling(max_tokens=9), received_s=99.0)
    timeline = world.router.timelines.find(name)
    assert timeline is not None
    timeline.add(WorkerClock("to-prefill-0", offset_s=50.0), TraceEvent(f"{name}-0", 49.25, "admitted"))
    world.say(101.0, token(name, 0), conn="to-prefill-0")
    await first
    world.say(101.5, token(name, 0), token(name, 1))  # decode repeats the first token
    world.say(103.0, token(name, 3))  # held until its predecessor arrives
    world.say(104.0, token(name, 2), token(name, 4, finish="stop"))
    assert await rest_of(serving) == [1, 2, 3, 4]
    assert world.counters() == {"prompt_tokens": len(PROMPT), "generation_tokens": 5, "finished_stop": 1}
    times = ("first_token_s", "inter_token_s", "whole_s", "queue_s", "prefill_s", "decode_s", "inference_s")
    assert world.seen(*times) == [(1, 2.0), (4, 3.0), (1, 5.0), (1, 0.25), (1, 1.75), (1, 3.0), (1, 4.75)]
    sizes = ("num_prompt_tokens", "num_output_tokens", "most_output_tokens", "max_tokens", "num_sequences")
    assert world.seen(*sizes) == [(1, len(PROMPT)), (1, 5), (1, 5), (1, 9), (1, 1)]


async def test_tokens_that_come_together_count_each_and_share_the_time() -> None:
    """Tokens that arrive together each count and share the elapsed time; times not reported by workers are omitted."""
    world = Counted()
    serving, first, name = await world.begin(Sampling(max_tokens=6), gathers=True)
    world.say(101.0, token(name, 0), conn="to-prefill-0")
    world.say(103.0, token(name, 0), TokenOutput(name, 0, 0, 4, 7, earlier=(7, 7, 7)))
    world.say(103.5, token(name, 5, finish="length"))
    await first
    await rest_of(serving)
    assert world.counters()["generation_tokens"] == 6
    assert world.seen("inter_token_s", "num_output_tokens", "decode_s") == [(5, 2.5), (1, 6), (1, 2.5)]
    counts = world.told.histograms["inter_token_s"].counts
    assert counts[BOUNDS["inter_token_s"].index(0.5)] == 5
    assert [num for num, _ in world.seen("whole_s", "queue_s", "prefill_s", "inference_s", "handover_s")] == [
        1,
        *[0] * 4,
    ]


async def test_each_sequence_counts_by_its_own_reason_and_the_request_once() -> None:
    """A beam search's answer has no times between tokens."""
    world = Counted()
    streams: list[Any] = []
    serving, first, name = await world.begin(Sampling(n=3, max_tokens=4), routed=streams.append)
    world.say(101.0, *(token(name, 0, index=index) for index in range(3)), conn="to-prefill-0")
    await first
    world.say(102.0, token(name, 1, index=0, finish="length"), token(name, 1, index=1), token(name, 1, index=2))
    for _ in range(3):
        await anext(serving)  # the first tokens of both, and the end of sequence 0
    streams[0].stop(1)  # its second token was not read, so it does not count
    world.say(103.0, token(name, 2, index=2, finish="stop"))
    await rest_of(serving)
    finished = {"finished_length": 1, "finished_stop": 2}
    assert world.counters() == {"prompt_tokens": len(PROMPT), "generation_tokens": 2 + 1 + 3, **finished}
    assert world.seen("inter_token_s", "num_output_tokens", "most_output_tokens") == [(4, 4.0), (3, 6), (1, 3)]
    assert world.seen("num_sequences") == [(1, 3)]
    assert [num for num, _ in world.seen("first_token_s", "whole_s")] == [1, 1]
    serving, first, name = await world.begin(Sampling(n=1, beam_width=2, max_tokens=2, temperature=0.0))
    world.say(104.0, token(name, 0), token(name, 1, finish="length"), conn=world.mailbox.of(wire.Submit)[-1][0])
    world.outputs(world.mailbox.of(wire.Submit)[-2][0], ended=LegEnd(name, 0))
    await first
    await rest_of(serving)
    assert world.counters()["generation_tokens"] == 8
    assert world.seen("inter_token_s") == [(4, 4.0)]


@pytest.mark.parametrize(("how", "reason"), [("leaves", "abort"), ("is cancelled", "abort"), ("fails", "error")])
async def test_a_request_that_came_to_no_end_counts_as_that_and_took_no_time(how: str, reason: str) -> None:
    """Covers a request of whose two sequences one has ended."""
    world = Counted()
    serving, first, name = await world.begin(Sampling(n=2, max_tokens=4))
    world.say(101.0, token(name, 0, finish="length"), token(name, 0, index=1), conn="to-prefill-0")
    await first
    await anext(serving)
    if how == "fails":
        world.outputs("to-decode-0", ended=LegEnd(name, 0, "the guide leaves no token"))
        with pytest.raises(GenerationError):
            await anext(serving)
    elif how == "is cancelled":
        task = asyncio.ensure_future(anext(serving))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await serving.aclose()
    finished = {"finished_length": 1, f"finished_{reason}": 1}
    assert world.counters() == {"prompt_tokens": len(PROMPT), "generation_tokens": 2, **finished}
    assert {num for num, _ in world.seen(*(name for name in BOUNDS if name != "first_token_s"))} == {0}
    world.assert_home()


@pytest.mark.parametrize("cause", ["death", "fault", "moved"])
async def test_replays_count_by_their_cause(cause: str) -> None:
    world = Counted()
    serving, first, name = await world.begin(Sampling(max_tokens=2))
    world.say(101.0, token(name, 0), conn="to-prefill-0")
    await first
    second = asyncio.ensure_future(anext(serving))
    await asyncio.sleep(0)
    if cause == "death":
        world.lose("decode-0")
    elif cause == "fault":
        world.outputs("to-decode-0", ended=LegEnd(name, 0, "no KV cache", is_fault=True))
    else:
        world.router.move_on(world.instances[2], "its drain is over")
    conn = (await world.until(wire.Submit, 3))[-1][0]
    world.say(102.0, token(name, 1, finish="length", attempt=1), conn=conn)
    await second
    await rest_of(serving)
    assert {n: c for n, c in world.counters().items() if n.startswith("replays")} == {f"replays_{cause}": 1}
    assert world.counters()["generation_tokens"] == 2
    assert world.counters()["prompt_tokens"] == len(PROMPT)


async def test_what_is_refused_counts_and_nothing_else_of_it() -> None:
    world = Counted(goals=Goals(ttft_s=0.001))
    for each in world.instances[:2]:
        each.outstanding_tokens = 10_000
    with pytest.raises(Overloaded):
        await anext(world.serve())
    assert world.counters() == {"refused_slo": 1}
    for each in world.instances:
        each.state = "unreachable"
        each.outstanding_tokens = 0
    with pytest.raises(Unavailable, match="no prefill and no decode instance is ready"):
        await anext(world.serve())
    assert world.counters() == {"refused_slo": 1, "refused_unavailable": 1}
    assert world.mailbox.sent == []
    world.assert_home()


# ---- workers' reports


def of_worker(conn: str, offset_s: float, *events: tuple[str, float, str]) -> list[tuple[WorkerClock, TraceEvent]]:
    clock = WorkerClock(conn, offset_s)
    return [(clock, TraceEvent(transfer_id, at_s, what)) for transfer_id, at_s, what in events]


def test_a_handover_takes_from_offer_to_confirmation_by_the_receivers_clock() -> None:
    timeline = Timeline(["r"], 3, 0.0, "p", "d", {"P": "p", "D": "d"})
    timeline.others += of_worker("P", 7.0, ("r-0", 1.0, "offered"), ("r-0", 9.0, "confirmed"))
    timeline.others += of_worker("D", 50.0, ("r-0", 2.0, "offered"), ("r-0", 2.25, "landing complete"))
    assert timeline.handovers_s() == []
    timeline.others += of_worker("D", 40.0, ("r-0", 2.5, "confirmed"), ("r-1", 3.0, "confirmed"))
    assert timeline.handovers_s() == [0.5]


def test_of_several_attempts_the_one_that_gave_the_first_token_was_admitted() -> None:
    timeline = Timeline(["r"], 3, 0.0, "p", "d", {"P": "p", "Q": "q"})
    assert timeline.admitted_s(5.0) is None
    timeline.others += of_worker("P", 7.0, ("r-0", 1.0, "admitted"))
    timeline.others += of_worker("Q", 1.0, ("r-1", 9.0, "admitted"), ("r-2", 19.0, "admitted"))
    # The last message was slow, so by this clock the request was not admitted before its first token.
    assert [timeline.admitted_s(before_s) for before_s in (8.5, 10.5, 30.0, 7.0)] == [8.0, 10.0, 20.0, 8.0]


def test_a_clock_that_is_late_makes_no_time_negative() -> None:
    stats = RequestStats()
    for admitted_s in (9.0, 10.5, 14.0):
        stats.ended(Outcome(["stop"], [1], 1, 1, 10.0, 11.0, 13.0, admitted_s))
    told = {name: each.total_e6 / 1e6 for name, each in stats.snapshot().histograms.items()}
    assert (told["queue_s"], told["prefill_s"], told["inference_s"]) == (0 + 0.5 + 1, 1 + 0.5 + 0, 3 + 2.5 + 2)


# ---- several processes


def some(rng: random.Random, stats: RequestStats) -> None:
    """Makes random changes to the counters."""
    for _ in range(rng.randrange(4)):
        stats.num_generation_tokens += 1
        stats.inter_token_s.observe(rng.random())
        stats.first_token(rng.randrange(9), rng.expovariate(1))
        stats.refused("slo")
        stats.ended(Outcome(["stop", "length"], [1, rng.randrange(99)], 5, 9, 0.0, rng.random(), 2.0))


def numbers(stats: Stats) -> dict[str, list[int]]:
    """Returns all counters; one that was never reported is 0."""
    empty = RequestStats().snapshot()
    found = {name: [stats.counters.get(name, 0)] for name in COUNTERS}
    for name in BOUNDS:
        buckets = stats.histograms.get(name, empty.histograms[name])
        found[f"{name} histogram"] = [*buckets.counts, buckets.total_e6]
    return found


def test_together_is_as_if_one_process_had_counted_it_all() -> None:
    rng = random.Random(3)
    parts = [RequestStats() for _ in range(4)]
    for _ in range(200):
        some(rng, rng.choice(parts))
    snapshots = [part.snapshot() for part in parts]
    each = [numbers(snapshot) for snapshot in snapshots]
    by_hand = {name: [sum(column) for column in zip(*(one[name] for one in each), strict=True)] for name in each[0]}
    assert numbers(added(snapshots)) == by_hand
    assert numbers(added([Stats(), *reversed(snapshots)])) == by_hand


class Hears:
    """Replaces the receiving end of a channel."""

    def __init__(self) -> None:
        self.totals: list[AllStats] = []

    def is_closing(self) -> bool:
        return False

    def write(self, line: bytes) -> None:
        news = msgspec.json.decode(line, type=ToApi)
        if isinstance(news, AllStats):
            self.totals.append(news)


def through_json(report: ApiReport) -> ApiReport:
    return msgspec.json.decode(msgspec.json.encode(report), type=ApiReport)


def three_processes() -> tuple[ApiProcesses, list[Hears]]:
    processes = ApiProcesses(cast(list[ApiProcessConfig], [None] * 3), cast(list[socket.socket], [None] * 3), [], 1.0)
    hearers = [Hears() for _ in range(3)]
    for api, hearer in zip(processes.apis, hearers, strict=True):
        api.writer = cast(asyncio.StreamWriter, hearer)
    return processes, hearers


@pytest.mark.parametrize("seed", range(5))
def test_totals_never_shrink_while_processes_die_and_begin_anew(seed: int) -> None:
    """All processes receive the same totals, which finally include every report of every process, dead ones too."""
    rng = random.Random(seed)
    processes, hearers = three_processes()
    lives, ended = [RequestStats() for _ in range(3)], []
    reported = [Stats() for _ in range(3)]
    for _ in range(150):
        at = rng.randrange(3)
        api = processes.apis[at]
        match rng.randrange(8):
            case 0:  # its unreported counts are lost
                processes.remove_work(api)
                ended.append(reported[at])
                lives[at], reported[at], api.sent_stats = RequestStats(), Stats(), None
            case 1 | 2:
                reported[at] = lives[at].snapshot()
                processes.add_report(api, through_json(ApiReport({}, stats=reported[at])))
            case 3:
                processes.add_report(api, through_json(ApiReport({})))
            case 4 | 5:
                processes.share_stats()
            case _:
                some(rng, lives[at])
    processes.share_stats()
    for hearer in hearers:
        told = [numbers(each.stats) for each in hearer.totals]
        for one, other in itertools.pairwise(told):
            assert all(a <= b for name in one for a, b in zip(one[name], other[name], strict=True))
        assert told[-1] == numbers(added([*ended, *reported]))
    assert ended


def test_of_what_they_do_now_each_is_told_the_others() -> None:
    processes, hearers = three_processes()
    for api, number in zip(processes.apis, (1, 10, 100), strict=True):
        processes.add_report(api, ApiReport({}, busy=Busy(number, 2 * number)))
    processes.share_stats()
    assert [hearer.totals[-1].others for hearer in hearers] == [Busy(110, 220), Busy(101, 202), Busy(11, 22)]
    processes.remove_work(processes.apis[2])
    for _ in range(2):
        processes.share_stats()
    assert [hearer.totals[-1].others for hearer in hearers] == [Busy(10, 20), Busy(1, 2), Busy(11, 22)]
    assert [len(hearer.totals) for hearer in hearers] == [2, 2, 1]  # only changes are sent


async def test_a_process_tells_what_it_has_counted_only_when_that_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "TICK_S", 0.0)
    monkeypatch.setattr(mirror_module, "SILENT_TICKS", 2)
    stats, told = RequestStats(), list[ApiReport]()

    def tell(report: ApiReport) -> None:
        told.append(report)
        if len(told) == 3:
            stats.refused("slo")

    mirror = MembershipMirror(cast(Any, None))
    running = asyncio.ensure_future(mirror.run(tell, lambda: ApiReport({}, stats=stats.snapshot())))
    while len(told) < 6:
        await asyncio.sleep(0)
    running.cancel()
    refused = [each.stats.counters["refused_slo"] if each.stats is not None else None for each in told]
    assert refused == [0, None, None, 1, None, None]


async def test_a_change_of_the_work_is_reported_before_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed work is reported at once, without the larger counts; it replaces the work in the last totals."""
    monkeypatch.setattr(mirror_module, "TICK_S", 3600.0)
    monkeypatch.setattr(mirror_module, "LOOK_S", 0.0)
    told, work = list[ApiReport](), [Busy(1, 1, 0)]
    mirror = MembershipMirror(cast(Any, None))
    running = asyncio.ensure_future(mirror.run(told.append, lambda: ApiReport({}), lambda: work[0]))
    await turns()
    assert len(told) == 1, "without a change nothing must be sent"
    work[0] = Busy(3, 2, 1)
    while len(told) < 2:
        await asyncio.sleep(0)
    running.cancel()
    mirror.apply(AllStats(Stats(), Busy(), 2))
    mirror.apply(OthersBusy(Busy(5, 4, 3)))
    assert mirror.totals == AllStats(Stats(), Busy(5, 4, 3), 2)
    assert [(each.busy, each.stats) for each in told] == [(Busy(1, 1, 0), None), (Busy(3, 2, 1), None)]
