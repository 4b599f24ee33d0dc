"""The overview: figures of the last minutes, events, and problems. Pure, with an injected clock."""

from __future__ import annotations

import asyncio
import bisect
import random
from typing import Any

import msgspec

from pd_cluster.cluster.overview.cluster_event_log import ClusterEventLog
from pd_cluster.cluster.overview.cluster_overview import Overview
from pd_cluster.cluster.overview.cluster_problems import problems_of
from pd_cluster.cluster.overview.kv_tier_use import tiers_of
from pd_cluster.cluster.overview.request_history import RATES, WINDOW_S, RequestHistory, quantile
from pd_cluster.cluster.records.request_stats import BOUNDS, COUNTERS, Histogram, Outcome, RequestStats
from pd_cluster.process_messages import Busy
from pd_cluster.settings.routing_settings import RoutingConfig
from pd_cluster.wire import GroupLoad, Load
from tests.support.elastic_world import ElasticWorld
from tests.support.router_world import info_of


def test_every_count_that_matters_has_a_rate() -> None:
    shown = {name for names in RATES.values() for name in names} | {"prompt_tokens_computed"}
    others = {name for name in COUNTERS if name.endswith(("_read", "_refused", "_hits", "_queries"))}
    others |= {name for name in COUNTERS if name.startswith(("arrived_", "role_changes_", "roles_kept_"))}
    assert not {*COUNTERS} - shown - others


def test_quantiles_lie_in_the_bucket_of_the_true_one() -> None:
    bounds, random_ = BOUNDS["first_token_s"], random.Random(5)
    for _ in range(50):
        values = sorted(random_.lognormvariate(-2, 1.5) for _ in range(random_.randint(1, 400)))
        histogram = Histogram(bounds)
        for value in values:
            histogram.observe(value)
        for share in (0.5, 0.9, 0.99):
            found = quantile(bounds, histogram.counts, share)
            true = values[max(0, -(-int(share * len(values) * 1000) // 1000) - 1)]
            assert found is not None
            assert abs(bisect.bisect_left(bounds, found) - bisect.bisect_left(bounds, true)) <= 1
    assert quantile(bounds, [0] * (len(bounds) + 1), 0.5) is None
    assert quantile(bounds, [0] * len(bounds) + [3], 0.5) == bounds[-1]


def test_rates_are_of_one_second_and_percentiles_of_a_window() -> None:
    stats, history = RequestStats(lambda: 0.0), RequestHistory()
    history.note(1000.0, 0.0, stats.snapshot(), 0, 0)
    stats.first_token(7, 0.05)
    stats.num_generation_tokens += 30
    history.note(1002.0, 2.0, stats.snapshot(), 3, 1)
    history.note(1003.0, 3.0, stats.snapshot(), 2, 0)
    first, second = history.samples()
    assert (first["tokens_per_s"], first["prompt_tokens_per_s"]) == (15.0, 3.5)
    assert (first["num_running"], first["num_queued"]) == (3, 1)
    assert second["tokens_per_s"] == 0
    assert 0.04 < first["ttft_p50_s"] == second["ttft_p50_s"] <= 0.06
    assert first["tpot_p50_s"] is None
    history.note(1003.0 + 2 * WINDOW_S, 3.0 + 2 * WINDOW_S, stats.snapshot(), 0, 0)
    assert history.samples()[-1]["ttft_p50_s"] is None
    assert history.samples(since_s=1003.0)[0]["at_s"] == 1003.0 + 2 * WINDOW_S
    assert history.total("tokens_per_s", 60) == 30
    assert history.total("tokens_per_s", 5) == 0


def test_the_history_and_marks_are_bounded() -> None:
    stats, history = RequestStats(lambda: 0.0), RequestHistory(num_samples=5)
    instances, marks = ElasticWorld().membership.instances, ClusterEventLog(max_marks=4)
    for at in range(20):
        history.note(float(at), float(at), stats.snapshot(), 0, 0)
        for each in instances:
            each.state = "ready" if at % 2 else "unreachable"
        marks.look(float(at), instances)
    assert [sample["at_s"] for sample in history.samples()] == [15, 16, 17, 18, 19]
    kept = marks.since()
    assert len(kept) == 4
    assert kept[-1].number - kept[0].number == 3


def _texts(marks: ClusterEventLog, since: int = 0) -> list[tuple[str, str, str]]:
    found = [mark.to_json() for mark in marks.since(since)]
    return [(mark["kind"], mark["instance_id"], mark["text"]) for mark in found]


def test_deaths_returns_roles_and_leaving_are_marks() -> None:
    instances, marks = ElasticWorld().membership.instances, ClusterEventLog()
    for each in instances:
        each.state = "ready"
    marks.look(0.0, instances)
    assert {kind for kind, _, _ in _texts(marks)} == {"up"}
    number = len(instances)
    marks.look(1.0, instances)
    assert not marks.since(number), "without a change there must be no event"
    lost = instances[0]
    lost.state, lost.reason = "unreachable", "its connection was closed"
    marks.look(2.0, instances)
    assert _texts(marks, number) == [("down", lost.name, "is unreachable: its connection was closed")]
    lost.reason = "refused the connection"
    marks.look(2.1, instances)
    lost.state = "connecting"
    marks.look(2.2, instances)
    assert len(marks.since(number)) == 1, "one death must be one event"
    lost.state, lost.reason = "ready", ""
    marks.look(3.0, instances)
    assert _texts(marks, number + 1) == [("up", lost.name, "is ready")]
    for epoch in (1, 2):
        lost.info = info_of(lost.name, lost.role, epoch=epoch)
        marks.look(4.0, instances)
    assert _texts(marks, number + 2) == [("up", lost.name, "is ready again, in another process")]
    lost.role = "decode" if lost.role == "prefill" else "prefill"
    marks.look(5.0, instances)
    lost.service = "out"
    marks.look(6.0, instances)
    marks.look(7.0, [each for each in instances if each is not lost])
    kinds = [(kind, text.split()[0:2]) for kind, _, text in _texts(marks, number + 3)]
    assert kinds == [("change", ["is", "now"]), ("change", ["is", "drained"]), ("change", ["has", "left"])]


def _problems(world: ElasticWorld, history: RequestHistory | None = None, **routing: Any) -> list[tuple[str, str]]:
    found = problems_of(world.membership.instances, history or RequestHistory(), RoutingConfig(**routing))
    assert all(each.way_out for each in found)
    return [(each.severity, each.text) for each in found]


def test_what_is_wrong_comes_worst_first() -> None:
    world = ElasticWorld()
    instances = world.membership.instances
    for each in instances:
        each.state = "unreachable"
    found = _problems(world)
    assert found[0] == ("critical", "no instance takes requests: requests wait, or get a 503")
    assert {text.split()[0] for severity, text in found[1:] if severity == "warning"} == {i.name for i in instances}
    for each in instances:
        each.state = "ready"
    prefill = next(each for each in instances if each.role == "prefill")
    prefill.load = Load(num_blocks=100, num_held_blocks=97, num_waiting=3)
    assert any("wait for KV blocks" in text for _, text in _problems(world))
    states = GroupLoad("state", num_free=1, num_cached=2, num_held=97)
    prefill.load = Load(num_blocks=100, num_held_blocks=50, groups=(states,), num_waiting=3)
    assert [text for _, text in _problems(world) if "wait for" in text] == [
        f"{prefill.name}: 3 requests wait for states (--max-num-seqs, --state-cache); 97 of 100 are held"
    ]
    assert any(text.startswith("no KV cache can be sent from") for _, text in _problems(world)), (
        "links must have been reported first"
    )


def test_a_cluster_that_was_put_to_sleep_is_no_alarm() -> None:
    world = ElasticWorld()
    for each in world.membership.instances:
        each.state, each.load = "ready", Load(sleep_level=1)
    assert [text for severity, text in _problems(world) if severity != "notice" and "takes requests" in text] == []
    assert ("notice", "the cluster is asleep, and serves no requests") in _problems(world)
    for role in ("prefill", "decode"):
        for each in world.membership.instances:
            each.state, each.load = "unreachable" if each.role == role else "ready", Load()
        assert any(text.startswith(f"no {role} instance takes requests") for _, text in _problems(world))


def test_failed_requests_are_critical_for_a_minute_and_promises_are_held() -> None:
    world, stats, history = ElasticWorld(), RequestStats(lambda: 0.0), RequestHistory()
    history.note(0.0, 0.0, stats.snapshot(), 0, 0)
    stats.replayed("death")
    for _ in range(2):
        stats.ended(Outcome(["error"], [1], 1, 1, 0.0, 0.0, 0.0))
    stats.first_token(1, 3.0)
    history.note(1.0, 1.0, stats.snapshot(), 0, 0)
    texts = {text: severity for severity, text in _problems(world, history, slo_ttft_s=1.0)}
    assert texts["2 requests failed in the last minute"] == "critical"
    assert texts["1 request continued on another instance in the last minute"] == "notice"
    assert any(text.startswith("TTFT p99 is") and "the objective of --slo-ttft is 1 s" in text for text in texts)
    assert not any("TTFT" in text for _, text in _problems(world, history))
    history.note(62.0, 62.0, stats.snapshot(), 0, 0)
    assert not any("last minute" in text for _, text in _problems(world, history, slo_ttft_s=1.0))


async def test_an_overview_looks_at_each_change_and_notes_once_a_second() -> None:
    world, stats, now = ElasticWorld(), RequestStats(lambda: 0.0), [100.0]
    roster = world.membership
    figures = lambda: (stats.snapshot(), Busy(0, 2, 1))  # noqa: E731
    overview = Overview(roster, figures, RoutingConfig(), wall=lambda: now[0], clock=lambda: now[0])
    running = asyncio.ensure_future(overview.run())
    try:
        async with asyncio.timeout(20):
            roster.set_state(roster.instances[0], "ready", "")
            while not any(mark["kind"] == "up" for mark in overview.to_json(0, 0)["marks"]):
                await asyncio.sleep(0)
            roster.set_state(roster.instances[0], "unreachable", "gone")
            while not any(mark["kind"] == "down" for mark in overview.to_json(0, 0)["marks"]):
                await asyncio.sleep(0)
            assert overview.to_json(0, 0)["samples"] == [], "less than a second must give no rate"
            now[0] += 1.5
            roster.wake()
            while not overview.to_json(0, 0)["samples"]:
                await asyncio.sleep(0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    body = overview.to_json(0, 0)
    assert (body["num_running"], body["num_queued"], body["started_s"]) == (2, 1, 100.0)


def test_tiers_are_listed_as_far_as_there_are_any() -> None:
    pool = Load(num_blocks=10, num_held_blocks=3, num_cached_blocks=2, num_prefix_hit_tokens=40)
    assert [tier["name"] for tier in tiers_of(pool)] == ["pool"]
    host = {"num_host_cache_blocks": 7, "num_host_hit_tokens": 32, "tier_token_s": {"host": 1e-5}}
    whole = msgspec.structs.replace(pool, **host, num_swap_blocks=8, num_free_swap_blocks=6)
    found = [tuple(tier.values()) for tier in tiers_of(whole)]
    assert found == [("pool", 10, 5, 40, None), ("host cache", None, 7, 32, 1e-5), ("swap", 8, 2, None, None)]
