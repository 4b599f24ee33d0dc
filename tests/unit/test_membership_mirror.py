"""An API process's view of the cluster, from the scheduler's reports and its own connections."""

from __future__ import annotations

import asyncio
import random
import socket
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members.membership_mirror import MembershipMirror
from pd_cluster.cluster.processes.api_processes import ApiProcesses, view_of
from pd_cluster.process_messages import (
    ApiReport,
    Instances,
    InstanceView,
    MoveOn,
    OthersTokens,
    Outstanding,
    ToApi,
)
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.log_setup import Logs
from pd_cluster.settings.process_configs import ApiConfig, ApiProcessConfig, Credentials
from pd_cluster.settings.routing_settings import RoutingConfig
from pd_cluster.settings.timeouts import Timeouts
from tests.support.mail import RecordedMail
from tests.support.router_world import info_of


class World:
    def __init__(self) -> None:
        self.mailbox = RecordedMail(is_numbered=True)
        self.lost: list[str] = []
        self.moved: list[str] = []
        self.mirror = MembershipMirror(self.mailbox)
        self.mirror.watch(self)

    def on_lost(self, instance: Instance, reason: str) -> None:
        self.lost.append(instance.name)

    def move_on(self, instance: Instance, why: str) -> None:
        self.moved.append(instance.name)

    def hear(self, *views: InstanceView) -> None:
        """Receives a report as over the socket."""
        news = msgspec.json.decode(msgspec.json.encode(Instances(list(views))), type=ToApi)
        self.mirror.apply(news)

    def open(self, *views: InstanceView) -> Instance:
        """Reports instances and connects to them; returns the first."""
        self.hear(*views)
        for instance in self.mirror.instances:
            self.mirror.on_opened(instance.conn)
        return self.mirror.instances[0]

    def states(self) -> dict[str, str]:
        return {instance.name: instance.shown_state for instance in self.mirror.instances}

    def lives(self) -> list[tuple[str, int]]:
        """Returns (name, epoch) of every process to which a connection was opened."""
        return [(name, epoch) for name, epoch, *_ in self.mailbox.opened]

    def conn(self, name: str) -> str:
        return next(instance.conn for instance in self.mirror.instances if instance.name == name)


def view(name: str, epoch: int = 1, state: Any = "ready", **more: Any) -> InstanceView:
    role: Any = more.pop("role", name.partition("-")[0])
    info = info_of(name, role, epoch=epoch, control_port=5)
    return InstanceView(
        name=name, role=role, host="127.0.0.1", port=1, device_ids=["0"], state=state, info=info, **more
    )


async def test_ready_is_who_is_ready_for_the_scheduler_and_connected_here() -> None:
    world = World()
    world.hear(view("prefill-0"), view("decode-0", state="loading"))
    assert world.states() == {"prefill-0": "connecting", "decode-0": "loading"}
    world.hear(view("prefill-0"), view("decode-0", state="forming"))
    assert world.states() == {"prefill-0": "connecting", "decode-0": "forming"}
    assert world.lives() == [("prefill-0", 1)]
    world.mirror.on_opened(world.conn("prefill-0"))
    world.hear(view("prefill-0"), view("decode-0"))
    assert world.states() == {"prefill-0": "ready", "decode-0": "connecting"}
    world.hear(view("prefill-0", state="unreachable", reason="x"), view("decode-0"))
    assert world.states()["prefill-0"] == "unreachable"
    world.hear(view("prefill-0"), view("decode-0"))
    assert world.states()["prefill-0"] == "ready", "only the scheduler's connection failed"
    assert world.lives() == [("prefill-0", 1), ("decode-0", 1)]
    assert world.lost == []


@pytest.mark.parametrize(("is_draining", "said"), [(True, "it stopped as announced: cut"), (False, "cut")])
async def test_a_lost_connection_is_tried_again_while_the_scheduler_sees_the_instance(
    is_draining: bool, said: str
) -> None:
    """An instance that drained before its end is not reported as dead."""
    world = World()
    instance = world.open(view("decode-0"))
    world.mirror.on_heartbeat(instance.conn, wire.Load(is_draining=is_draining))
    world.mirror.on_closed(instance.conn, "cut")
    assert (instance.state, instance.reason, world.lost) == ("unreachable", said, ["decode-0"])
    world.hear(view("decode-0"))
    assert world.lives() == [("decode-0", 1)] * 2


async def test_what_ran_before_a_connection_was_lost_makes_no_room_after_it() -> None:
    world = World()
    instance = world.open(view("decode-0"))
    instance.num_sequences = 50
    world.mirror.on_heartbeat(instance.conn, wire.Load(num_running=50))
    world.mirror.on_closed(instance.conn, "cut")
    instance.num_sequences = 0  # as the router does after the loss
    world.open(view("decode-0"))
    instance.num_sequences += 8
    assert instance.num_current_sequences == 8


@pytest.mark.parametrize("then", ["closed", "new life", "gone"])
async def test_requests_are_told_of_a_loss_whoever_sees_it_first(then: str) -> None:
    """Covers an instance that the scheduler reports as unreachable while the local connection seems open."""
    world = World()
    conn = world.open(view("decode-0")).conn
    world.hear(view("decode-0", state="unreachable"))
    assert world.lost == []
    if then == "closed":
        world.mirror.on_closed(conn, "nothing heard for 3 s")
    else:
        world.hear(*([view("decode-0", epoch=2)] if then == "new life" else []))
    assert world.lost == ["decode-0"]


async def test_a_new_life_ends_the_old_one() -> None:
    world = World()
    old = world.open(view("decode-0")).conn
    instance = world.open(view("decode-0", epoch=2))
    assert (world.lost, world.mailbox.closed) == (["decode-0"], [old])
    assert world.lives()[-1] == ("decode-0", 2)
    assert (instance.shown_state, instance.epoch) == ("ready", 2)


async def test_who_leaves_is_lost_and_roles_and_service_are_the_schedulers_word() -> None:
    world = World()
    world.open(view("prefill-0"), view("decode-0"))
    world.hear(view("prefill-0", role="decode", service="out"))
    (left,) = world.mirror.instances
    assert (left.name, left.role, left.takes_requests) == ("prefill-0", "decode", False)
    assert world.lost == ["decode-0"]
    world.mirror.apply(MoveOn("prefill-0", "its drain is over"))
    world.mirror.apply(OthersTokens({"prefill-0": 30}))
    assert (world.moved, left.others_tokens) == (["prefill-0"], 30)


async def test_after_any_story_it_knows_what_the_scheduler_knows() -> None:
    """After random restarts and reconnections, once all is quiet, the same instances are ready as at the scheduler."""
    for seed in range(20):
        rng, world = random.Random(seed), World()
        epochs = dict.fromkeys(("prefill-0", "prefill-1", "decode-0"), 1)
        for _ in range(60):
            epochs[rng.choice(list(epochs))] += rng.random() < 0.3
            world.hear(*(view(n, e, rng.choice(["ready", "ready", "loading"])) for n, e in epochs.items()))
            for conn in [i.conn for i in world.mirror.instances if i.conn and rng.random() < 0.5]:
                if rng.random() < 0.5:
                    world.mirror.on_opened(conn)
                else:
                    world.mirror.on_closed(conn, "cut")
        for _ in range(3):
            world.open(*(view(n, e) for n, e in epochs.items()))
        ready = {name: ("ready", epoch) for name, epoch in epochs.items()}
        assert {i.name: (i.state, i.epoch) for i in world.mirror.instances} == ready, seed


# ---- the scheduler's side


def test_what_processes_report_is_added_up_and_told_to_the_others() -> None:
    instances = [Instance(name, "decode", "127.0.0.1", 1, ["0"]) for name in ("decode-0", "decode-1")]
    listeners = [cast(socket.socket, None)] * 3
    processes = ApiProcesses([config(index) for index in range(3)], listeners, instances, 1.0)
    told: list[dict[str, int]] = []

    def write(line: bytes) -> None:
        news = msgspec.json.decode(line, type=ToApi)
        assert isinstance(news, OthersTokens)
        told.append(news.tokens)

    for api in processes.apis:
        api.writer = cast(asyncio.StreamWriter, SimpleNamespace(is_closing=lambda: False, write=write))
    first, second, _ = processes.apis
    processes.add_report(first, ApiReport({"decode-0": Outstanding(2, 100)}))
    processes.add_report(second, ApiReport({"decode-0": Outstanding(1, 7), "decode-1": Outstanding(1, 5)}))
    assert [(i.num_outstanding, i.outstanding_tokens) for i in instances] == [(3, 107), (1, 5)]
    processes.share_reports()
    assert told == [{"decode-0": a, "decode-1": b} for a, b in ((7, 5), (100, 0), (107, 5))]
    processes.add_report(first, ApiReport({}))  # as when the process has died
    assert [(i.num_outstanding, i.outstanding_tokens) for i in instances] == [(1, 7), (1, 5)]


def config(index: int) -> ApiProcessConfig:
    engine, timeouts = EngineConfig(model="m"), Timeouts()
    api = ApiConfig(
        engine=engine, served_model_names=[], is_openai=True, timeouts=timeouts, routing=RoutingConfig(), max_logprobs=5
    )
    made = ApiProcessConfig(
        index=index, api=api, credentials=Credentials(b"s" * 32), listener_fd=1, admin_fd=2, logs=Logs()
    )
    assert msgspec.json.decode(msgspec.json.encode(made), type=ApiProcessConfig) == made
    return made


def test_a_view_says_all_that_routing_reads() -> None:
    instance = Instance("decode-0", "prefill", "h", 9, ["4"], state="failed", reason="r", service="out")
    instance.next_role = "decode"
    instance.load = wire.Load(num_running=3)
    seen = view_of(instance)
    assert (seen.name, seen.role, seen.state, seen.reason) == ("decode-0", "prefill", "failed", "r")
    assert (seen.service, seen.next_role, seen.host, seen.port) == ("out", "decode", "h", 9)
