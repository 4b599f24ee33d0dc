"""Several schedulers over the same workers: full instances, each other's work, and features of a single scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_cluster import wire
from pd_cluster.cluster.placement.routing_policy import RoutingRequest
from pd_cluster.cluster.placement.routing_rules import ReplayLimits
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import Cluster, plan_cluster
from pd_cluster.commands.cli import app
from pd_cluster.commands.serve_scheduler import check_alone, check_shared
from pd_cluster.commands.serve_start import Start
from pd_cluster.errors import ConfigError, GenerationError, Overloaded
from pd_cluster.service.schema.error_bodies import status_of
from pd_cluster.settings.process_settings import JoinSettings
from pd_cluster.settings.routing_settings import MAX_SCHEDULERS, AdminSettings, AdmissionSettings
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import LegEnd, TokenOutput
from tests.support.elastic_world import ElasticWorld
from tests.support.router_world import World, token


async def test_other_work_at_an_instance_is_what_it_reports(tmp_path: Path) -> None:
    """The work of other schedulers is what the instance reports, at once if others must see it."""
    world = ElasticWorld()
    world.membership.own_key = "scheduler-0@1"
    load = wire.Load(outstanding={"scheduler-0@1": 100, "scheduler-1@2": 30, "scheduler-2@3": 12})
    world.membership.on_heartbeat("to-decode-0", load)
    assert world["decode-0"].others_tokens == 42
    assert wire.Load(outstanding={"a@1": 1}).shown_now != wire.Load(outstanding={"a@1": 0}).shown_now


async def test_a_full_instance_is_no_fault_and_no_attempt() -> None:
    world = World(replay=ReplayLimits(max_attempts=0))
    serving, first, rid = await world.begin()
    world.outputs("to-prefill-0", ended=LegEnd(rid, 0, "full", True, is_full=True))
    await asyncio.sleep(0)
    assert len(world.mailbox.of(wire.Submit)) == 2, "it must wait for reports of the instances"
    while len(submits := world.mailbox.of(wire.Submit)) < 4:
        world.membership.changed.set()
        await asyncio.sleep(0)
    assert [body.attempt for _, body in submits] == [0, 0, 1, 1]
    world.outputs(submits[2][0], token(rid, 0, attempt=1))
    assert (await first).position == 0
    await world.leave(serving)


class Bounced:
    """A request at a router whose instances are full; `pauses`: the requested waits."""

    def __init__(self, wait_s: float = 30.0) -> None:
        self.world = World(replay=ReplayLimits(wait_s=wait_s))
        self.pauses: list[float] = []
        self.goes_on = asyncio.Event()
        self.world.router.retry.pause = self._pause

    async def _pause(self, time_s: float) -> None:
        self.pauses.append(time_s)
        await self.goes_on.wait()

    @property
    def num_submits(self) -> int:
        return len(self.world.mailbox.of(wire.Submit))

    def bounce(self, rid: str, attempt: int = 0) -> None:
        conn = self.world.mailbox.of(wire.Submit)[-2][0]
        self.world.outputs(conn, ended=LegEnd(rid, attempt, "full", True, is_full=True))

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Delivers reports until the condition holds."""
        while not is_so():
            self.world.membership.changed.set()
            await asyncio.sleep(0)

    async def until_submits(self, num: int, ended: asyncio.Future[TokenOutput] | None = None) -> None:
        await self.until(lambda: self.num_submits >= num or (ended is not None and ended.done()))


async def test_a_full_instance_is_left_alone_for_longer_each_time() -> None:
    bounced = Bounced()
    bounced.goes_on.set()
    serving, first, rid = await bounced.world.begin()
    for attempt in range(8):
        bounced.bounce(rid, attempt)
        await bounced.until_submits(2 * attempt + 4)
    assert bounced.pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]
    await bounced.world.leave(serving, first)


async def test_instances_that_stay_full_are_no_internal_error() -> None:
    """The wait is counted from the first attempt, however many follow, and ends in a proper error."""
    bounced = Bounced(wait_s=0.1)
    bounced.goes_on.set()
    _, first, rid = await bounced.world.begin()
    attempt = 0
    while not first.done():
        bounced.bounce(rid, attempt)
        attempt += 1
        await bounced.until_submits(2 * attempt + 2, first)
    with pytest.raises(Overloaded, match="full") as caught:
        await first
    assert caught.value.retry_after_s == 1
    assert status_of(caught.value) == 429
    bounced.world.assert_home()


async def test_a_request_that_waits_for_room_ends_with_the_process() -> None:
    bounced = Bounced()
    bounced.goes_on.set()
    _, first, rid = await bounced.world.begin()
    for each in bounced.world.instances:
        each.load, each.num_outstanding = wire.Load(num_waiting=99).at_rates(prefill_tokens_per_s=1.0), 99
    bounced.bounce(rid)
    await bounced.until(lambda: bool(bounced.pauses))
    bounced.world.router.end_all()
    with pytest.raises(GenerationError, match="shut"):
        await first


async def test_a_pause_while_a_request_waits_for_room_keeps_it() -> None:
    bounced = Bounced()
    serving, first, rid = await bounced.world.begin()
    bounced.bounce(rid)
    await bounced.until(lambda: bool(bounced.pauses))
    await bounced.world.router.control_requests("paused", keeps=True)
    bounced.goes_on.set()
    for _ in range(20):
        bounced.world.membership.changed.set()
        await asyncio.sleep(0)
    assert bounced.num_submits == 2, "it must not continue while the cluster is paused"
    await bounced.world.router.control_requests("open")
    await bounced.until(lambda: bounced.num_submits == 4)
    assert sum(each.num_outstanding for each in bounced.world.instances) == 2
    await bounced.world.leave(serving, first)


async def test_others_see_each_leg_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoutingRequest, "weight", lambda self, instance, leg: 0)
    world = World()
    serving, first, _ = await world.begin()
    assert [body.weight for _, body in world.mailbox.of(wire.Submit)] == [1, 1]
    await world.leave(serving, first)


def test_what_one_scheduler_alone_can_do_is_refused_by_name() -> None:
    """A feature of one scheduler is refused with several, and the other way round, by name."""
    start = Start.__new__(Start)
    object.__setattr__(start, "join", JoinSettings())
    several, runtime = AdmissionSettings(scheduler_lease="f"), AdminSettings(allow_runtime_lora=True, lora_root="/")
    longer = Timeouts(lease_duration_s=3.0)
    two = AdmissionSettings(scheduler_lease="f", api_workers=2)
    check_alone(AdmissionSettings(), Timeouts())
    for check, names in (
        (partial(check_shared, start, two, AdminSettings()), ["api-workers 2"]),
        (partial(check_shared, start, several, runtime), ["allow-runtime-lora"]),
        (
            partial(check_alone, AdmissionSettings(scheduler_index=2), Timeouts()),
            ["scheduler-index", "scheduler-lease"],
        ),
        (partial(check_alone, AdmissionSettings(), longer), ["lease-duration", "scheduler-lease"]),
    ):
        with pytest.raises(ConfigError) as caught:
            check()
        assert all(name in str(caught.value).replace("_", "-") for name in names)


def test_up_plans_each_scheduler_with_ports_of_its_own(tmp_path: Path) -> None:
    launch = Launch(model="m", num_schedulers=3, port=9000)
    schedulers = [member for member in plan_cluster(launch, tmp_path) if member.is_scheduler]
    assert [member.name for member in schedulers] == ["scheduler-0", "scheduler-1", "scheduler-2"]
    assert [member.port for member in schedulers] == [9000, 9002, 9004]
    assert launch.urls == [f"http://127.0.0.1:{port}" for port in (9000, 9002, 9004)]
    for index, member in enumerate(schedulers):
        assert f"--scheduler-index={index}" in member.command
        assert f"--scheduler-lease={tmp_path / 'scheduler.lease'}" in member.command
    (alone,) = [member for member in plan_cluster(Launch(model="m"), tmp_path) if member.is_scheduler]
    assert alone.name == "scheduler"
    assert not [flag for flag in alone.command if "--scheduler-lease" in flag]
    refused = CliRunner().invoke(app, ["up", "--schedulers", str(MAX_SCHEDULERS + 1)])
    assert (refused.exit_code, str(MAX_SCHEDULERS) in refused.output) == (2, True)


@pytest.mark.parametrize(
    ("given", "num_encode"),
    [
        (["--scheduler-index=0"], 0),
        (["--scheduler-lease", "f"], 0),
        (["--admin-port=9001"], 0),
        ([], 1),
    ],
)
def test_up_gives_several_schedulers_what_is_theirs_itself(given: list[str], num_encode: int) -> None:
    with pytest.raises(
        ConfigError, match=given[0].partition("=")[0] if given else "--encode: cannot be combined with --schedulers"
    ):
        Cluster(Launch(model="m", num_schedulers=2, arguments=given, num_encode=num_encode), print)
