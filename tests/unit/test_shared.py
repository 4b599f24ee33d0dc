"""Several schedulers: followers take over the owner's list, and only the owner gives orders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster import wire
from pd_cluster.cluster.members.lease_folder import LeaseFolder
from pd_cluster.cluster.members.shared import SharedMembership
from pd_cluster.cluster.processes.launch import Launch
from pd_cluster.cluster.processes.launcher import Cluster, plan_cluster
from pd_cluster.commands.serve_scheduler import check_shared
from pd_cluster.commands.serve_start import Start
from pd_cluster.errors import ConfigError, Refused, Unavailable
from pd_cluster.net.admission import Fence
from pd_cluster.settings.processes import JoinSettings
from pd_cluster.settings.routing import AdminSettings, EntranceSettings
from pd_cluster.types import LegEnd
from tests.support.elastic_world import ElasticWorld
from tests.support.router_world import World, token

LEASE_S = 1.5


class Scheduler:
    """One of several, with a membership of its own over instances that are ready."""

    def __init__(self, folder: Path, index: int, clock: Callable[[], float]) -> None:
        self.world = ElasticWorld()
        self.fence = Fence()
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


def test_other_work_at_an_instance_is_what_it_reports(tmp_path: Path) -> None:
    async def go() -> None:
        world = ElasticWorld()
        world.membership.own_key = "scheduler-0@1"
        load = wire.Load(outstanding={"scheduler-0@1": 100, "scheduler-1@2": 30, "scheduler-2@3": 12})
        world.membership.on_heartbeat("to-decode-0", load)
        assert world["decode-0"].others_tokens == 42

    asyncio.run(go())


def test_a_full_instance_is_no_fault_and_no_attempt() -> None:
    async def go() -> None:
        world = World()
        world.router._limits = world.router._limits.__class__(max_attempts=0)
        serving, first, rid = await world.begin()
        world.outputs("to-prefill-0", ended=LegEnd(rid, 0, "full", True, is_full=True))
        await asyncio.sleep(0)
        assert len(world.mailbox.of(wire.Submit)) == 2, "it waits for news of the instances"
        for _ in range(3):
            world.membership.changed.set()
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(world.mailbox.of(wire.Submit)) == 4
        submits = [body for _, body in world.mailbox.of(wire.Submit)]
        assert {body.attempt for body in submits[2:]} == {1}
        prefill = world.mailbox.of(wire.Submit)[2][0]
        world.outputs(prefill, token(rid, 0, attempt=1))
        assert (await first).position == 0
        await serving.aclose()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("join", "entrance", "admin", "named"),
    [
        (JoinSettings(), EntranceSettings(scheduler_lease="f", api_workers=2), AdminSettings(), "--api-workers 2"),
        (JoinSettings(join_port=9002), EntranceSettings(scheduler_lease="f"), AdminSettings(), "--join-port"),
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
