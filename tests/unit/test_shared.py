"""Several schedulers: followers take over the owner's list, and only the owner gives orders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_cluster import wire
from pd_cluster.cluster.members.lease import LeaseRecord
from pd_cluster.cluster.members.lease_folder import LeaseFolder
from pd_cluster.cluster.members.shared import SharedMembership
from pd_cluster.cluster.processes.launch import Launch
from pd_cluster.cluster.processes.launcher import Cluster, plan_cluster
from pd_cluster.cluster.routing.policy import RoutingRequest
from pd_cluster.cluster.routing.replays import ReplayLimits
from pd_cluster.commands.cli import app
from pd_cluster.commands.serve_scheduler import check_alone, check_shared
from pd_cluster.commands.serve_start import Start
from pd_cluster.errors import ConfigError, GenerationError, Overloaded, Refused, Unavailable
from pd_cluster.net.admission import Fence
from pd_cluster.service.status import status_of
from pd_cluster.settings.processes import JoinSettings
from pd_cluster.settings.routing import MAX_SCHEDULERS, AdminSettings, EntranceSettings
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import LegEnd, TokenOutput
from tests.support.elastic_world import ElasticWorld
from tests.support.router_world import World, run, token

LEASE_S = 1.5


class Scheduler:
    """One of several, with a membership of its own over instances that are ready."""

    def __init__(self, folder: Path, index: int, clock: Callable[[], float]) -> None:
        self.world = ElasticWorld()
        self.fence = Fence()
        self.wall_s = 0.0
        self.shared = SharedMembership(
            f"scheduler-{index}@{index + 1}",
            LeaseFolder(folder / "lease"),
            self.world.membership,
            self.world.elastic,
            self,
            LEASE_S,
            5.0,
            f"http://127.0.0.1:{9001 + 2 * index}",
            clock,
            lambda: self.wall_s,
        )

    def heard_of_term(self, term: int) -> None:
        self.fence.heard(term)

    async def look(self) -> None:
        await self.shared._look()

    @property
    def orders(self) -> list[wire.Peers]:
        return [body for _, body in self.world.mailbox.of(wire.Peers)]


class Two:
    def __init__(self, folder: Path) -> None:
        self.now_s = 10.0
        self.one, self.other = (Scheduler(folder, index, lambda: self.now_s) for index in range(2))

    async def begin(self) -> None:
        await self.one.look()
        self.now_s += LEASE_S  # one that knows of a list would have written it by now
        await self.one.look()
        await self.other.look()
        assert (self.one.shared.is_owner, self.other.shared.is_owner) == (True, False)

    async def fail_over(self) -> None:
        self.now_s += LEASE_S
        await self.other.look()
        assert (self.one.shared.is_owner, self.other.shared.is_owner) == (False, True)


def test_only_the_owner_gives_orders_and_commands_at_another_name_it(tmp_path: Path) -> None:
    async def go() -> None:
        two = Two(tmp_path)
        await two.begin()
        assert {peers.term for peers in two.one.orders} == {1}
        assert not two.other.orders
        two.other.world.membership.tell_peers()
        assert not two.other.orders
        with pytest.raises(Refused, match=r"scheduler-1 does not own membership: scheduler-0 does, at http://.*:9001"):
            two.other.world.elastic.drain("decode-1")
        assert two.other.fence.term == 1, "it greets workers with the owner's term"

    asyncio.run(go())


def test_an_owner_that_does_not_reach_the_record_any_more_names_nobody(tmp_path: Path) -> None:
    async def go() -> None:
        two = Two(tmp_path)
        await two.begin()
        assert two.one.shared.owner == "scheduler-0"
        two.now_s += LEASE_S
        assert two.one.shared.owner == ""
        with pytest.raises(Refused, match="scheduler-0 does not own membership: none does now; try again"):
            two.one.world.elastic.drain("decode-1")

    asyncio.run(go())


def test_a_command_is_recorded_and_outlives_the_owner(tmp_path: Path) -> None:
    async def go() -> None:
        two = Two(tmp_path)
        await two.begin()
        elastic = two.one.world.elastic
        done = asyncio.ensure_future(elastic.done(elastic.drain("decode-1", timeout_s=7.0)))
        await asyncio.sleep(0)
        assert not done.done(), "it is not in the record yet"
        await two.one.look()
        assert (await done).service == "out"
        await two.other.look()
        followed = two.other.world["decode-1"]
        assert (followed.service, followed.drain_timeout_s, followed.takes_requests) == ("out", 7.0, False)
        await two.fail_over()
        assert two.other.world["decode-1"].service == "out"
        assert two.other.orders[-1].term == 2
        await two.one.look()  # it had stood still
        assert two.one.world["decode-1"].service == "out"
        assert not two.one.shared.is_owner

    asyncio.run(go())


def test_a_command_at_an_owner_that_is_none_any_more_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.cluster.members.shared.RECORD_TIMEOUT_S", 0.05)

    async def go() -> None:
        two = Two(tmp_path)
        await two.begin()
        elastic = two.one.world.elastic
        drained = elastic.drain("decode-1")
        await two.fail_over()
        with pytest.raises(Unavailable, match="may not outlive"):
            await elastic.done(drained)
        await two.one.look()
        assert two.one.world["decode-1"].service == "in", "it follows the list of the owner"

    asyncio.run(go())


def test_roles_and_members_follow_once_all_had_time_to_hear(tmp_path: Path) -> None:
    async def go() -> None:
        two = Two(tmp_path)
        await two.begin()
        world = two.one.world
        world.elastic.change_role("decode-1", "prefill")
        world.elastic.remove("prefill-1")
        world.elastic.tick()
        assert world["decode-1"].role == "decode", "others may still send requests there"
        world.now_s += 0.5
        world["decode-1"].others_tokens = 5
        world.elastic.tick()
        assert world["decode-1"].role == "decode", "another scheduler has a request there"
        world["decode-1"].others_tokens = 0
        world.elastic.tick()
        assert world["decode-1"].role == "prefill"
        assert "prefill-1" not in world.names
        await two.one.look()
        await two.other.look()
        assert two.other.world["decode-1"].role == "prefill"
        assert "prefill-1" not in two.other.world.names
        assert not two.other.orders

    asyncio.run(go())


def test_a_refused_order_makes_the_owner_look_and_ends_nothing_by_itself(tmp_path: Path) -> None:
    """The record alone says who owns membership: a worker that lies could end it otherwise."""

    async def go() -> None:
        two = Two(tmp_path)
        await two.begin()
        two.one.world.membership.on_stale_order("to-decode-0", 2**62)
        assert two.one.shared._asked.is_set()
        await two.one.look()
        assert two.one.shared.is_owner
        assert two.one.fence.term == 1, "others are greeted with the record's term"
        await two.fail_over()
        assert not two.one.shared.is_owner

    asyncio.run(go())


def test_a_record_that_was_removed_is_its_owner_s_to_write_again(tmp_path: Path) -> None:
    """A scheduler that has just started knows none of the workers that have joined."""

    async def go() -> None:
        two = Two(tmp_path)
        await two.begin()
        two.one.world.elastic.drain("decode-1", timeout_s=7.0)
        await two.one.look()
        for file in (tmp_path / "lease").glob("0*"):
            file.unlink()
        new = Scheduler(tmp_path, 2, lambda: two.now_s)
        for each in (new, two.other):
            await each.look()
            assert not each.shared.is_owner
        assert two.other.world.membership.instances, "an empty record lists nobody, which is no order"
        two.now_s += LEASE_S / 2
        await two.one.look()
        assert (two.one.shared.ownership.term_now, two.one.shared.ownership.record.version) == (1, 2)
        await new.look()
        assert new.shared.owner == "scheduler-0"
        assert new.world["decode-1"].service == "out"

    asyncio.run(go())


def test_a_write_that_another_program_got_ahead_of_is_made_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        two = Two(tmp_path)
        await two.begin()
        store, refused = two.one.shared._store, [True]
        write = store.write
        monkeypatch.setattr(store, "write", lambda record: not (refused and refused.pop()) and write(record))
        two.now_s += LEASE_S / 2
        await two.one.look()
        assert not refused
        two.now_s += LEASE_S * 0.9
        assert two.one.shared.is_owner, "it was renewed"
        monkeypatch.setattr(store, "write", lambda record: False)
        await two.one.look()
        assert two.one.shared.is_owner, "nobody else can be the owner before its lease's end"
        two.now_s += LEASE_S * 0.2
        assert not two.one.shared.is_owner

    asyncio.run(go())


def test_an_owner_whose_workers_follow_a_later_term_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        two = Two(tmp_path)
        await two.begin()
        two.one.world.membership.on_stale_order("to-decode-0", 1)
        await two.one.look()
        assert "start the workers again" not in caplog.text
        two.one.world.membership.on_stale_order("to-decode-0", 7)
        await two.one.look()
        assert "workers follow term 7 and no earlier one, and this owner of membership has term 1" in caplog.text
        caplog.clear()
        await two.one.look()
        assert not caplog.records, "no worker has refused since"
        assert two.one.shared.is_owner

    asyncio.run(go())


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_lease_is_let_go_after_a_write_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    async def go() -> None:
        two = Two(tmp_path)
        await two.begin()
        shared, begun, goes_on = two.one.shared, threading.Event(), threading.Event()
        write, written = shared._store.write, list[str]()

        def slowly(record: LeaseRecord) -> bool:
            begun.set()
            assert goes_on.wait(10)
            written.append(record.holder)
            return write(record)

        monkeypatch.setattr(shared._store, "write", slowly)
        monkeypatch.setattr("pd_cluster.cluster.members.shared.CALL_PART", 0.01 if is_slow else 5.0)
        two.now_s += LEASE_S / 2
        running = asyncio.create_task(shared.run())
        assert await asyncio.to_thread(begun.wait, 10)
        running.cancel()
        if not is_slow:
            asyncio.get_running_loop().call_later(0.02, goes_on.set)
        await asyncio.wait((running,), timeout=10)
        assert running.cancelled()
        assert written == ([] if is_slow else ["scheduler-0@1", ""]), "one call at a time"
        goes_on.set()

    asyncio.run(go())


def test_a_new_scheduler_is_no_owner_before_it_reaches_all(tmp_path: Path) -> None:
    """Its list of live instances would cut links that the others' requests use."""

    async def go() -> None:
        two = Two(tmp_path)
        await two.begin()
        new = Scheduler(tmp_path, 2, lambda: two.now_s)
        new.world["decode-0"].state = "connecting"
        await new.look()
        two.now_s += LEASE_S + 0.1
        await new.look()
        assert not new.shared.is_owner
        new.world["decode-0"].state = "ready"
        await new.look()
        assert new.shared.is_owner

    asyncio.run(go())


def test_the_first_look_waits_for_all_instances_and_takes_over_the_wishes_of_a_record_without_an_owner(
    tmp_path: Path,
) -> None:
    async def go() -> None:
        two = Two(tmp_path)
        await two.begin()
        two.one.world.elastic.drain("decode-1", timeout_s=7.0)
        await two.one.look()
        await two.one.shared._release()
        new = Scheduler(tmp_path, 2, lambda: two.now_s)
        new.world["decode-0"].state = "connecting"
        await new.look()
        assert not new.shared.is_owner
        assert new.world["decode-1"].service == "out"
        newest = Scheduler(tmp_path, 3, lambda: two.now_s)
        await newest.look()
        assert newest.shared.is_owner
        (member,) = [each for each in newest.shared.ownership.record.members if each.name == "decode-1"]
        assert (member.service, member.drain_timeout_s) == ("out", 7.0)

    asyncio.run(go())


def test_terms_of_a_new_folder_are_later_than_those_of_a_lost_one(tmp_path: Path) -> None:
    async def go() -> None:
        terms, now_s = [], [10.0]
        for wall_s in (1_000_000.9, 1_000_050.0):
            one = Scheduler(tmp_path, 0, lambda: now_s[0])
            one.wall_s = wall_s
            await one.look()
            now_s[0] += LEASE_S
            await one.look()
            terms.append(one.fence.term)
            for file in (tmp_path / "lease").iterdir():
                file.unlink()
        assert terms == [1_000_000, 1_000_050]
        one.wall_s = 0.0  # it was set back
        for _ in range(2):
            now_s[0] += LEASE_S
            await one.look()
        assert one.fence.term == 1_000_051

    asyncio.run(go())


def test_a_single_scheduler_says_how_workers_of_several_follow_it(caplog: pytest.LogCaptureFixture) -> None:
    ElasticWorld().membership.on_stale_order("to-decode-0", 7)
    (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "start the workers again" in told.getMessage()


def test_others_have_longer_to_hear_where_leases_are_longer(tmp_path: Path) -> None:
    two = Two(tmp_path)
    assert two.one.shared.settle_s == 0.5
    two.one.shared.ownership.duration_s = 15.0
    assert two.one.shared.settle_s == 4.5
    world = two.one.world
    assert not world.elastic._is_settled(world["decode-1"], world["decode-1"].drain_deadline_s + 4.4)
    assert world.elastic._is_settled(world["decode-1"], world["decode-1"].drain_deadline_s + 4.5)


def test_other_work_at_an_instance_is_what_it_reports(tmp_path: Path) -> None:
    async def go() -> None:
        world = ElasticWorld()
        world.membership.own_key = "scheduler-0@1"
        load = wire.Load(outstanding={"scheduler-0@1": 100, "scheduler-1@2": 30, "scheduler-2@3": 12})
        world.membership.on_heartbeat("to-decode-0", load)
        assert world["decode-0"].others_tokens == 42

    asyncio.run(go())


def test_work_that_others_must_see_is_reported_at_once() -> None:
    assert wire.Load(outstanding={"a@1": 1}).shown_now != wire.Load(outstanding={"a@1": 0}).shown_now


def test_a_full_instance_is_no_fault_and_no_attempt() -> None:
    async def go() -> None:
        world = World()
        world.router._limits = world.router._limits.__class__(max_attempts=0)
        serving, first, rid = await world.begin()
        world.outputs("to-prefill-0", ended=LegEnd(rid, 0, "full", True, is_full=True))
        await asyncio.sleep(0)
        assert len(world.mailbox.of(wire.Submit)) == 2, "it waits for news of the instances"
        while len(world.mailbox.of(wire.Submit)) < 4:
            world.membership.changed.set()
            await asyncio.sleep(0)
        assert len(world.mailbox.of(wire.Submit)) == 4
        submits = [body for _, body in world.mailbox.of(wire.Submit)]
        assert {body.attempt for body in submits[2:]} == {1}
        prefill = world.mailbox.of(wire.Submit)[2][0]
        world.outputs(prefill, token(rid, 0, attempt=1))
        assert (await first).position == 0
        await serving.aclose()

    asyncio.run(go())


class Bounced:
    """A request at a router whose instances are full; `pauses` are the waits that were asked for."""

    def __init__(self, wait_s: float = 30.0) -> None:
        self.world = World(replay=ReplayLimits(wait_s=wait_s))
        self.pauses: list[float] = []
        self.goes_on = asyncio.Event()
        self.world.router.pause = self._pause

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
        """Reports come until it is so."""
        while not is_so():
            self.world.membership.changed.set()
            await asyncio.sleep(0)

    async def until_submits(self, num: int, ended: asyncio.Future[TokenOutput] | None = None) -> None:
        await self.until(lambda: self.num_submits >= num or (ended is not None and ended.done()))


def test_a_full_instance_is_left_alone_for_longer_each_time() -> None:
    async def go() -> None:
        bounced = Bounced()
        bounced.goes_on.set()
        serving, first, rid = await bounced.world.begin()
        for attempt in range(8):
            bounced.bounce(rid, attempt)
            await bounced.until_submits(2 * attempt + 4)
        assert bounced.pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await serving.aclose()
        bounced.world.assert_home()

    run(go())


def test_instances_that_stay_full_are_no_internal_error() -> None:
    """The wait is counted from the first time, however often it is tried."""

    async def go() -> None:
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

    run(go())


def test_a_request_that_waits_for_room_ends_with_the_process() -> None:
    async def go() -> None:
        bounced = Bounced()
        bounced.goes_on.set()
        _, first, rid = await bounced.world.begin()
        for each in bounced.world.instances:
            each.load, each.num_outstanding = wire.Load(prefill_tokens_per_s=1.0, num_waiting=99), 99
        bounced.bounce(rid)
        await bounced.until(lambda: bool(bounced.pauses))
        bounced.world.router.end_all()
        with pytest.raises(GenerationError, match="shut"):
            await first

    run(go())


def test_a_pause_while_a_request_waits_for_room_keeps_it() -> None:
    async def go() -> None:
        bounced = Bounced()
        serving, first, rid = await bounced.world.begin()
        bounced.bounce(rid)
        await bounced.until(lambda: bool(bounced.pauses))
        await bounced.world.router.steer("paused", keeps=True)
        bounced.goes_on.set()
        for _ in range(20):
            bounced.world.membership.changed.set()
            await asyncio.sleep(0)
        assert bounced.num_submits == 2, "it has gone on while the cluster is paused"
        await bounced.world.router.steer("open")
        await bounced.until(lambda: bounced.num_submits == 4)
        assert sum(each.num_outstanding for each in bounced.world.instances) == 2
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await serving.aclose()
        bounced.world.assert_home()

    run(go())


def test_others_see_each_leg_however_small() -> None:
    sent: list[wire.Submit] = []

    async def go() -> None:
        world = World()
        serving, first, _ = await world.begin()
        sent.extend(body for _, body in world.mailbox.of(wire.Submit))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await serving.aclose()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoutingRequest, "weight", lambda self, instance, leg: 0)
        run(go())
    assert [body.weight for body in sent] == [1, 1]


@pytest.mark.parametrize(
    ("join", "entrance", "admin", "named"),
    [
        (JoinSettings(), EntranceSettings(scheduler_lease="f", api_workers=2), AdminSettings(), "--api-workers 2"),
        (
            JoinSettings(),
            EntranceSettings(scheduler_lease="f"),
            AdminSettings(allow_runtime_lora=True, lora_root="/"),
            "--allow-runtime-lora",
        ),
    ],
)
def test_what_one_scheduler_alone_can_do_is_refused_by_name(
    join: JoinSettings, entrance: EntranceSettings, admin: AdminSettings, named: str
) -> None:
    start = Start.__new__(Start)
    object.__setattr__(start, "join", join)
    with pytest.raises(ConfigError) as caught:
        check_shared(start, entrance, admin)
    assert named.strip("-") in str(caught.value).replace("_", "-")


@pytest.mark.parametrize(
    ("entrance", "timeouts", "named"),
    [
        (EntranceSettings(scheduler_index=2), Timeouts(), "scheduler-index"),
        (EntranceSettings(), Timeouts(lease_duration_s=3.0), "lease-duration"),
    ],
)
def test_a_scheduler_alone_takes_nothing_of_several(entrance: EntranceSettings, timeouts: Timeouts, named: str) -> None:
    check_alone(EntranceSettings(), Timeouts())
    with pytest.raises(ConfigError) as caught:
        check_alone(entrance, timeouts)
    assert named in str(caught.value).replace("_", "-")
    assert "scheduler-lease" in str(caught.value).replace("_", "-")


@pytest.mark.parametrize("flag", ["--scheduler-index", "--scheduler-lease"])
def test_up_gives_each_scheduler_its_number_itself(flag: str) -> None:
    for given in ([f"{flag}=0"], [flag, "0"]):
        with pytest.raises(ConfigError, match=flag):
            Cluster(Launch(model="m", num_schedulers=2, arguments=given), print)


def test_up_starts_no_more_schedulers_than_there_are_numbers() -> None:
    refused = CliRunner().invoke(app, ["up", "--schedulers", str(MAX_SCHEDULERS + 1)])
    assert refused.exit_code == 2
    assert str(MAX_SCHEDULERS) in refused.output


def test_up_plans_each_scheduler_with_ports_of_its_own(tmp_path: Path) -> None:
    launch = Launch(model="m", num_schedulers=3, port=9000)
    schedulers = [member for member in plan_cluster(launch, tmp_path) if member.is_scheduler]
    assert [(member.name, member.port) for member in schedulers] == [
        ("scheduler-0", 9000),
        ("scheduler-1", 9002),
        ("scheduler-2", 9004),
    ]
    assert launch.urls == [f"http://127.0.0.1:{port}" for port in (9000, 9002, 9004)]
    for index, member in enumerate(schedulers):
        assert f"--scheduler-index={index}" in member.command
        assert f"--scheduler-lease={tmp_path / 'scheduler.lease'}" in member.command
    (alone,) = [member for member in plan_cluster(Launch(model="m"), tmp_path) if member.is_scheduler]
    assert alone.name == "scheduler"
    assert not [flag for flag in alone.command if "--scheduler-lease" in flag]
    with pytest.raises(ConfigError, match="--admin-port: not with --schedulers"):
        Cluster(Launch(model="m", num_schedulers=2, arguments=["--admin-port=9001"]), print)
    with pytest.raises(ConfigError, match="--encode: not with --schedulers"):
        Cluster(Launch(model="m", num_schedulers=2, num_encode=1), print)
