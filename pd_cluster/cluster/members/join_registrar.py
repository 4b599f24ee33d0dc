"""Keeps the registrations of workers outside the rank tables, at the scheduler. The states are in
docs/protocol/membership.md.

A registration adds a worker's address to `Membership`, and its end removes the address; it proves nothing about the
worker. Among several schedulers, only the owner of membership admits workers. The `Registrar` runs on the event loop
and has no socket or thread; `JoinPort` passes it the messages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members.worker_membership import Membership
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.net.node_trust import NODE_REFUSED
from pd_cluster.net.peer_admission import JOIN_EPOCH, JOIN_PORT, JoinAdmission, Life
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.settings.process_settings import PortRange, name_problem
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import Role
from ranktable_tools.host_addresses import is_ip

log = logging.getLogger(__name__)

TICK_S = 0.1
ELSEWHERE = wire.JoinAnswer("this scheduler does not admit workers; another one may", is_elsewhere=True)
MOST_REGISTRATIONS = 1024  # at a time: the scheduler polls each registered worker, and lists it to all its peers


@dataclass(slots=True)
class Registration:
    """A registered worker.

    `conns`: the open connections over which the worker registered; the registration ends when the last of them closes.
    There are two while the loss of an earlier connection has not been noticed yet. `since_s`: when this scheduler
    learned of the registration. `is_inherited`: another scheduler admitted the worker, and it has not registered here
    yet. `joined_s`: when the worker last sent Join.
    """

    instance: Instance
    role: Role  # the role with which it registered
    conns: set[str]
    since_s: float
    is_inherited: bool = False
    joined_s: float = -math.inf


class Registrar:
    """`reach_s`: the time within which the scheduler must reach a newly registered worker, and within which a worker
    that another scheduler admitted must register here.
    """

    def __init__(
        self,
        membership: Membership,
        send: Callable[[str, wire.Body], None],
        reach_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._send = send
        self._reach_s = reach_s
        self._clock = clock
        self._registrations: dict[str, Registration] = {}  # instance's name -> registration
        # the term of ownership under which this scheduler admits workers; always 0 with a single scheduler
        self._term: int | None = 0

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        """Handles a message from a worker's parent; `peer` is the worker's name@epoch."""
        name = peer.rpartition("@")[0]
        self._note_term()
        match body:
            case wire.Join():
                self._join(conn, name, body)
            case wire.Leave():
                self.on_closed(conn)
                self._send(conn, wire.JoinAnswer(f"{name} has left"))

    def on_closed(self, conn: str) -> None:
        """Removes the connection from its registration, if it has one."""
        for each in self._registrations.values():
            each.conns.discard(conn)

    def tick(self) -> None:
        """Removes registrations that have ended."""
        self._note_term()
        listed = {id(instance) for instance in self._membership.instances}
        for name, each in list(self._registrations.items()):
            if id(each.instance) not in listed:
                self._end(name, f"an operator has removed {name}")
            elif each.conns and (problem := self._fault(each)):
                self._membership.forget(each.instance)
                self._end(name, problem)
            elif not each.conns and not each.instance.is_reached and not self._is_awaited(each):
                self._membership.forget(each.instance)
                self._end(name, "it has left, or has died")

    def _note_term(self) -> None:
        """When this scheduler becomes the owner, takes over the list; when it stops being the owner, sends the workers
        elsewhere.
        """
        term = self._membership.term()
        if term == self._term:
            return
        self._term = term
        for each in self._registrations.values():
            for conn in each.conns:
                self._send(conn, ELSEWHERE)
        self._registrations.clear()
        if term is None:
            return
        for instance in self._membership.instances:
            if instance.joined_as is not None:
                self._registrations[instance.name] = Registration(
                    instance, instance.joined_as, set(), self._clock(), is_inherited=True
                )

    def _is_awaited(self, each: Registration) -> bool:
        return each.is_inherited and self._clock() - each.since_s <= self._reach_s

    def _join(self, conn: str, name: str, join: wire.Join) -> None:
        if self._term is None:
            self._send(conn, ELSEWHERE)
            return
        if problem := self._problem(name, join):
            log.warning("%r at %r:%d cannot join: %s", name[:200], join.host, join.port, problem)
            self._send(conn, wire.JoinAnswer(problem))
            return
        known = self._registrations.get(name)
        if known is None:
            instance = _instance_of(name, join)
            self._registrations[name] = known = Registration(instance, join.role, {conn}, self._clock())
            self._membership.join(instance)
        else:
            known.conns.add(conn)
            known.is_inherited = False
        known.joined_s = self._clock()
        self._send(conn, wire.JoinAnswer())

    def _problem(self, name: str, join: wire.Join) -> str:
        """Returns why this worker cannot register; "" if it can."""
        if problem := name_problem(name):
            return f"--instance-name {name[:200]!r}: {problem}"
        if not is_ip(join.host):
            return f"--advertise-host {join.host!r}: expected the numeric address of one machine"
        if problem := self._membership.mismatch(join.model_identity, join.hf_overrides):
            return problem
        known = self._registrations.get(name)
        if known is None and len(self._registrations) >= MOST_REGISTRATIONS:
            return f"{MOST_REGISTRATIONS} workers are registered, which is the limit; stop some of them first"
        if known is None and not self._membership.has_capacity(_instance_of(name, join)):
            return "the schedulers' record has no room for another worker; stop some workers first"
        if known is not None and known.instance.service == "leaving":
            return f"{name} is leaving by an operator's command; start it after it has left"
        if known is not None and not _is_same(known, join):
            instance = known.instance
            return (
                f"--instance-name {name}: the {known.role} instance at {instance.host}:{instance.port} has "
                f"this name; give another name, or stop that instance first"
            )
        for other in self._membership.instances:
            is_there = other.state in ("forming", "ready") or not other.is_registered
            if other.name != name and is_there and (other.host, other.port) == (join.host, join.port):
                return f"--port {join.port} of {join.host} is the port of {other.name}; give this worker's own port"
        return ""

    def _fault(self, each: Registration) -> str:
        """Returns why an admitted worker cannot stay; "" if it can. A worker that fails reports this itself."""
        instance = each.instance
        if instance.reason.startswith(NODE_REFUSED) and self._clock() - each.joined_s <= self._reach_s:
            return ""  # its node was admitted here; the connecting mailbox may still have an older list of nodes
        if instance.state == "failed" and (instance.info is None or instance.info.state != "failed"):
            return instance.reason
        if instance.info is None and self._clock() - each.since_s > self._reach_s:
            return (
                f"the scheduler cannot reach it: {instance.reason or 'no answer'}; give the --advertise-host and the "
                "--port at which the scheduler can reach it"
            )
        return ""

    def _end(self, name: str, reason: str) -> None:
        ended = self._registrations.pop(name)
        log.info("%s is no longer registered: %s", name, reason)
        for conn in ended.conns:
            self._send(conn, wire.JoinAnswer(reason))


def _instance_of(name: str, join: wire.Join) -> Instance:
    return Instance(name, join.role, join.host, join.port, join.device_ids, joined_as=join.role)


def _is_same(known: Registration, join: wire.Join) -> bool:
    instance = known.instance
    place = known.role, instance.host, instance.port, instance.device_ids
    return place == (join.role, join.host, join.port, join.device_ids)


class JoinPort:
    """A mailbox where workers register. Must be created on its event loop. Raises ConfigError if the port is in use."""

    def __init__(self, membership: Membership, credentials: Credentials, timeouts: Timeouts, host: str, port: int):
        self._loop = asyncio.get_running_loop()
        self._fatal: asyncio.Future[None] = self._loop.create_future()
        self._mailbox = Mailbox(
            Life(JOIN_PORT, JOIN_EPOCH), "scheduler", credentials, timeouts, admission=JoinAdmission
        )
        self.registrar = Registrar(membership, self._mailbox.send, 2 * timeouts.connect_timeout_s)
        try:
            self._mailbox.bind(host, PortRange(port, port), "join_port")
        except BaseException:
            self._mailbox.close()
            raise

    async def run(self) -> None:
        """Admits and removes workers until cancelled. Raises the error of a failed mailbox."""
        self._mailbox.start(self)
        while not self._fatal.done():
            self.registrar.tick()
            await asyncio.wait((self._fatal,), timeout=TICK_S)
        self._fatal.result()

    def close(self) -> None:
        self._mailbox.close()

    # ---- the mailbox's thread

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        """Does nothing: the worker sends Join next."""

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if isinstance(body, wire.Join | wire.Leave):
            self._call(self.registrar.on_message, conn, peer, body)

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self._call(self.registrar.on_closed, conn)

    def on_fatal(self, error: BaseException) -> None:
        self._call(self._fatal.set_exception, error)

    def load(self) -> wire.Load | None:
        return None

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)
