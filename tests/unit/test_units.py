"""Units at the scheduler: members form, are named to each other, and follow commands together."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.api.admin.admin_app import describe
from pd_cluster.api.admin.metrics_routes import metrics_of
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members.cluster_sleep import ClusterSleep
from pd_cluster.cluster.members.worker_membership import Membership, instances_of
from pd_cluster.cluster.overview.cluster_problems import problems_of
from pd_cluster.cluster.overview.request_history import RequestHistory
from pd_cluster.cluster.roles.auto_role import AutoRole, Rules
from pd_cluster.errors import Refused
from pd_cluster.process_messages import AllStats, Busy, InstanceInfo, Stats
from pd_cluster.settings.routing_settings import RoutingConfig
from pd_cluster.settings.timeouts import Timeouts
from tests.support.elastic_world import ElasticWorld, busy, idle, place_of
from tests.support.mail import RecordedMail
from tests.support.router_world import info_of

UNIT = {"unit": "decode-0..1", "unit_size": 2}
ADAPTER = "a" * 64


class FormingWorld:
    """A real membership of one prefill and two decode instances, whose descriptions a test sets."""

    def __init__(self) -> None:
        self.mailbox = RecordedMail(is_numbered=True)
        place = place_of(1, 2)
        instances = instances_of(place, [1, 2, 3])
        self.membership = Membership(place, instances, self.mailbox, Timeouts(), "model")
        self.answers: dict[str, InstanceInfo] = {}
        self.asked: list[dict[str, str]] = []

    def __getitem__(self, name: str) -> Instance:
        return next(each for each in self.membership.instances if each.name == name)

    async def says(self, name: str, state: str, **about: Any) -> Instance:
        """Sets an instance's description and queries it; a connection opened then comes up."""
        instance = self[name]
        known = {"device_ids": instance.device_ids, "epoch": 1, "control_port": 7, "public_key": bytes(32)}
        known |= {"model_identity": "model", "state": state}
        self.answers[name] = info_of(name, instance.role, **{**known, **about})
        return await self.ask(name)

    async def ask(self, name: str) -> Instance:
        instance, before = self[name], self[name].conn

        def answer(request: httpx.Request) -> httpx.Response:
            self.asked.append(dict(request.url.params))
            if name not in self.answers:
                raise httpx.ConnectError("nobody")
            return httpx.Response(200, stream=httpx.ByteStream(msgspec.json.encode(self.answers[name])))

        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await self.membership.ask(instance, client)
        if instance.conn and instance.conn != before:
            self.membership.on_opened(instance.conn)
        return instance

    def told(self) -> dict[str, list[tuple[str, str, int, bool]]]:
        """Returns the last `Peers` sent to each instance: (name, unit, rank, whether it is forming)."""
        names = {each.conn: each.name for each in self.membership.instances if each.conn}
        return {
            names[conn]: [(each.name, each.unit, each.unit_rank, each.is_forming) for each in body.peers]
            for conn, body in self.mailbox.of(wire.Peers)
            if conn in names
        }


async def test_members_form_over_the_connections_at_which_they_serve() -> None:
    world = FormingWorld()
    await world.says("prefill-0", "ready")
    first = await world.says("decode-0", "forming", **UNIT)
    assert (first.shown_state, first.takes_requests, first.is_returning) == ("forming", False, True)
    forming = [("prefill-0", "", 0, False), ("decode-0", "decode-0..1", 0, True)]
    assert world.told() == {"prefill-0": forming, "decode-0": forming}, "the forming member must be told, too"
    await world.ask("decode-0")
    assert world.asked[-1]["unless"] == "forming", "the answer must wait until it has formed"
    await world.says("decode-1", "forming", **UNIT, unit_rank=1)
    both = [*forming, ("decode-1", "decode-0..1", 1, True)]
    assert world.told() == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), both)
    world.mailbox.sent.clear()
    del world.answers["decode-1"]
    assert (await world.ask("decode-1")).state == "forming", "its connection decides whether it lives"
    conns = [world[name].conn for name in ("decode-0", "decode-1")]
    for rank, name in enumerate(("decode-0", "decode-1")):
        await world.says(name, "ready", **UNIT, unit_rank=rank)
    assert [world[name].conn for name in ("decode-0", "decode-1")] == conns
    assert len(world.mailbox.opened) == 3
    assert world["decode-1"].takes_requests
    serving = [(name, unit, rank, False) for name, unit, rank, _ in both]
    assert world.told() == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), serving)


@pytest.mark.parametrize("end", ["closed", "another life", "failed", "removed"])
async def test_the_end_of_a_forming_member_is_told_to_the_others(end: str) -> None:
    world = FormingWorld()
    await world.says("decode-0", "forming", **UNIT)
    lost = await world.says("decode-1", "forming", **UNIT, unit_rank=1)
    conn = lost.conn
    if end == "closed":
        world.membership.on_closed(conn, "nothing heard for 3.1 s")
        assert (lost.state, lost.reason, lost.conn) == ("unreachable", "nothing heard for 3.1 s", "")
    elif end == "another life":
        await world.says("decode-1", "forming", **UNIT, unit_rank=1, epoch=2)
        assert (lost.state, world.mailbox.closed, lost.conn != conn) == ("forming", [conn], True)
    elif end == "failed":
        await world.says("decode-1", "failed", error="the memory is full")
        assert (lost.state, lost.reason, world.mailbox.closed) == ("failed", "the memory is full", [conn])
    else:
        world.membership.forget(lost)
    names = [name for name, *_ in world.told()["decode-0"]]
    assert names == (["decode-0", "decode-1"] if end == "another life" else ["decode-0"])


async def test_adapters_are_loaded_once_a_unit_has_formed_and_its_members_stay_named() -> None:
    world = FormingWorld()
    wanted = wire.WantedAdapters([wire.AdapterLocation(ADAPTER, "/adapters/a")])
    world.membership.adapters = wanted
    member = await world.says("decode-0", "forming", **UNIT)
    assert not world.mailbox.of(wire.WantedAdapters)
    await world.says("decode-0", "ready", **UNIT)
    assert world.mailbox.of(wire.WantedAdapters) == [(member.conn, wanted)]
    assert (member.state, member.reason) == ("connecting", "it loads adapters")
    await world.says("decode-1", "forming", **UNIT, unit_rank=1)
    named = [("decode-0", "decode-0..1", 0, True), ("decode-1", "decode-0..1", 1, True)]
    assert world.told()["decode-0"] == world.told()["decode-1"] == named
    world.membership.on_adapter_states(member.conn, wire.AdapterStates([ADAPTER]))
    assert member.takes_requests
    assert world.told()["decode-1"][0] == ("decode-0", "decode-0..1", 0, False)


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        (
            {"unit_size": 4, "unit_rank": 1},
            "its unit decode-0..1 has 4 instances, but decode-0 reports 2; start",
        ),
        ({"unit_rank": 0}, "it and decode-0 both have rank 0 in decode-0..1; give each its own"),
        (
            {"unit_rank": 1, "unit": "decode-0..3", "unit_size": 4},
            "it is in decode-0..3, but decode-0, in the same unit by the rank table, is in decode-0..1;",
        ),
        ({"unit_rank": 0, "unit": "", "unit_size": 1}, "it is in no unit, but decode-0, in the same unit by"),
        ({"unit_rank": 2}, "it has rank 2 in decode-0..1, which has 2 instances"),
        ({"unit_rank": 1, "unit": "x" * 300}, "127.0.0.1:3 does not answer as a worker of this version"),
    ],
)
@pytest.mark.parametrize("state", ["forming", "ready"])
async def test_a_later_member_that_contradicts_an_earlier_one_fails(
    state: str, about: dict[str, Any], reason: str
) -> None:
    world = FormingWorld()
    await world.says("decode-0", state, **UNIT)
    later = await world.says("decode-1", state, **{**UNIT, **about})
    assert (later.state, world["decode-0"].state) == ("failed", state)
    assert later.reason.startswith(reason)
    world.membership.on_closed(world["decode-0"].conn, "it is dead")
    if about == {"unit_rank": 0}:
        assert (await world.ask("decode-1")).state == state, "only live members must count"


async def test_a_member_that_forms_for_long_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    world, loop = FormingWorld(), asyncio.get_running_loop()
    first = await world.says("decode-0", "forming", **UNIT)
    await world.ask("decode-0")
    assert first.reason == ""
    later_s = loop.time() + Timeouts().connect_timeout_s + 1
    monkeypatch.setattr(loop, "time", lambda: later_s)
    await world.ask("decode-0")
    assert first.reason == "it waits for decode-1, which is unreachable", "also for a member that never answered"
    found = problems_of([first], RequestHistory(), RoutingConfig())
    assert ("warning", f"decode-0 is forming: {first.reason}") in [(p.severity, p.to_json()["text"]) for p in found]
    await world.says("decode-1", "forming", **UNIT, unit_rank=1)
    await world.ask("decode-0")
    assert first.reason == "it has no connection to decode-1 yet, although the scheduler reaches them; see their logs"


# ---- operators' commands


@pytest.fixture
def world() -> ElasticWorld:
    """Returns a world with four decode instances, of which the first two form a unit."""
    made = ElasticWorld(num_decode=4)
    made["decode-0"].info = info_of("decode-0", "decode", **UNIT)
    made["decode-1"].info = info_of("decode-1", "decode", **UNIT, unit_rank=1)
    return made


def states(world: ElasticWorld) -> list[str]:
    return [world[f"decode-{index}"].shown_state for index in range(4)]


@pytest.mark.parametrize("name", ["decode-0", "decode-1"])
async def test_members_are_drained_moved_and_removed_together(world: ElasticWorld, name: str) -> None:
    both = [world["decode-0"], world["decode-1"]]
    world.elastic.drain(name)
    assert states(world) == ["drained", "drained", "ready", "ready"]
    world.elastic.undrain(name)
    assert states(world) == ["ready"] * 4
    busy(both[1])
    world.elastic.change_role(name, "prefill")
    world.elastic.tick()
    assert states(world) == ["changing", "changing", "ready", "ready"], "an idle member must wait for the other"
    idle(both[1])
    world.elastic.tick()
    assert [each.role for each in both] == ["prefill", "prefill"]
    world.elastic.change_role(name, "decode")
    world.elastic.tick()
    busy(both[1])
    assert world.elastic.unit_of(world.elastic.remove(name)) == both
    world.elastic.tick()
    assert states(world) == ["leaving", "leaving", "ready", "ready"]
    idle(both[1])
    world.elastic.tick()
    assert not {"decode-0", "decode-1"} & set(world.names)


async def test_a_mate_that_was_never_heard_of_follows_too(world: ElasticWorld) -> None:
    mate = world["decode-1"]
    mate.info, mate.state = None, "unreachable"
    world.elastic.drain("decode-0")
    assert mate.service == "out"
    mate.info = info_of("decode-1", "decode")  # it restarted without a unit
    world.elastic.undrain("decode-0")
    assert (mate.service, world["decode-0"].service) == ("out", "in")


async def test_the_last_unit_of_a_role_stays_and_no_table_tears_a_unit_apart(world: ElasticWorld) -> None:
    for name in ("decode-2", "decode-3"):
        world.elastic.remove(name)
    world.elastic.tick()
    for command in (world.elastic.drain, world.elastic.remove):
        with pytest.raises(Refused, match="decode-0 and decode-1 are the last decode instances that take requests"):
            command("decode-1")
    assert [each.service for each in world.membership.instances] == ["in"] * 4
    world.place = place_of(2, 1)
    with pytest.raises(Refused, match=r"no longer has decode-1, but has others of its unit \(decode-0, decode-1\)"):
        await world.elastic.reload()
    assert [each.service for each in world.membership.instances] == ["in"] * 4


def test_units_do_not_sleep_and_change_no_role_by_themselves(world: ElasticWorld) -> None:
    with pytest.raises(Refused, match=r"instances of a unit do not sleep, and decode-0 is in decode-0\.\.1"):
        ClusterSleep(world.membership, world.mailbox).check()

    def flip(world: ElasticWorld) -> str | None:
        auto = AutoRole(Rules(sustain_s=1.0))
        for name in ("prefill-0", "prefill-1"):
            world[name].load = wire.Load(num_waiting=9)
        flips = [auto.observe(float(at), world.membership.instances) for at in range(3)]
        return next((each.name for each in flips if each is not None), None)

    world["decode-3"].outstanding_tokens = 5
    assert flip(world) == "decode-2"
    for index in (2, 3):
        name = f"decode-{index}"
        world[name].info = info_of(name, "decode", unit="decode-2..3", unit_rank=index - 2, unit_size=2)
    assert flip(world) is None


def test_people_and_metrics_see_units(world: ElasticWorld) -> None:
    member = world["decode-1"]
    member.load = wire.Load(num_rounds=40, num_idle_rounds=10, exchange_s=1.5)
    shown = describe(member)
    assert {name: shown[name] for name in ("unit", "unit_rank", "unit_size")} == {**UNIT, "unit_rank": 1}
    assert [shown[name] for name in ("num_rounds", "num_idle_rounds", "exchange_s")] == [40, 10, 1.5]
    assert describe(world["decode-2"])["unit"] is None
    text = metrics_of(world.membership.instances, "m", AllStats(Stats(), Busy(), 1), Busy()).decode()
    labels = 'instance_id="decode-1",model_name="m"'
    assert f'pd_cluster:unit_info{{{labels},unit="decode-0..1",unit_rank="1",unit_size="2"}} 1.0' in text
    assert f"pd_cluster:unit_rounds_total{{{labels}}} 40.0" in text
    assert text.count("pd_cluster:unit_info{") == 2
