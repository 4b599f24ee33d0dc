"""Tracks the workers: asks each one's `/instance`, connects, notices restarts, and sends each the list of its peers.

The rank table and NODE_PORTS, or a worker's registration, determine the workers' addresses; a worker's own description
is only compared with them. If a worker answers at another worker's address, NODE_PORTS is wrong; the worker's devices
reveal this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import httpx

from pd_cluster import wire
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.roster import Roster, RosterMailbox
from pd_cluster.cluster.instances.unit_members import describe_awaited, unit_clash
from pd_cluster.cluster.members.rank_table_place import Place, digest_of, resolve_host
from pd_cluster.cluster.members.weight_sources import SourceMailbox, WeightSources
from pd_cluster.cluster.members.worker_description import fetch_description
from pd_cluster.errors import ConfigError, told
from pd_cluster.net.connection_handshake import REFUSALS
from pd_cluster.net.map_deltas import PeersSender
from pd_cluster.net.node_trust import NODE_REFUSED
from pd_cluster.process_messages import InstanceInfo, InstanceState
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import Role
from ranktable_tools import Server
from ranktable_tools.host_addresses import bracketed, host_key, is_ip

log = logging.getLogger(__name__)

POLL_S = 0.1
LOADING_S = 0.5  # how long a loading instance may delay its answer while it loads
SLOW_POLL_S = 2.0
FAREWELL_S = 1.0  # the time from the last message to an instance until its connection is closed


def instances_of(place: Place, ports: Sequence[int]) -> list[Instance]:
    """Returns the global table's workers, in the order of NODE_PORTS. A host that cannot be resolved keeps its name for
    now.
    """
    num_prefill = len(place.table.prefill)
    return [
        Instance(name, _role(at < num_prefill), _address(server.server_ip), port, _ids(server))
        for at, (name, server, port) in enumerate(zip(place.names, place.table.instances, ports, strict=True))
    ]


class MembershipMailbox(RosterMailbox, Protocol):
    """The part of the mailbox that a membership needs."""

    table: bytes

    def send(self, conn: str, body: wire.Body) -> None: ...


class WorkersMailbox(MembershipMailbox, SourceMailbox, Protocol):
    """The part that a membership of workers needs."""


class Membership(Roster):
    def __init__(
        self,
        place: Place,
        instances: list[Instance],
        mailbox: WorkersMailbox,
        timeouts: Timeouts,
        model_identity: str,
        hf_overrides: str = "{}",
    ) -> None:
        """`model_identity` and `hf_overrides` describe the model that every worker must serve."""
        super().__init__(instances, mailbox)
        self._mailbox = mailbox
        self.place = place
        self._hosts = place.hosts  # includes those of leaving instances
        self._timeouts = timeouts
        self._model_identity, self._hf_overrides = model_identity, hf_overrides
        self._swapped: set[str] = set()  # instances at whose address another worker of the table last answered
        self._joined: set[str] = set()  # added at run time
        # name of an instance whose node is not admitted -> time until which it is not asked
        self._paused_until: dict[str, float] = {}
        self._orders = PeersSender()
        self._refused: dict[str, tuple[int, str]] = {}  # name -> (epoch of a life with other keys, the reason)
        # the term of this scheduler's orders; None: another scheduler gives orders
        self.term: Callable[[], int | None] = lambda: 0
        # called when a worker refuses an order, with the term that it knows
        self.refused: Callable[[int], None] = lambda term: None
        # whether the list has room for another instance
        self.has_capacity: Callable[[Instance], bool] = lambda instance: True
        # the adapters that every worker must have; None: those it started with
        self.adapters: wire.WantedAdapters | None = None
        self.weights = wire.WeightVersion()  # the version that every worker shall have
        self.weight_sources = WeightSources(mailbox, self.instances)
        self._changing: set[str] = set()  # open connections to workers that have another version
        self._loading: set[str] = set()  # open connections to workers that do not have all adapters yet
        self._forming: dict[str, float] = {}  # open connection -> when its worker began to wait for its unit
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._watch_too: Callable[[Instance], asyncio.Task[None]] | None = None

    async def run(self) -> None:
        """Watches every worker until cancelled. Raises ConfigError if NODE_PORTS is certainly wrong."""
        client = httpx.AsyncClient(timeout=self._timeouts.connect_timeout_s, trust_env=False)
        async with client, asyncio.TaskGroup() as group:
            self._watch_too = lambda instance: group.create_task(self._watch(instance, client))
            self._watching = {instance.name: self._watch_too(instance) for instance in self.instances}
            await asyncio.Event().wait()  # further workers may join

    # ---- which workers are watched

    def accept(self, place: Place) -> None:
        """Replaces the table."""
        self.place = place
        self._mailbox.table = digest_of(place.table)
        self._hosts |= place.hosts

    @property
    def table_digest(self) -> bytes:
        return digest_of(self.place.table)

    def host_of(self, instance: Instance) -> str:
        """Returns the instance's host as the table gives it, which may be a name."""
        return self._hosts.get(instance.name, instance.host)

    def join(self, instance: Instance) -> None:
        """Adds a worker; the list keeps the table's order, followed by registered workers."""
        self._hosts.setdefault(instance.name, instance.host)
        self.instances.append(instance)
        self.instances.sort(key=_order)
        self._joined.add(instance.name)
        log.info("%s joins, at port %s of %s", instance.name, instance.port or "unknown", instance.host)
        if self._watch_too is not None:
            self._watching[instance.name] = self._watch_too(instance)
        self.wake()

    def forget(self, instance: Instance) -> None:
        """Stops watching the worker, and removes it from its peers' lists."""
        self.instances.remove(instance)
        self._joined.discard(instance.name)
        self._refused.pop(instance.name, None)
        self._paused_until.pop(instance.name, None)
        self._hosts.pop(instance.name, None)
        if (task := self._watching.pop(instance.name, None)) is not None:
            task.cancel()
        conn, instance.conn = instance.conn, ""
        self._open.discard(conn)
        self._loading.discard(conn)
        self._changing.discard(conn)
        self._forming.pop(conn, None)
        self.weight_sources.closed(conn)
        if self._by_conn.pop(conn, None) is not None:
            if (term := self.term()) is not None:
                self._mailbox.send(conn, wire.Peers([], term))  # makes the worker close its links
            asyncio.get_running_loop().call_later(FAREWELL_S, self._mailbox.disconnect, conn)
        instance.state = "unreachable"
        self.send_peers()
        self.wake()

    # ---- watching

    async def _watch(self, instance: Instance, client: httpx.AsyncClient) -> None:
        while True:
            is_paused = asyncio.get_running_loop().time() < self._paused_until.get(instance.name, 0.0)
            # a forming instance is asked repeatedly
            if instance.state not in ("ready", "connecting") and not is_paused:
                await self.ask(instance, client)
            await asyncio.sleep(POLL_S if instance.state != "failed" else SLOW_POLL_S)

    async def ask(self, instance: Instance, client: httpx.AsyncClient) -> None:
        """Asks the worker for its description, and acts on it. A forming worker need not answer: its connection shows
        that it is alive.
        """
        self._swapped.discard(instance.name)
        found = await self._ask(instance, client)
        if isinstance(found, InstanceInfo):
            self._hear(instance, found)
        elif instance.conn not in self._forming:
            self.set_state(instance, *found)

    async def _ask(self, instance: Instance, client: httpx.AsyncClient) -> InstanceInfo | tuple[InstanceState, str]:
        """Returns the worker's description; without one, the resulting state and the reason."""
        if not instance.port:
            return "unreachable", f"its port is not known; pd-cluster instances add {instance.name} --port PORT"
        if reason := await self._find(instance):
            return "unreachable", reason
        address = f"{bracketed(instance.host)}:{instance.port}"
        try:
            async with asyncio.timeout(2 * self._timeouts.connect_timeout_s):
                return await fetch_description(client, f"http://{address}/instance", self._until(instance))
        except (httpx.HTTPError, TimeoutError):
            return "unreachable", f"no process answers at {address}"
        except (ValueError, RecursionError):
            return "failed", f"{address} does not answer as a worker of this version"

    def _hear(self, instance: Instance, info: InstanceInfo) -> None:
        is_same = info.epoch == instance.epoch
        instance.info = info
        reason = self._misplaced(instance, info)
        if reason:
            self._check_ports(instance, info, reason)
        reason = reason or self._problem(instance, info)
        stays = is_same and not reason and info.state in ("forming", "ready")
        if instance.conn in self._forming and not stays:
            self._mailbox.disconnect(instance.conn)
            why = reason or info.error if is_same else "another process has taken its place"
            self.on_closed(instance.conn, why)
        if reason:
            self.set_state(instance, "failed", reason)
        elif info.state not in ("forming", "ready"):
            self.set_state(instance, "loading" if info.state == "loading" else "failed", info.error)
        elif instance.conn not in self._forming:
            self.connect(instance, info)
        elif info.state == "ready":
            self._formed(instance)
        else:
            self._show_awaited(instance)

    def _until(self, instance: Instance) -> dict[str, str]:
        """Returns the query parameters with which a loading or forming instance delays its answer until that state
        ends.
        """
        if instance.state not in ("loading", "forming"):
            return {}
        return {"unless": instance.state, "for_s": str(min(LOADING_S, self._timeouts.connect_timeout_s / 2))}

    async def _find(self, instance: Instance) -> str:
        """Resolves the instance's host again, since a pod may return with another address. Returns why that failed, or
        "".
        """
        name = self._hosts.get(instance.name, instance.host)
        if not is_ip(name):
            try:
                instance.host = await asyncio.to_thread(resolve_host, name)
            except ConfigError as error:
                return str(error)
        return ""

    def _misplaced(self, instance: Instance, info: InstanceInfo) -> str:
        """Returns why the answering process does not match this entry of the table or registration; "" if it does."""
        if instance.is_registered:
            if info.name == instance.name:
                return ""
            return (
                f"{info.name} answers at {instance.host}:{instance.port}; give the --advertise-host and the --port "
                "at which the scheduler reaches this worker"
            )
        if info.device_ids == instance.device_ids and host_key(info.server_ip) == host_key(self._hosts[instance.name]):
            return ""
        here = f"{info.name} (devices {','.join(info.device_ids)} of {info.server_ip}) answers at port {instance.port}"
        its = f"the port of {instance.name} (devices {','.join(instance.device_ids)} of {instance.host})"
        if instance.name in self._joined:
            return f"{here}, which must be {its}; pd-cluster instances add {instance.name} --port PORT"
        ports = ",".join(str(i.port) for i in self._of_start)
        index = self._of_start.index(instance)
        return (
            f"NODE_PORTS={ports}: [{index}] must be {its}, but {here}; list the ports in the order of the global "
            f"rank table, prefill first"
        )

    @property
    def _of_start(self) -> list[Instance]:
        """Returns the instances that the table and NODE_PORTS listed at the start."""
        return [instance for instance in self.instances if instance.name not in self._joined]

    def _check_ports(self, instance: Instance, info: InstanceInfo, reason: str) -> None:
        """Raises ConfigError if NODE_PORTS is certainly wrong: every worker of the table answers at another's port.

        If an unknown process answers at a worker's port, only that instance fails, since the worker may have died.
        """
        of_start = self._of_start
        places = {(*each.device_ids, host_key(self._hosts[each.name])) for each in of_start}
        if instance in of_start and (*info.device_ids, host_key(info.server_ip)) in places:
            self._swapped.add(instance.name)
            if self._swapped.issuperset(each.name for each in of_start):
                raise ConfigError(reason)

    def _problem(self, instance: Instance, info: InstanceInfo) -> str:
        epoch, why = self._refused.get(instance.name, (0, ""))
        if why and epoch == info.epoch:
            return why
        has_loaded = info.state in ("forming", "ready")
        if has_loaded and len(info.public_key) != wire.KEY_NBYTES:
            return "it has no key, so its version is earlier; restart it with the scheduler's version"
        if info.name != instance.name:
            return f"its own global rank table names it {info.name}; restart it with the scheduler's table"
        reason = unit_clash(self.instances, instance, info) if has_loaded else ""
        if not reason and (info.state == "ready" or info.model_identity):
            reason = self.mismatch(info.model_identity, info.numerics.hf_overrides)
        return reason

    def mismatch(self, model_identity: str, hf_overrides: str) -> str:
        """Returns why a worker with this model cannot serve here; "" if it can."""
        if model_identity != self._model_identity:
            return (
                f"it serves another model ({model_identity[:12]}) than the scheduler "
                f"({self._model_identity[:12]}); start all with the same --model"
            )
        if hf_overrides != self._hf_overrides:
            return (
                f"it was started with --hf-overrides {hf_overrides}, the scheduler with {self._hf_overrides}; "
                f"start all with the same value"
            )
        return ""

    # ---- units

    def on_opened(self, conn: str) -> None:
        instance = self._by_conn.get(conn)
        if instance is not None and instance.info is not None and instance.info.state == "forming":
            self._forming[conn] = asyncio.get_running_loop().time()
            self._show_awaited(instance)
            self.send_peers()
        else:
            self._admit(conn)

    def _formed(self, instance: Instance) -> None:
        """Marks an instance ready on the connection on which it waited for its unit."""
        self._forming.pop(instance.conn, None)
        self._admit(instance.conn)

    def _show_awaited(self, instance: Instance) -> None:
        """Shows the members that the instance waits for, once it has waited for a long time."""
        waits_s = asyncio.get_running_loop().time() - self._forming[instance.conn]
        is_late = waits_s > self._timeouts.connect_timeout_s
        self.set_state(instance, "forming", describe_awaited(self.instances, instance) if is_late else "")

    # ---- adapters

    def _admit(self, conn: str) -> None:
        """Sends an instance its weights' version and adapters, and marks it ready once it has loaded them."""
        instance = self._by_conn.get(conn)
        if instance is not None and instance.load.weights.held != self.weights:
            self._mailbox.send(conn, wire.ChangeWeights(self.weights))
            if self._lacks_weights(instance):
                self._set_back(instance)
                return
        if instance is None or self.adapters is None:
            super().on_opened(conn)
            return
        self._mailbox.send(conn, self.adapters)
        if self.adapters.adapters:
            self._loading.add(conn)
            self.set_state(instance, "connecting", "it loads adapters")
        else:
            super().on_opened(conn)

    def on_adapter_states(self, conn: str, states: wire.AdapterStates) -> None:
        """Marks an instance ready once it has all adapters."""
        instance = self._by_conn.get(conn)
        if instance is None or self.adapters is None:
            return
        instance.adapters, instance.adapter_problems = frozenset(states.loaded), states.problems
        if conn in self._loading:
            lacking = [each.digest for each in self.adapters.adapters if each.digest not in instance.adapters]
            if not lacking:
                self._loading.discard(conn)
                if self._lacks_weights(instance):  # the weights have changed while it loaded adapters
                    self._set_back(instance)
                else:
                    super().on_opened(conn)
            elif reasons := [states.problems[each] for each in lacking if each in states.problems]:
                self.set_state(instance, "connecting", f"it cannot load an adapter: {reasons[0]}")
        self.wake()

    def send_adapters(self, adapters: wire.WantedAdapters) -> None:
        """Sends the list to every worker now, and to later ones when they connect."""
        self.adapters = adapters
        for conn in self._open | self._loading:
            self._mailbox.send(conn, adapters)

    # ---- weights

    def change_weights(self, version: wire.WeightVersion) -> None:
        """Sends the version to every worker now, and to later ones when they connect."""
        self.weights = version
        self.weight_sources.offer(version)
        for conn in self._open | self._loading | self._changing:
            self._mailbox.send(conn, wire.ChangeWeights(version))

    def offer_weights(self, version: wire.WeightVersion) -> None:
        """Lets workers request the files of a version that is being checked."""
        self.weight_sources.offer(self.weights, version)

    def on_weights_sought(self, conn: str, body: wire.SeekWeights | wire.WeightAddress) -> None:
        if (instance := self._by_conn.get(conn)) is None:
            return
        if isinstance(body, wire.SeekWeights):
            self.weight_sources.sought(conn, instance, body)
        else:
            self.weight_sources.addressed(conn, instance, body)

    def may_load_weights(self) -> list[Instance]:
        """Returns the instances that can check and load a version: ready ones, and those that do not have the current
        one yet.
        """
        return [each for each in self.instances if each.is_ready or each.conn in self._changing]

    def lacking_weights(self) -> list[Instance]:
        """Returns the ready instances that have another version."""
        return [each for each in self.instances if each.is_ready and each.load.weights.held != self.weights]

    def _lacks_weights(self, instance: Instance) -> bool:
        """Whether an instance must load the current version. One with a later version must not."""
        held, current = instance.load.weights.held, self.weights
        return held.epoch < current.epoch or (held.epoch == current.epoch and held.digest != current.digest)

    def set_back_lacking(self) -> None:
        """Makes late instances unready until they have the version."""
        for instance in self.lacking_weights():
            self._set_back(instance)
            self.send_peers()

    def _set_back(self, instance: Instance) -> None:
        self._changing.add(instance.conn)
        self.set_state(instance, "connecting", f"it loads weights {self.weights.name}")

    def on_heartbeat(self, conn: str, load: wire.Load) -> None:
        super().on_heartbeat(conn, load)
        if (instance := self._by_conn.get(conn)) is None:
            return
        held, problem = load.weights.held, load.weights.lacks
        if held.epoch > self.weights.epoch:  # this scheduler has restarted
            log.warning("%s has weights %s; all other workers must load them", conn, held.name)
            self.change_weights(held)
            self.set_back_lacking()
        if conn in self._changing and not self._lacks_weights(instance):
            self._changing.discard(conn)
            self._admit(conn)
        elif conn in self._changing and problem:
            why = f"it cannot load weights {self.weights.name}, and tries again: {told(problem)}"
            self.set_state(instance, "connecting", why)
        elif problem and held == self.weights:  # it still looks for a version that an earlier scheduler requested
            self._mailbox.send(conn, wire.ChangeWeights(held))

    # ---- peers

    def on_closed(self, conn: str, reason: str) -> None:
        instance = self._by_conn.get(conn)
        was_named_early = instance is not None and self._is_named_early(instance)
        self._loading.discard(conn)
        self._changing.discard(conn)
        self._forming.pop(conn, None)
        self.weight_sources.closed(conn)
        super().on_closed(conn, reason)
        if was_named_early:
            self.send_peers()

    def _state_after(self, instance: Instance, reason: str) -> tuple[InstanceState, str]:
        """Returns the new state. Keys do not change while both processes live, so a life refused for its key is not
        tried again. The lists of nodes may change, so a life refused for its node is retried, at longer intervals.
        """
        if reason.startswith(NODE_REFUSED):
            self._paused_until[instance.name] = asyncio.get_running_loop().time() + SLOW_POLL_S
            return "failed", reason
        if reason not in REFUSALS:
            return super()._state_after(instance, reason)
        why = (
            f"it was started with another cluster.secret than the scheduler ({reason}); give every process the same "
            f"file, or with --derive-secret the same global rank table"
        )
        self._refused[instance.name] = instance.epoch, why
        return "failed", why

    def _on_ready(self, instance: Instance) -> None:
        self.send_peers()

    def _on_unready(self, instance: Instance) -> None:
        self.send_peers()

    def send_peers(self) -> None:
        """Sends changes of the list of instances to its members, if this scheduler owns membership."""
        if (term := self.term()) is None:
            return
        named = [each for each in self.instances if each.is_ready or self._is_named_early(each)]
        peers, conns = [instance.to_peer() for instance in named], [instance.conn for instance in named]
        for conn, order in self._orders.next(peers, term, conns).items():
            self._mailbox.send(conn, order)

    def _is_named_early(self, instance: Instance) -> bool:
        """Whether orders name the instance to its peers before it can serve, because its unit needs that."""
        return instance.conn in self._forming or (bool(instance.unit) and instance.conn in self._loading)

    def on_stale_order(self, conn: str, term: int) -> None:
        instance = self._by_conn.get(conn)
        name = instance.name if instance else "a worker"
        if self.term() == 0:
            log.error(
                "%s refuses an order: it has followed schedulers with --scheduler-lease (term %d), and this "
                "scheduler has no lease; restart the workers, or this scheduler with --scheduler-lease",
                name,
                term,
            )
        else:
            log.warning("%s refuses an order: it already follows the later term %d", name, term)
        self.refused(term)


def _address(host: str) -> str:
    """Returns the numeric address, or the name while it cannot be resolved."""
    try:
        return resolve_host(host)
    except ConfigError:
        return host


def _role(is_prefill: bool) -> Role:
    return "prefill" if is_prefill else "decode"


def _order(instance: Instance) -> tuple[bool, bool, int, str]:
    """Returns the sort key of the table's order, prefill first; registered workers follow by name."""
    if instance.is_registered:
        return True, True, 0, instance.name
    role, _, index = instance.name.rpartition("-")
    return False, role != "prefill", int(index), ""


def _ids(server: Server) -> list[str]:
    return [device.device_id for device in server.device]


def membership_of(
    place: Place, ports: Sequence[int], timeouts: Timeouts, mailbox: WorkersMailbox, checkpoint: Checkpoint
) -> Membership:
    """Makes the membership of a place's workers, which must all serve this model."""
    instances = instances_of(place, ports)
    return Membership(place, instances, mailbox, timeouts, checkpoint.identity, checkpoint.hf_overrides)
