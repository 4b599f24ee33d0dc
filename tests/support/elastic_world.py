"""An operator's commands on a real membership and router, with a recording mailbox and without files."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members.elastic_membership import ElasticMembership
from pd_cluster.cluster.members.rank_table_place import Place
from pd_cluster.cluster.members.rank_table_reader import RankTableFiles
from pd_cluster.cluster.members.worker_membership import Membership, instances_of
from pd_cluster.cluster.placement.routing_policy import least_loaded
from pd_cluster.cluster.placement.routing_rules import RoutingRules
from pd_cluster.cluster.routing.router import Router
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import LinkState
from ranktable_tools import generate
from tests.support.mail import RecordedMail
from tests.support.router_world import info_of


def place_of(num_prefill: int = 2, num_decode: int = 2) -> Place:
    """Returns the scheduler's place in a rank table of this many single-device instances, without any file."""
    slots = [[10 + at] for at in range(num_prefill)], [[20 + at] for at in range(num_decode)]
    generated = generate(
        prefill=slots[0], decode=slots[1], api_server=True, server_ip="127.0.0.1", device_kind="cpu", device_ips=None
    )
    table = generated.global_table
    assert table.scheduler is not None
    return Place("scheduler", 0, table.scheduler, table)


class ElasticWorld:
    """A real membership and router with ready instances, and the operator's commands; the clock does not advance."""

    def __init__(self, num_prefill: int = 2, num_decode: int = 2) -> None:
        self.now_s = 0.0
        self.mailbox = RecordedMail()
        place = place_of(num_prefill, num_decode)
        instances = instances_of(place, list(range(1, num_prefill + num_decode + 1)))
        self.membership = Membership(place, instances, self.mailbox, Timeouts(), "model")
        self.router = Router(self.mailbox.send, self.membership, RoutingRules(least_loaded))
        self.place, self.ports = place, list[int]()
        self.read_place: Callable[[], Place] = lambda: self.place
        self.credentials = credentials = Credentials(b"s" * 32)
        tables = RankTableFiles(
            lambda: self.read_place(), lambda place: self.ports or None, lambda place: self.credentials
        )
        self.elastic = ElasticMembership(
            self.membership, credentials, tables, self.router.move_on, 30.0, lambda: self.now_s
        )
        for instance in instances:
            self.make_ready(instance)
        self.link()

    def __getitem__(self, name: str) -> Instance:
        return next(each for each in self.membership.instances if each.name == name)

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.membership.instances]

    def make_ready(self, instance: Instance) -> None:
        """Connects the instance, without the messages that usually follow when a connection opens."""
        self.membership.connect(instance, info_of(instance.name, instance.role))
        instance.state = "ready"

    def link(self) -> None:
        """Links every prefill to every decode instance, by their current roles."""
        instances = self.membership.instances
        links = {each.key: LinkState("up", ("shm",)) for each in instances if each.role == "decode"}
        for each in instances:
            each.load = msgspec.structs.replace(each.load, links=links if each.role == "prefill" else {})

    def told(self) -> dict[str, dict[str, str]]:
        """Returns the last `Peers` that each instance received: instance -> {peer: role}."""
        return {
            conn.removeprefix("to-"): {p.name: p.role for p in body.peers} for conn, body in self.mailbox.of(wire.Peers)
        }


def busy(instance: Instance, num_running: int = 1) -> None:
    instance.num_outstanding = num_running
    instance.load = msgspec.structs.replace(instance.load, num_running=num_running, num_held_blocks=num_running)


def idle(instance: Instance) -> None:
    busy(instance, 0)
