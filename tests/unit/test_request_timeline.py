"""Timelines of the latest requests on one clock: mapping, bounds, foreign events, order, and admin routes."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

from pd_cluster.api.admin.admin_app import admin_app
from pd_cluster.api.admin.timeline_routes import LocalTimelines
from pd_cluster.api.middleware.admin_access import AdminAccess
from pd_cluster.cluster.records import request_timeline
from pd_cluster.cluster.records.request_timeline import RequestNames, Timeline, Timelines
from pd_cluster.wire import TraceEvent
from tests.support.elastic_world import ElasticWorld

P, D = ("to-p", "prefill-0"), ("to-d", "decode-0")


class World:
    """Timelines, and a clock that the test sets."""

    def __init__(self, **bounds: int) -> None:
        self.now_s = 100.0
        self.timelines = Timelines(lambda: self.now_s, **bounds)

    def route(self, name: str, client_id: str = "", received_s: float | None = None) -> None:
        self.timelines.routed(RequestNames(name, f"{name}-0", client_id), received_s, 7, P, D)

    def tell(self, conn: str, *events: TraceEvent, now_s: float) -> None:
        self.timelines.heard(conn, now_s)
        self.timelines.add(conn, list(events))

    def find(self, name: str) -> Timeline:
        found = self.timelines.find(name)
        assert found is not None
        return found

    def events(self, name: str) -> list[tuple[float, str, str]]:
        return [(e["at_ms"], e["who"], e["what"]) for e in self.find(name).events()]

    def last(self, most: int = 99) -> list[str]:
        return [entry["request_id"] for entry in self.timelines.last(most)]


def event(name: str, at_s: float, what: str = "chunk", **numbers: int) -> TraceEvent:
    return TraceEvent(f"{name}-0", at_s, what, numbers)


@pytest.fixture
def world() -> World:
    return World()


def test_a_whole_life(world: World) -> None:
    world.route("r", "cmpl-1", received_s=99.5)
    assert world.find("r").status == "running"
    world.now_s = 101.0
    world.tell("to-p", event("r", 10.0, "submitted"), now_s=10.75)  # the worker's clock is 90.25 s behind
    world.timelines.first_token("r", heard_s=100.75)
    world.now_s = 102.0
    world.timelines.ended("r")
    assert world.find("cmpl-1") is world.find("r") is world.find("r-0")
    assert world.find("r").summary(102.0)["added_ttft_ms"] == 750.0  # before it was routed, and after the token arrived
    found = world.find("r").to_json()
    assert [(each["at_ms"], each["who"], each["what"], each["numbers"]) for each in found.pop("events")] == [
        (0.0, "scheduler", "received", {}),
        (500.0, "scheduler", "routed", {}),
        (750.0, "prefill-0", "submitted", {}),
        (1500.0, "scheduler", "first token", {}),
        (2500.0, "scheduler", "finished", {}),
    ]
    assert found == {
        "request_id": "cmpl-1",
        "ids": ["cmpl-1", "r", "r-0"],
        "prefill": "prefill-0",
        "decode": "decode-0",
        "num_prompt_tokens": 7,
        "status": "finished",
        "error": None,
        "num_dropped_events": 0,
    }


def test_an_error_is_told_and_replays_are_counted(world: World) -> None:
    world.route("r")
    world.route("other")
    for attempt in (1, 2):
        world.timelines.replayed("r", f"r-{attempt}", "to-d2", "decode-1")
    world.tell("to-d2", TraceEvent("r-2", 1.0, "submitted"), now_s=1.0)
    assert [entry["num_replays"] for entry in world.timelines.last(9)] == [0, 2]
    assert ("decode-1", "submitted") in [(who, what) for _, who, what in world.events("r")]
    world.timelines.ended("r", "decode-0 was lost")
    assert (world.find("r").status, world.find("r").error) == ("failed", "decode-0 was lost")
    assert (0.0, "scheduler", "failed") in world.events("r")


# ---- clocks


@pytest.mark.parametrize("seed", range(8))
def test_the_fastest_message_tells_the_clock(seed: int) -> None:
    """Mapped times are late by the smallest delay of any message so far, in any order, and never early."""
    rng = random.Random(seed)
    world = World()
    world.route("r")
    offsets = {"to-p": rng.uniform(-1e6, 1e6), "to-d": rng.uniform(-1e6, 1e6)}
    delays: dict[str, list[float]] = {"to-p": [], "to-d": []}
    happened: list[tuple[float, str]] = []
    for _ in range(rng.randrange(2, 20)):
        conn, at_s = rng.choice(list(offsets)), world.now_s
        happened.append((at_s, conn))
        delays[conn].append(rng.uniform(0.0001, 0.5))
        world.now_s += delays[conn][-1]
        world.tell(conn, event("r", at_s - offsets[conn]), now_s=at_s - offsets[conn])
    wanted = sorted((at_s + min(delays[conn]), dict([P, D])[conn]) for at_s, conn in happened)
    found = {at_ms: who for at_ms, who, what in world.events("r") if what == "chunk"}
    assert list(found.values()) == [who for _, who in wanted]
    assert list(found) == pytest.approx([(at_s - 100.0) * 1e3 for at_s, _ in wanted], abs=0.01)


def test_a_new_connection_has_a_clock_of_its_own(world: World) -> None:
    """After a worker's restart, its predecessor's events keep their times, and simultaneous events their order."""
    names = ["submitted", "admitted", "offered"]
    for name, at_s in (("a", 1.0), ("b", 5000.0)):
        world.route(name)
        world.tell("to-p", *(event(name, at_s, what) for what in names), now_s=at_s)
        world.timelines.gone("to-p")
        world.now_s += 10.0
    for name in "ab":
        assert world.events(name)[2:] == [(0.0, "prefill-0", what) for what in names]


# ---- foreign events


def test_events_of_strangers_are_dropped(world: World) -> None:
    """Events of unknown transfers, and of instances that do not serve the request, are dropped."""
    world.route("r")
    world.timelines.add("to-p", [event("r", 1.0)])  # never heard from
    world.tell("to-p", event("nobody", 1.0), now_s=1.0)
    world.tell("to-other", event("r", 1.0), now_s=1.0)
    assert [what for *_, what in world.events("r")] == ["received", "routed"]
    world.timelines.first_token("stranger", 1.0)
    for tell in (world.timelines.ended, world.timelines.gone):
        tell("nobody")


# ---- bounds


def test_the_oldest_request_makes_room() -> None:
    world = World(max_requests=3)
    for at in range(5):
        world.route(f"r{at}", f"cmpl-{at}")
    assert len(world.timelines) == 3
    assert world.last() == ["cmpl-4", "cmpl-3", "cmpl-2"]
    assert world.last(1) == ["cmpl-4"]
    assert all(world.timelines.find(each) is None for each in ("r1", "cmpl-1", "r1-0"))
    world.tell("to-p", event("r1", 1.0), now_s=1.0)
    world.timelines.ended("r1")


def test_a_request_with_many_events_keeps_its_end(world: World) -> None:
    world.route("r")
    world.tell("to-p", *(event("r", at, start=at) for at in range(3000)), now_s=3000.0)
    world.tell("to-d", event("r", 3000.0, "finished"), now_s=3000.0)
    kept = world.find("r").to_json()
    num_repeated = request_timeline.MAX_EVENTS - request_timeline.NUM_SPARED
    assert kept["num_dropped_events"] == 3000 - num_repeated
    assert [e["what"] for e in kept["events"]].count("chunk") == num_repeated
    assert kept["events"][-1]["what"] == "finished"
    world.tell("to-d", *(event("r", 1.0, "confirmed") for _ in range(3000)), now_s=3000.0)
    assert len(world.find("r").others) == request_timeline.MAX_EVENTS


def test_all_events_together_are_bounded() -> None:
    world = World(max_all_events=100)
    for at in range(10):
        world.route(f"r{at}")
        world.tell("to-p", *(event(f"r{at}", 1.0) for _ in range(30)), now_s=1.0)
    assert world.last() == ["r9", "r8", "r7"]
    world.tell("to-p", *(event("r9", 1.0) for _ in range(200)), now_s=1.0)
    assert world.last() == ["r9"]


# ---- the admin port


async def get(world: World, path: str) -> tuple[int, Any]:
    app = admin_app(ElasticWorld().elastic, LocalTimelines(world.timelines), AdminAccess("t" * 16, True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.get(path)
    return answer.status_code, answer.json()


async def test_the_routes(world: World) -> None:
    for at in range(25):
        world.route(f"r{at}", f"cmpl-{at}")
    world.now_s = 100.5
    world.timelines.ended("r24")
    status, body = await get(world, "/requests")
    assert (status, len(body["requests"]), body["num_kept"], body["max_kept"]) == (200, 20, 25, 1000)
    assert body["requests"][0] == {
        "request_id": "cmpl-24",
        "status": "finished",
        "age_s": 0.5,
        "prefill": "prefill-0",
        "decode": "decode-0",
        "num_prompt_tokens": 7,
        "num_replays": 0,
        "duration_ms": 500.0,
        "added_ttft_ms": 0.0,
    }
    assert (body["requests"][1]["status"], body["requests"][1]["duration_ms"]) == ("running", None)
    assert len((await get(world, "/requests?limit=25"))[1]["requests"]) == 25
    assert await get(world, "/requests/cmpl-3/timeline") == (200, world.find("r3").to_json())
    status, body = await get(world, "/requests/cmpl-99/timeline")
    assert (status, body["error"]["param"], body["error"]["code"]) == (404, "id", "request_not_found")
    assert "'cmpl-99'" in body["error"]["message"]
    assert "only the last 25 (at most 1000)" in body["error"]["message"]


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "", "1.5", "9" * 5000])
async def test_a_limit_that_makes_no_sense(limit: str) -> None:
    status, body = await get(World(), f"/requests?limit={limit}")
    assert (status, body["error"]["param"]) == (400, "limit")
    assert body["error"]["message"].endswith("give a number from 1 to 1000")
