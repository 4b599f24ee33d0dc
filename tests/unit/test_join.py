"""Workers without a rank table, at the scheduler: every row of its table in docs/protocol/membership.md. Clocks are
stopped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members import join_registrar as registrar_module
from pd_cluster.cluster.members.join_registrar import Registrar
from pd_cluster.errors import InstanceNotFound
from pd_cluster.net.node_trust import NODE_REFUSED
from pd_cluster.process_messages import InstanceInfo
from tests.support.elastic_world import ElasticWorld
from tests.support.joining_worker import JOIN, REACH_S
from tests.support.mail import RecordedMail

TABLE = ["prefill-0", "decode-0"]


class Registry:
    """A registrar over a real membership whose clock the test advances; the rank table has two workers."""

    def __init__(self) -> None:
        self.world = ElasticWorld(1, 1)
        self.now_s = 0.0
        self.mail = RecordedMail()
        self.registrar = Registrar(self.world.membership, self.mail.send, REACH_S, lambda: self.now_s)

    def join(self, conn: str = "c1", peer: str = "d@1", **changes: Any) -> str:
        """Sends a join request; returns the problem in the answer."""
        self.registrar.on_message(conn, peer, msgspec.structs.replace(JOIN, **changes))
        to, body = self.mail.sent[-1]
        assert to == conn
        assert isinstance(body, wire.JoinAnswer)
        return body.problem

    def joined(self) -> Instance:
        """Returns a joined instance that has answered and is ready."""
        assert self.join() == ""
        instance = self.world["d"]
        instance.info = info_of(instance)
        self.world.make_ready(instance)
        return instance

    def lose(self, instance: Instance) -> None:
        """Closes the scheduler's connection to the instance."""
        self.world.membership.on_closed(instance.conn, "the connection was closed")

    def names(self) -> list[str]:
        self.registrar.tick()
        return self.world.names

    def is_listed(self) -> bool:
        return "d" in self.names()

    def answers(self) -> list[tuple[str, str]]:
        return [(conn, body.problem) for conn, body in self.mail.of(wire.JoinAnswer)]


def info_of(instance: Instance, **changes: Any) -> InstanceInfo:
    info = InstanceInfo(
        name=instance.name,
        role=instance.role,
        state="ready",
        server_ip=instance.host,
        device_ids=instance.device_ids,
        epoch=1,
        pid=1,
        model_identity="model",
    )
    return msgspec.structs.replace(info, **changes)


def fails(instance: Instance, reason: str) -> None:
    instance.state, instance.reason = "failed", reason


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_a_worker_is_listed_behind_the_table_s(registry: Registry) -> None:
    assert registry.join() == ""
    assert registry.join("c2", "a.prefill@9", role="prefill", port=8001) == ""
    assert registry.names() == [*TABLE, "a.prefill", "d"]
    found = registry.world["d"]
    assert (found.role, found.host, found.port, found.device_ids) == ("decode", "192.0.2.7", 8000, ["0"])


@pytest.mark.parametrize(
    ("peer", "changes", "told"),
    [
        ("no name@1", {}, "--instance-name 'no name': expected up to 128 letters"),
        ("decode-0@1", {}, "--instance-name 'decode-0': names of this form denote entries of a rank table"),
        ("scheduler@1", {}, "--instance-name 'scheduler': names of this form"),
        ("e@1", {"host": "worker.example"}, "--advertise-host 'worker.example': expected the numeric address"),
        ("e@1", {"host": "0.0.0.0"}, "--advertise-host '0.0.0.0': expected the numeric address of one machine"),
        ("e@1", {"host": "::1%" + 64 * "x"}, "--advertise-host '::1%xxx"),
        ("e@1", {"host": "::1%a..b"}, "--advertise-host '::1%a..b': expected the numeric address"),
        ("e@1", {"model_identity": "other"}, "it serves another model (other) than the scheduler (model)"),
        ("e@1", {"hf_overrides": '{"a":1}'}, 'it was started with --hf-overrides {"a":1}, the scheduler with {}'),
        ("e@1", {"host": "127.0.0.1", "port": 1}, "--port 1 of 127.0.0.1 is the port of prefill-0"),
        ("e@1", {}, "--port 8000 of 192.0.2.7 is the port of d"),
        ("d@2", {"host": "192.0.2.8"}, "--instance-name d: the decode instance at 192.0.2.7:8000 has this name"),
        ("d@2", {"role": "prefill"}, "--instance-name d: the decode instance at"),
    ],
)
def test_what_is_refused_changes_nothing(registry: Registry, peer: str, changes: dict[str, Any], told: str) -> None:
    registry.joined()
    assert registry.join("c2", peer, **changes).startswith(told)
    assert registry.names() == [*TABLE, "d"]
    registry.registrar.on_closed("c2")
    assert registry.names() == [*TABLE, "d"]


def test_the_port_of_a_dead_registration_can_be_taken(registry: Registry) -> None:
    registry.lose(registry.joined())
    assert registry.join("c2", "e@2") == ""


def test_the_next_life_at_the_same_place_takes_the_registration_over(registry: Registry) -> None:
    instance = registry.joined()
    instance.service = "out"
    assert registry.join("c2", "d@2") == ""
    registry.registrar.on_closed("c1")
    registry.lose(instance)
    assert registry.is_listed(), "the new connection must be the lease"
    assert registry.world["d"] is instance
    assert instance.service == "out", "the operator's role must stay"


def test_a_lapsed_worker_stays_while_the_scheduler_is_connected_to_it_and_may_register_again(
    registry: Registry,
) -> None:
    instance = registry.joined()
    registry.registrar.on_closed("c1")
    assert registry.is_listed()
    assert registry.join("c2") == ""
    registry.lose(instance)
    assert registry.is_listed()
    registry.registrar.on_closed("c2")
    instance.state = "connecting"
    assert registry.is_listed()
    instance.state = "unreachable"
    assert not registry.is_listed()
    assert registry.answers() == [("c1", ""), ("c2", "")]


def test_another_process_that_says_the_same_takes_no_lease_away(registry: Registry) -> None:
    """The worker stays registered when an impostor leaves, and is notified when its registration ends."""
    instance = registry.joined()
    assert registry.join("c2", "d@2") == ""
    registry.registrar.on_message("c2", "d@2", wire.Leave())
    registry.lose(instance)
    assert registry.is_listed()
    registry.world.membership.forget(instance)
    assert not registry.is_listed()
    assert registry.answers()[-1] == ("c1", "an operator has removed d")


def test_the_number_of_registrations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrar_module, "MOST_REGISTRATIONS", 2)
    registry = Registry()
    assert [registry.join(f"c{name}", f"{name}@1", port=8000 + ord(name)) for name in "ab"] == ["", ""]
    assert registry.join("cc", "c@1", port=8003).startswith("2 workers are registered")
    assert registry.join("c4", "b@1", port=8000 + ord("b")) == "", "a registered worker may register again"
    registry.registrar.on_closed("ca")
    assert registry.names() == [*TABLE, "b"]
    assert registry.join("cc", "c@1", port=8003) == ""


def test_leave_ends_the_lease_and_is_answered(registry: Registry) -> None:
    registry.lose(registry.joined())
    registry.registrar.on_message("c1", "d@1", wire.Leave())
    assert registry.answers()[-1] == ("c1", "d has left")
    assert not registry.is_listed()


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_worker_that_is_not_reached_in_time(registry: Registry, has_answered: bool) -> None:
    """A worker that has answered before may be unreachable for longer than a new one."""
    if has_answered:
        registry.lose(registry.joined())
    else:
        assert registry.join() == ""
        registry.world["d"].reason = "no process answers at 192.0.2.7:8000"
    registry.now_s = REACH_S
    assert registry.is_listed()
    registry.now_s = REACH_S + 0.1
    assert registry.is_listed() == has_answered
    if not has_answered:
        assert registry.answers()[-1][1].startswith(
            "the scheduler cannot reach it: no process answers at 192.0.2.7:8000;"
        )
        assert registry.join("c2") == "", "the worker may retry"


def test_a_worker_that_the_scheduler_finds_failed_is_told_why(registry: Registry) -> None:
    instance = registry.joined()
    registry.lose(instance)
    instance.info, instance.state = info_of(instance, state="failed"), "failed"
    assert registry.is_listed(), "a worker that fails reports its own reason"
    assert registry.answers() == [("c1", "")]
    instance.info = info_of(instance)
    fails(instance, "it serves another model")
    assert not registry.is_listed()
    assert registry.answers()[-1] == ("c1", "it serves another model")


@pytest.mark.parametrize("is_admitted", [False, True])
def test_a_node_that_the_connecting_mailbox_does_not_know_yet_has_time(registry: Registry, is_admitted: bool) -> None:
    """The join port reads the node list separately, up to a second earlier than the mailbox."""
    assert registry.join() == ""
    instance = registry.world["d"]
    instance.info = info_of(instance)
    fails(instance, f"{NODE_REFUSED}node n is not trusted")
    registry.now_s = REACH_S
    assert registry.is_listed()
    if is_admitted:
        registry.world.make_ready(instance)
        registry.now_s += 1000.0
        assert registry.is_listed()
        registry.lose(instance)
        fails(instance, f"{NODE_REFUSED}key 1f of node n was revoked")
    registry.now_s += 0.1
    assert not registry.is_listed()
    assert registry.answers()[-1] == ("c1", instance.reason)


async def test_another_process_at_the_address_is_recognized(registry: Registry) -> None:
    instance = registry.joined()
    for told, changes in (("", {"server_ip": "192.0.2.9"}), ("e answers at 192.0.2.7:8000; give", {"name": "e"})):
        info = info_of(instance, device_ids=["7"], public_key=bytes(wire.KEY_NBYTES), **changes)
        answer = httpx.Response(200, stream=httpx.ByteStream(msgspec.json.encode(info)))
        async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _, found=answer: found)) as client:
            await registry.world.membership.ask(instance, client)
        assert instance.state == ("failed" if told else "connecting")
        assert instance.reason.startswith(told)
        assert told or not instance.reason


async def test_an_operator_removes_it_and_it_may_register_again(registry: Registry) -> None:
    instance = registry.joined()
    instance.num_outstanding = 1
    registry.world.elastic.remove("d", force=True)
    assert registry.join("c2", "d@2").startswith("d is leaving by an operator's command")
    registry.world.elastic.tick()
    assert registry.is_listed(), "the instance is not empty yet"
    instance.num_outstanding = 0
    registry.world.elastic.tick()
    assert not registry.is_listed()
    assert registry.answers()[-1] == ("c1", "an operator has removed d")
    assert registry.join("c3", "d@3") == ""


async def test_the_table_decides_about_its_own_entries_only(registry: Registry) -> None:
    assert registry.join(host="127.0.0.1", device_ids=["10"]) == "", "it may name prefill-0's devices"
    assert await registry.world.elastic.reload() == "joining: none; leaving: none"
    registry.world.place = replace(registry.world.place, table=ElasticWorld(1, 0).place.table)
    assert await registry.world.elastic.reload() == "joining: none; leaving: decode-0"
    assert "d" in registry.names()
    with pytest.raises(InstanceNotFound, match="has no d; it has prefill-0"):
        await registry.world.elastic.add("d", 8000)
