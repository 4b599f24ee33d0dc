"""Instances join, leave, drain and change roles: every row of the table in docs/protocol/membership.md, without
sockets.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.known_prefixes import Prompt
from pd_cluster.cluster.leases.membership_lease import DesiredInstance
from pd_cluster.cluster.placement.routing_policy import RoutingRequest, least_loaded, linked_pairs
from pd_cluster.errors import InstanceNotFound, Refused
from pd_cluster.types import RequestSpec, Sampling
from tests.support.elastic_world import ElasticWorld, busy, idle
from tests.support.router_world import PROMPT, token
from tests.support.until import until


def pairs(world: ElasticWorld) -> set[str]:
    return {f"{p.name} {d.name}" for p, d in linked_pairs(world.membership.instances)}


# ---- another scheduler's list


@pytest.fixture
def world() -> ElasticWorld:
    return ElasticWorld()


async def test_a_name_at_another_place_is_another_worker(world: ElasticWorld) -> None:
    members = [
        DesiredInstance(name=each.name, role=each.role, host=each.host, port=each.port, device_ids=each.device_ids)
        for each in world.membership.instances
    ]
    before = world["decode-0"], world["decode-1"], world["prefill-0"]
    members[2] = msgspec.structs.replace(members[2], host="127.0.0.2")
    members[3] = msgspec.structs.replace(members[3], device_ids=["77"])
    world.elastic.follow(members)
    after = world["decode-0"], world["decode-1"], world["prefill-0"]
    assert world.names == [each.name for each in members]
    assert [one is other for one, other in zip(before, after, strict=True)] == [False, False, True]
    assert (after[0].host, world.membership.host_of(after[0])) == ("127.0.0.2", "127.0.0.2")
    assert (after[1].device_ids, after[1].state) == (["77"], "unreachable")
    assert before[0].conn == "", "the old connection must be closed"
    world.elastic.follow(members)
    assert world["decode-0"] is after[0]


# ---- drain


def test_a_draining_instance_gets_no_requests_and_keeps_its_links(world: ElasticWorld) -> None:
    decode = world["decode-0"]
    busy(decode)
    world.elastic.drain("decode-0")
    assert decode.shown_state == "draining"
    assert pairs(world) == {"prefill-0 decode-1", "prefill-1 decode-1"}
    world.elastic.tick()
    idle(decode)
    world.elastic.tick()
    assert (decode.shown_state, decode.is_ready) == ("drained", True)
    assert not world.mailbox.of(wire.Peers), "links must stay"
    world.elastic.undrain("decode-0")
    assert decode.shown_state == "ready"
    assert len(pairs(world)) == 4


def test_what_the_load_still_shows_is_waited_for_until_the_deadline(world: ElasticWorld) -> None:
    for shown in ("num_running", "num_waiting", "num_landing", "num_exporting", "num_held_blocks"):
        world["prefill-0"].load = wire.Load(**{shown: 1})
        world.elastic.change_role("prefill-0", "decode")
        world.elastic.tick()
        assert world["prefill-0"].shown_state == "changing", shown
        world.elastic.change_role("prefill-0", "prefill")
        assert world["prefill-0"].shown_state == "ready"
    world["decode-0"].load = wire.Load(num_held_blocks=7)
    world.elastic.change_role("decode-0", "prefill", timeout_s=2.0)
    world.elastic.tick()
    assert world["decode-0"].role == "decode"
    world.now_s = 2.0
    world.elastic.tick()
    assert world["decode-0"].role == "prefill"


async def test_past_the_deadline_requests_go_on_elsewhere_and_it_is_no_death(world: ElasticWorld) -> None:
    tokens: list[int] = []
    serving = world.router.serve(RequestSpec(PROMPT, Sampling(max_tokens=3)))

    async def read() -> None:
        async for item in serving:
            tokens.append(item.token_id)  # noqa: PERF401 (the test watches it grow)

    reading = asyncio.ensure_future(read())
    await until(lambda: world.mailbox.of(wire.Submit))
    request_id = world.mailbox.of(wire.Submit)[0][1].request_id
    world.router.on_outputs("to-prefill-0", wire.Outputs([token(request_id, 0, 11)]))
    await until(lambda: tokens)
    (stream,) = world.router.streams
    world.elastic.drain("decode-0", timeout_s=5.0)
    world.elastic.tick()
    assert not world.mailbox.of(wire.Abort)
    world.now_s = 5.0
    world.elastic.tick()
    assert {conn for conn, _ in world.mailbox.of(wire.Abort)} == {"to-prefill-0", "to-decode-0"}
    await until(lambda: len(world.mailbox.of(wire.Submit)) >= 3)
    conn, again = world.mailbox.of(wire.Submit)[-1]
    assert (conn, again.leg, again.resumed[0].output_token_ids) == ("to-decode-1", "hybrid", [11])
    assert (stream.deaths, stream.num_moves) == ([], 1)
    late = token(request_id, 1, 99)
    world.router.on_outputs("to-decode-0", wire.Outputs([late]))
    more = [token(request_id, 1, 12, attempt=1), token(request_id, 2, 13, "length", attempt=1)]
    world.router.on_outputs("to-decode-1", wire.Outputs(more))
    await reading
    assert tokens == [11, 12, 13]
    assert world["decode-0"].shown_state == "drained"


@pytest.mark.parametrize(("command", "more"), [("drain", []), ("remove", []), ("change_role", ["decode"])])
def test_the_same_command_again_changes_the_deadline(world: ElasticWorld, command: str, more: list[str]) -> None:
    busy(world["prefill-0"])
    ask = getattr(world.elastic, command)
    assert ask("prefill-0", *more).drain_deadline_s == 30.0
    world.now_s = 10.0
    assert ask("prefill-0", *more).drain_deadline_s == 30.0
    assert ask("prefill-0", *more, timeout_s=0.5).drain_deadline_s == 10.5


async def test_a_request_outlives_any_number_of_drains(world: ElasticWorld) -> None:
    serving = world.router.serve(RequestSpec(PROMPT, Sampling(max_tokens=100)))
    reading = asyncio.ensure_future(anext(serving))
    for at in range(20):
        await until(lambda at=at: len(world.mailbox.of(wire.Submit)) >= 2 * (at + 1))  # type: ignore[misc]
        name = world.mailbox.of(wire.Submit)[-1][0].removeprefix("to-")
        world.elastic.drain(name, timeout_s=0.0)
        world.elastic.tick()
        world.elastic.undrain(name)
    assert not reading.done()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


# ---- roles


def test_a_role_changes_when_the_instance_is_empty_and_everybody_is_told(world: ElasticWorld) -> None:
    prefill = world["prefill-1"]
    busy(prefill)
    world.elastic.change_role("prefill-1", "decode")
    world.elastic.tick()
    assert (prefill.role, prefill.shown_state, world.told()) == ("prefill", "changing", {})
    assert pairs(world) == {"prefill-0 decode-0", "prefill-0 decode-1"}
    idle(prefill)
    world.elastic.tick()
    roles = {"prefill-0": "prefill", "prefill-1": "decode", "decode-0": "decode", "decode-1": "decode"}
    assert world.told() == dict.fromkeys(roles, roles)
    assert pairs(world) == {"prefill-0 decode-0", "prefill-0 decode-1"}, "there is no link to it yet"
    world.link()
    assert pairs(world) == {"prefill-0 decode-0", "prefill-0 decode-1", "prefill-0 prefill-1"}


def test_a_change_can_be_called_off_and_leaves_a_drained_instance_drained(world: ElasticWorld) -> None:
    busy(world["prefill-1"])
    world.elastic.change_role("prefill-1", "decode")
    world.elastic.change_role("prefill-1", "prefill")
    idle(world["prefill-1"])
    world.elastic.tick()
    assert (world["prefill-1"].role, world["prefill-1"].shown_state) == ("prefill", "ready")
    world.elastic.drain("decode-1")
    world.elastic.change_role("decode-1", "prefill")
    world.elastic.tick()
    assert (world["decode-1"].role, world["decode-1"].shown_state) == ("prefill", "drained")
    with pytest.raises(Refused, match="decode-0 is the last"):
        world.elastic.change_role("decode-0", "prefill")
    world["decode-0"].state = "unreachable"
    world.elastic.drain("decode-0")  # it takes no requests anyway


async def test_one_that_is_down_changes_at_once_and_comes_back_with_its_new_role(world: ElasticWorld) -> None:
    world.membership.on_closed("to-decode-1", "it died")
    world.elastic.change_role("decode-1", "prefill")
    world.elastic.tick()
    assert world["decode-1"].role == "prefill"
    world.make_ready(world["decode-1"])
    world.membership.on_opened("to-decode-1")
    assert world.told()["decode-1"]["decode-1"] == "prefill"


# ---- the last instance of a role


@pytest.mark.parametrize("command", ["drain", "remove", "change_role"])
def test_the_last_of_a_role_stays_unless_forced(command: str) -> None:
    world = ElasticWorld(num_prefill=1)

    def ask(**more: Any) -> Instance:
        role = ["decode"] if command == "change_role" else []
        return getattr(world.elastic, command)("prefill-0", *role, **more)  # type: ignore[no-any-return]

    with pytest.raises(Refused, match="prefill-0 is the last prefill instance that takes requests"):
        ask()
    assert world["prefill-0"].takes_requests
    ask(force=True)
    assert not world["prefill-0"].takes_requests
    prefill, decode = least_loaded(world.membership.instances, RoutingRequest(Prompt(RequestSpec([1], Sampling()))))
    assert (prefill.name, prefill) == ("decode-0", decode), "expected one hybrid instance to serve"


# ---- leave and join


async def test_remove_drains_and_forgets(world: ElasticWorld) -> None:
    busy(world["decode-0"])
    world.elastic.remove("decode-0")
    world.elastic.tick()
    assert world["decode-0"].shown_state == "leaving"
    for command in (world.elastic.drain, world.elastic.undrain):
        with pytest.raises(Refused, match="decode-0 is leaving"):
            command("decode-0")
    idle(world["decode-0"])
    world.elastic.tick()
    assert world.names == ["prefill-0", "prefill-1", "decode-1"]
    told = world.told()
    assert told.pop("decode-0") == {}, "it must close its links"
    assert all(set(peers) == set(world.names) for peers in told.values())
    world.membership.on_closed("to-decode-0", "late")  # no longer a member
    world.membership.on_heartbeat("to-decode-0", wire.Load())
    with pytest.raises(InstanceNotFound, match=r"known are prefill-0, prefill-1, decode-1$"):
        world.elastic.remove("decode-0")


async def test_what_was_removed_comes_back_by_hand_only(world: ElasticWorld) -> None:
    world.elastic.remove("prefill-1")
    world.elastic.tick()
    assert await world.elastic.reload() == "joining: none; leaving: none"
    await world.elastic.add("prefill-1", 7001)
    assert world.names == ["prefill-0", "prefill-1", "decode-0", "decode-1"], "expected the table's order"
    back = world["prefill-1"]
    assert (back.host, back.port, back.device_ids, back.state) == ("127.0.0.1", 7001, ["11"], "unreachable")


async def test_run_ends_what_was_begun(world: ElasticWorld) -> None:
    running = asyncio.ensure_future(world.elastic.run())
    for role in ("decode", "prefill"):
        world.elastic.change_role("prefill-1", role)  # type: ignore[arg-type]
        while world["prefill-1"].role != role:
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
