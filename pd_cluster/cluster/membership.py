"""Who is in the cluster right now: asks each worker's `/instance`, connects, notices restarts, tells the workers.

The rank table and NODE_PORTS say where workers should be; what a worker says of itself is only compared with that.
A worker that answers at another's place is a fault of NODE_PORTS, told apart by its devices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import httpx
import msgspec

from pd_cluster import wire
from pd_cluster.cluster.instance import Instance, InstanceState
from pd_cluster.cluster.place import Place, digest_of, resolve_host
from pd_cluster.cluster.roster import Roster
from pd_cluster.config import Timeouts
from pd_cluster.errors import ConfigError
from pd_cluster.mailbox import REFUSALS, Mailbox
from pd_cluster.reports import InstanceInfo
from pd_cluster.types import Role
from ranktable_tools import Server
from ranktable_tools.hosts import host_key, is_ip

log = logging.getLogger(__name__)

POLL_S = 0.1
LOADING_S = 0.5  # of an instance that loads: how long it may keep its answer until it has loaded
SLOW_POLL_S = 2.0
FAREWELL_S = 1.0  # between the last message to an instance and the end of its connection


def instances_of(place: Place, ports: Sequence[int]) -> list[Instance]:
    """The global table's workers, in the order of NODE_PORTS. A host that does not resolve yet stays a name."""
    num_prefill = len(place.table.prefill)
    return [
        Instance(name, _role(at < num_prefill), _address(server.server_ip), port, _ids(server))
        for at, (name, server, port) in enumerate(zip(place.names, place.table.instances, ports, strict=True))
    ]


class Membership(Roster):
    """`lost(instance, reason)` is called when a worker that was ready is not any more."""

    def __init__(
        self,
        place: Place,
        instances: list[Instance],
        mailbox: Mailbox,
        timeouts: Timeouts,
        model_identity: str,
        lost: Callable[[Instance, str], None],
        hf_overrides: str = "{}",
    ) -> None:
        """`model_identity` and `hf_overrides`: of the model that every worker must serve, too."""
        super().__init__(instances, mailbox, lost)
        self.place = place
        self._hosts = place.hosts  # those of leaving instances, too
        self._timeouts = timeouts
        self._model_identity, self._hf_overrides = model_identity, hf_overrides
        self._was_ready = False  # once the cluster has served, a stranger at a port must not end it
        self._joined: set[str] = set()  # at run time
        self._refused: dict[str, tuple[int, str]] = {}  # name -> the life that keys keep apart from this one, and why
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._watch_too: Callable[[Instance], asyncio.Task[None]] | None = None

    async def run(self) -> None:
        """Watches every worker until cancelled. Raises ConfigError when NODE_PORTS is certainly wrong."""
        client = httpx.AsyncClient(timeout=self._timeouts.connect_timeout_s, trust_env=False)
        async with client, asyncio.TaskGroup() as group:
            self._watch_too = lambda instance: group.create_task(self._watch(instance, client))
            self._watching = {instance.name: self._watch_too(instance) for instance in self.instances}
            await asyncio.Event().wait()  # others may join

    # ---- who is to be watched

    def accept(self, place: Place) -> None:
        """The table is this one now."""
        self.place = place
        self._mailbox.table = digest_of(place.table)
        self._hosts |= place.hosts

    def join(self, instance: Instance) -> None:
        """Watches it, too; the list keeps the order of the table."""
        self.instances.append(instance)
        self.instances.sort(key=lambda each: _order(each.name))
        self._joined.add(instance.name)
        log.info("%s joins, at port %s of %s", instance.name, instance.port or "unknown", instance.host)
        if self._watch_too is not None:
            self._watching[instance.name] = self._watch_too(instance)
        self.wake()

    def forget(self, instance: Instance) -> None:
        """It is not asked any more, and nobody is to talk to it."""
        self.instances.remove(instance)
        if (task := self._watching.pop(instance.name, None)) is not None:
            task.cancel()
        conn, instance.conn = instance.conn, ""
        self._open.discard(conn)
        if self._by_conn.pop(conn, None) is not None:
            self._mailbox.send(conn, wire.Peers([]))  # it closes its links
            asyncio.get_running_loop().call_later(FAREWELL_S, self._mailbox.disconnect, conn)
        instance.state = "unreachable"
        self.tell_peers()
        self.wake()

    # ---- watching

    async def _watch(self, instance: Instance, client: httpx.AsyncClient) -> None:
        while True:
            if instance.state not in ("ready", "connecting"):
                await self._ask(instance, client)
            await asyncio.sleep(POLL_S if instance.state != "failed" else SLOW_POLL_S)

    async def _ask(self, instance: Instance, client: httpx.AsyncClient) -> None:
        if not instance.port:
            way_out = f"pd-cluster instances add {instance.name} --port PORT"
            self.set_state(instance, "unreachable", f"its port is not known; {way_out}")
            return
        if reason := await self._find(instance):
            self.set_state(instance, "unreachable", reason)
            return
        host = f"[{instance.host}]" if ":" in instance.host else instance.host
        try:
            # One that loads answers when it has loaded.
            answer = await client.get(f"http://{host}:{instance.port}/instance", params=self._until(instance))
            info = msgspec.json.decode(answer.content, type=InstanceInfo)
        except httpx.HTTPError:
            self.set_state(instance, "unreachable", f"nobody answers at {host}:{instance.port}")
            return
        except msgspec.DecodeError:
            self.set_state(instance, "failed", f"{host}:{instance.port} does not answer as a worker of this version")
            return
        instance.info = info
        reason = self._misplaced(instance, info)
        if reason and not self._was_ready and instance.name not in self._joined:
            raise ConfigError(reason)
        reason = reason or self._problem(instance, info)
        if reason:
            self.set_state(instance, "failed", reason)
        elif info.state == "ready":
            self.connect(instance, info)
        else:
            self.set_state(instance, "loading" if info.state == "loading" else "failed", info.error)

    def _until(self, instance: Instance) -> dict[str, str]:
        if instance.state != "loading":
            return {}
        return {"unless": "loading", "for_s": str(min(LOADING_S, self._timeouts.connect_timeout_s / 2))}

    async def _find(self, instance: Instance) -> str:
        """Asks for its name's address again: a pod comes back with another one. Returns why there is none, or ""."""
        name = self._hosts.get(instance.name, instance.host)
        if not is_ip(name):
            try:
                instance.host = await asyncio.to_thread(resolve_host, name)
            except ConfigError as error:
                return str(error)
        return ""

    def _misplaced(self, instance: Instance, info: InstanceInfo) -> str:
        """Why whoever answers here is not this entry of the table; "" when it is."""
        if info.device_ids == instance.device_ids and host_key(info.server_ip) == host_key(self._hosts[instance.name]):
            return ""
        here = f"at port {instance.port} answers {info.name} (devices {','.join(info.device_ids)} of {info.server_ip})"
        its = f"the port of {instance.name} (devices {','.join(instance.device_ids)} of {instance.host})"
        if instance.name in self._joined:
            return f"{here}, and it must be {its}; pd-cluster instances add {instance.name} --port PORT"
        ports = ",".join(str(i.port) for i in self.instances if i.name not in self._joined)
        index = [i for i in self.instances if i.name not in self._joined].index(instance)
        return (
            f"NODE_PORTS={ports}: [{index}] must be {its}, but {here}; list the ports in the order of the global "
            f"rank table, prefill first"
        )

    def _problem(self, instance: Instance, info: InstanceInfo) -> str:
        epoch, why = self._refused.get(instance.name, (0, ""))
        if why and epoch == info.epoch:
            return why
        if info.state == "ready" and len(info.public_key) != wire.KEY_NBYTES:
            return "it has no key of its own, so it is of an earlier version; start it again with the scheduler's"
        if info.name != instance.name:
            return f"its own global rank table names it {info.name}; start it again with the scheduler's"
        if info.state == "ready" and info.model_identity != self._model_identity:
            return (
                f"it serves another model ({info.model_identity[:12]}) than the scheduler "
                f"({self._model_identity[:12]}); start all with the same --model"
            )
        if info.state == "ready" and info.numerics.hf_overrides != self._hf_overrides:
            return (
                f"it was started with --hf-overrides {info.numerics.hf_overrides}, the scheduler with "
                f"{self._hf_overrides}; start all with the same"
            )
        return ""

    # ---- who works with whom

    def _state_after(self, instance: Instance, reason: str) -> tuple[InstanceState, str]:
        """Keys stay what they are as long as both processes live: it is not tried again before it is another."""
        if reason not in REFUSALS:
            return super()._state_after(instance, reason)
        why = (
            f"it was started with another cluster.secret than the scheduler ({reason}); give every process the same "
            f"file, or with --derive-secret the same global rank table"
        )
        self._refused[instance.name] = instance.epoch, why
        return "failed", why

    def _has_come(self, instance: Instance) -> None:
        self._was_ready = True
        self.tell_peers()

    def _has_gone(self, instance: Instance) -> None:
        self.tell_peers()

    def tell_peers(self) -> None:
        """Everybody who is ready, and what they are now, to all of them."""
        ready = [instance for instance in self.instances if instance.is_ready]
        peers = wire.Peers([instance.to_peer() for instance in ready])
        for instance in ready:
            self._mailbox.send(instance.conn, peers)


def _address(host: str) -> str:
    """A number, or the name while nobody knows it."""
    try:
        return resolve_host(host)
    except ConfigError:
        return host


def _role(is_prefill: bool) -> Role:
    return "prefill" if is_prefill else "decode"


def _order(name: str) -> tuple[bool, int]:
    """Where the table has it: prefill first."""
    role, _, index = name.rpartition("-")
    return role != "prefill", int(index)


def _ids(server: Server) -> list[str]:
    return [device.device_id for device in server.device]
