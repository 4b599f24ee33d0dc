"""A scheduler with simulated instances: real membership, router, commands and roles, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Literal

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members.elastic_membership import ElasticMembership
from pd_cluster.cluster.members.rank_table_place import Place
from pd_cluster.cluster.members.rank_table_reader import RankTableFiles
from pd_cluster.cluster.members.worker_membership import Membership
from pd_cluster.cluster.roles.auto_role import RoleChooser
from pd_cluster.cluster.roles.role_costs import RoleGoals
from pd_cluster.cluster.roles.roles_by_cost import role_chooser
from pd_cluster.cluster.routing.router import Router
from pd_cluster.errors import ConfigError, InstanceNotFound, Refused
from pd_cluster.net.peer_admission import peer_key
from pd_cluster.process_messages import Busy, Stats
from pd_cluster.service.serving_context import LoopHandler, routing_rules
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.simulate.event_agenda import Agenda
from pd_cluster.simulate.event_script import ScriptLine
from pd_cluster.simulate.instance_assembly import MODEL, Assembly
from pd_cluster.simulate.shared_host import SharedHost
from pd_cluster.simulate.simulated_instance import SimulatedInstance, SimulationContext
from pd_cluster.simulate.simulated_lanes import Cables
from pd_cluster.simulate.simulated_layout import SimulatedLayout
from pd_cluster.simulate.simulated_mailboxes import SimulatedMailboxes, SimulatedPost
from pd_cluster.simulate.simulation_records import Notes
from pd_cluster.simulate.virtual_time_loop import VirtualTimeLoop
from pd_cluster.types import Role
from ranktable_tools import generate

LINKED_WITHIN_S = 60.0


class SimulatedScheduler(LoopHandler):
    """Implements SimulatedPeer. Handles its messages one after another on the event loop."""

    peer = peer_key("scheduler", 1)
    kind: Literal["scheduler"] = "scheduler"

    def _call(self, function: Callable[..., object], *args: object) -> None:
        function(*args)


class SimulatedCluster:
    """The simulated cluster. Must be created inside its event loop. `events`: events of instances, with their times."""

    def __init__(self, layout: SimulatedLayout, assembly: Assembly) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        costs = assembly.costs
        self.layout, self.assembly = layout, assembly
        self.agenda = Agenda(loop)
        self.mail, self.notes = SimulatedMailboxes(self.agenda, costs.host), Notes()
        self.cables = Cables(self.agenda, costs.handover, costs.kv_token_nbytes)
        host = SharedHost(costs.neighbour) if layout.are_neighbours else None
        self.around = SimulationContext(self.agenda, self.mail, self.notes, host)
        self.lives: dict[str, SimulatedInstance] = {}  # name -> the instance that runs under it
        self.events: list[tuple[float, str]] = []
        self._epochs: dict[str, int] = {}
        self._slowdowns: dict[str, float] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        timeouts, post = Timeouts(), SimulatedPost(self.mail, SimulatedScheduler.peer)
        credentials = Credentials(b"")
        self.membership = Membership(place_of(), self._instances(), post, timeouts, MODEL)
        self.router = Router(post.send, self.membership, routing_rules(layout.routing, timeouts), loop.time)
        tables = RankTableFiles(place_of, lambda place: None, lambda place: credentials)
        drain_s, move_on = timeouts.drain_timeout_s, self.router.move_on
        self.elastic = ElasticMembership(self.membership, credentials, tables, move_on, drain_s, loop.time)
        self.mail.add(SimulatedScheduler(loop, self.membership, self.router))

    def _instances(self) -> list[Instance]:
        layout = self.layout
        names: list[tuple[str, Role]] = [(f"prefill-{at}", "prefill") for at in range(layout.num_prefill)]
        names += [(f"decode-{at}", "decode") for at in range(layout.num_decode + layout.num_hybrid)]
        return [self._instance(name, role, at) for at, (name, role) in enumerate(names)]

    def _instance(self, name: str, role: Role, at: int) -> Instance:
        at = 0 if self.layout.are_neighbours else at
        return Instance(name, role, f"10.{at >> 16 & 255}.{at >> 8 & 255}.{at & 255}", 1, [str(at)])

    # ---- beginning and end

    async def begin(self) -> None:
        """Starts all instances at once. Returns when their links are up."""
        self.membership.term = lambda: None  # so that the list of peers is sent only once, not at each arrival
        for instance in self.membership.instances:
            self.start_instance(instance)
        async with asyncio.timeout(LINKED_WITHIN_S):
            while not all(each.is_ready for each in self.membership.instances):
                await self.membership.change()
            self.membership.term = lambda: 0
            self.membership.send_peers()
            while not self._is_linked:
                await self.membership.change()
        self._tasks.append(asyncio.ensure_future(self.elastic.run()))
        goals, drain_s = RoleGoals(), Timeouts().drain_timeout_s
        if (chooser := role_chooser(self.layout.auto_role, self._figures, goals, drain_s)) is not None:
            self._tasks.append(asyncio.ensure_future(self._change_roles(chooser)))

    @property
    def _is_linked(self) -> bool:
        instances = self.membership.instances
        prefills, decodes = ([each for each in instances if each.role == role] for role in ("prefill", "decode"))
        return all(sum(link.is_up for link in each.load.links.values()) >= len(decodes) for each in prefills)

    def start_instance(self, instance: Instance) -> None:
        """Starts a life of an instance. The scheduler connects to it."""
        epoch = self._epochs[instance.name] = self._epochs.get(instance.name, 0) + 1
        info = self.assembly.info(instance.name, instance.role, epoch)
        slowdown = self._slowdowns.get(instance.name, 1.0)
        self.lives[instance.name] = self.assembly.build(info, self.around, self.cables, slowdown)
        instance.info = info
        self.membership.connect(instance, info)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _figures(self) -> tuple[Stats, Busy]:
        router = self.router
        return router.stats.snapshot(), Busy(0, router.num_streams, router.admission.num_waiting)

    async def _change_roles(self, auto_role: RoleChooser) -> None:
        while True:
            await asyncio.sleep(auto_role.period_s)
            flip = auto_role.observe(asyncio.get_running_loop().time(), self.elastic.instances)
            if flip is not None:
                self._note(f"{flip.name} becomes {flip.role}: {flip.why}")
                with contextlib.suppress(Refused):
                    self.elastic.change_role(flip.name, flip.role)

    # ---- events of a script

    def happens(self, line: ScriptLine) -> None:
        """Executes a line of the script. Raises ConfigError if its instance does not run, or joins although it runs."""
        name = line.instance
        try:
            match line.what:
                case "kill":
                    self._kill(name)
                case "join":
                    self._join(name, line.role)
                case "drain":
                    self.elastic.drain(name, force=True)
                case "undrain":
                    self.elastic.undrain(name)
                case "remove":
                    self.elastic.remove(name, force=True)
                case "role":
                    assert line.role is not None
                    self.elastic.change_role(name, line.role, force=True)
                case "speed":
                    self._slow(name, line.slowdown)
        except (InstanceNotFound, Refused) as error:
            raise ConfigError(f"script: at_s {line.at_s:g}: {error}") from None
        self._note(f"{name}: {line.what}")

    def _note(self, what: str) -> None:
        self.events.append((self.agenda.now(), what))

    def _living(self, name: str) -> SimulatedInstance:
        if (life := self.lives.get(name)) is None:
            raise InstanceNotFound(f"instance: {name} is not running", "instance")
        return life

    def _kill(self, name: str) -> None:
        self._living(name).die()
        del self.lives[name]

    def _join(self, name: str, role: Role | None) -> None:
        if name in self.lives:
            raise Refused(f"instance: {name} is already running")
        known = next((each for each in self.membership.instances if each.name == name), None)
        if known is None:
            given: Role = "prefill" if name.startswith("prefill") else "decode"
            known = self._instance(name, role or given, len(self._epochs))
            self.membership.join(known)
        self.start_instance(known)

    def _slow(self, name: str, slowdown: float) -> None:
        self._slowdowns[name] = slowdown
        self._living(name).set_speed(slowdown)


def place_of() -> Place:
    """Returns the scheduler's entry in a minimal rank table. The simulated instances are not in the table."""
    made = generate(
        prefill=[[0]], decode=[[1]], api_server=True, server_ip="127.0.0.1", device_kind="cpu", device_ips=None
    )
    assert made.global_table.scheduler is not None
    return Place("scheduler", 0, made.global_table.scheduler, made.global_table)
