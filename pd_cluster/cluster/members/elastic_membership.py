"""Adds, removes and changes instances while requests run. The state × event table is in docs/protocol/membership.md.

Makes decisions and keeps deadlines; `Membership` knows the workers, `Router` the requests. Knows nothing of HTTP. A
command for an instance of a unit applies to all members of the unit, because they compute together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.unit_members import unit_of
from pd_cluster.cluster.leases.membership_lease import DesiredInstance
from pd_cluster.cluster.members.rank_table_reader import RankTableFiles, RankTableReader
from pd_cluster.cluster.members.worker_membership import Membership
from pd_cluster.errors import InstanceNotFound, Refused
from pd_cluster.settings.process_configs import Credentials
from pd_cluster.types import Role

log = logging.getLogger(__name__)

TICK_S = 0.05
LATE_S = 2.0  # other schedulers' requests delay a change by at most this time beyond its deadline


class MembershipSharing(Protocol):
    """Shares a membership among several schedulers (shared_membership.py); without it, this scheduler decides alone."""

    @property
    def is_owner(self) -> bool: ...
    @property
    def settle_s(self) -> float:
        """The time within which other schedulers may still send requests to an instance that is being emptied."""

    def check(self) -> None:
        """Raises Refused if another scheduler owns membership."""

    def changed(self) -> None:
        """Records that the list of instances, or an operator's request for an instance, has changed."""

    async def recorded(self) -> None:
        """Returns once the change would survive the loss of this process. Raises Unavailable."""


class ElasticMembership:
    """The commands and the work in progress. `move_on(instance, why)` moves an instance's requests elsewhere.
    `credentials`: this process's.
    """

    def __init__(
        self,
        membership: Membership,
        credentials: Credentials,
        tables: RankTableFiles,
        move_on: Callable[[Instance, str], None],
        drain_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._reader = RankTableReader(tables, credentials)
        self._move_on = move_on
        self._drain_timeout_s = drain_timeout_s
        self._clock = clock
        self._removed: set[str] = set()  # removed by a command: only a command adds them again
        self._begun = asyncio.Event()
        self.shared: MembershipSharing | None = None

    @property
    def is_owner(self) -> bool:
        """Whether this scheduler decides about instances."""
        return self.shared is None or self.shared.is_owner

    async def done(self, instance: Instance) -> Instance:
        """Returns the instance once a command for it would survive the loss of this scheduler. Raises Unavailable."""
        if self.shared is not None:
            await self.shared.recorded()
        return instance

    @property
    def instances(self) -> list[Instance]:
        return self._membership.instances

    def unit_of(self, instance: Instance) -> list[Instance]:
        """Returns the instances that a command for this one affects: the known members of its unit, or itself."""
        return unit_of(self.instances, instance)

    @property
    def _of_table(self) -> list[Instance]:
        """Returns the instances that did not register themselves: the table decides only about these."""
        return [instance for instance in self.instances if not instance.is_registered]

    # ---- commands

    def drain(self, name: str, force: bool = False, timeout_s: float | None = None) -> Instance:
        """Takes an instance out of service. Raises InstanceNotFound, or Refused for the last instance of its role."""
        self._check_owner()
        instance = self._staying(name)
        members = [each for each in self._affected_by(instance) if each.service != "leaving"]
        self._refuse_the_last([each for each in members if each.service == "in"], force)
        for each in members:
            if each.service == "in":
                each.service = "out"
                self._begin(each, timeout_s)
            elif timeout_s is not None:
                self._begin(each, timeout_s)  # already draining: only sets another deadline
        return instance

    def undrain(self, name: str) -> Instance:
        """Returns an instance to service. Raises InstanceNotFound, or Refused if it is leaving."""
        self._check_owner()
        instance = self._staying(name)
        for each in self._affected_by(instance):
            if each.service == "out":
                each.service = "in"
                log.info("%s is in service again", each.name)
                self._changed()
        return instance

    def remove(self, name: str, force: bool = False, timeout_s: float | None = None) -> Instance:
        """Drains an instance and removes it. Raises InstanceNotFound, or Refused for the last instance of its role."""
        self._check_owner()
        instance = self._find(name)
        members = self._affected_by(instance)
        self._refuse_the_last([each for each in members if each.service != "leaving"], force)
        for each in members:
            if each.service != "leaving":
                self._leave(each, timeout_s)
            elif timeout_s is not None:
                self._begin(each, timeout_s)
            if not each.is_registered:
                self._removed.add(each.name)
        return instance

    def change_role(self, name: str, role: Role, force: bool = False, timeout_s: float | None = None) -> Instance:
        """Drains an instance, then gives it the role. If it still has that role, cancels a pending change instead.

        Raises InstanceNotFound or Refused.
        """
        self._check_owner()
        instance = self._staying(name)
        if instance.role == "encode":
            raise Refused(f"{name} is an encoder: it has no language model, so it cannot be {role}")
        members = [each for each in self._affected_by(instance) if each.service != "leaving"]
        self._refuse_the_last([each for each in members if each.role != role and each.next_role is None], force)
        for each in members:
            if role == each.role:
                each.next_role = None
                self._changed()
            elif each.next_role is None:
                each.next_role = role
                self._begin(each, timeout_s)
            elif timeout_s is not None:
                self._begin(each, timeout_s)
        return instance

    async def add(self, name: str, port: int) -> Instance:
        """Starts watching the rank-table entry with this name, at this port. Raises InstanceNotFound or Refused."""
        self._check_owner()
        place, entries = await self._reader.read(self.instances, with_ports=False)
        if not entries:
            raise InstanceNotFound(
                f"name: no rank table has {name}; a worker outside the tables joins with --join", "name"
            )
        if name not in entries:
            raise InstanceNotFound(f"name: {place.table.file} has no {name[:256]}; it has {', '.join(entries)}", "name")
        instance = entries[name]
        instance.port = port
        known = next((each for each in self.instances if each.name == name), None)
        for other in self.instances:
            if other is not known and (other.host, other.port) == (instance.host, port):
                raise Refused(
                    f"port: {port} of {instance.host} is the port of {other.name}; give this instance's own port",
                    "port",
                )
        if known is not None and known.service == "leaving":
            raise Refused(f"{name} is leaving; add it after it has left")
        if known is not None and known.port != port and known.is_reached:
            raise Refused(f"{name} already exists, at port {known.port}; remove it first")
        self._membership.accept(place)
        self._removed.discard(name)
        if known is None:
            self._membership.join(instance)
            return instance
        known.port = port
        return known

    async def reload(self) -> str:
        """Reads the whole table again: new entries join, missing ones leave. Returns a summary of the changes. Raises
        Refused.
        """
        self._check_owner()
        place, entries = await self._reader.read(self.instances, with_ports=True)
        self._removed &= entries.keys()
        watched = {instance.name: instance for instance in self._of_table}
        joining = [name for name in entries if name not in watched and name not in self._removed]
        leaving = [each for each in self._of_table if each.name not in entries and each.service != "leaving"]
        self._membership.accept(place)
        for name in watched.keys() & entries.keys():
            watched[name].port = entries[name].port or watched[name].port
        for name in joining:
            self._membership.join(entries[name])
        for instance in leaving:
            self._leave(instance, None)
        left = [instance.name for instance in leaving]
        return f"joining: {', '.join(joining) or 'none'}; leaving: {', '.join(left) or 'none'}"

    def follow(self, members: Sequence[DesiredInstance]) -> None:
        """Adopts the list of instances and the operators' requests of the scheduler that owns membership."""
        known = {instance.name: instance for instance in self.instances}
        for member in members:
            instance = known.pop(member.name, None)
            if instance is not None and not self._is_at(instance, member):
                self._drop(instance)
                instance = None
            if instance is None:
                instance = _instance_of(member)
                self._membership.join(instance)
            instance.role, instance.port = member.role, member.port
            wishes = instance.service, instance.next_role, instance.drain_timeout_s
            if wishes != (member.service, member.next_role, member.drain_timeout_s):
                instance.service, instance.next_role = member.service, member.next_role
                self._begin(instance, member.drain_timeout_s)
        for gone in known.values():
            self._drop(gone)
        self._membership.wake()

    def _is_at(self, instance: Instance, member: DesiredInstance) -> bool:
        """Whether it has the address in the list; otherwise its name now belongs to another worker."""
        if instance.is_registered and instance.port != member.port:
            return False
        own = self._membership.host_of(instance), instance.device_ids, instance.joined_as
        return own == (member.host, member.device_ids, member.joined_as)

    def _drop(self, gone: Instance) -> None:
        if gone.num_outstanding:
            self._move_on(gone, "it has left")
        self._membership.forget(gone)

    # ---- work in progress

    async def run(self) -> None:
        while True:
            await self._begun.wait()
            self.tick()
            if not any(_is_under_way(instance, self._clock()) for instance in self.instances):
                self._begun.clear()
            await asyncio.sleep(TICK_S)

    def tick(self) -> None:
        now_s = self._clock()
        over = []
        for instance in [each for each in self.instances if _is_under_way(each, now_s)]:
            is_late = now_s >= instance.drain_deadline_s
            if is_late and instance.num_outstanding:
                log.warning(
                    "%s is not drained in time: moving %d requests to other instances",
                    instance.name,
                    instance.num_outstanding,
                )
                self._move_on(instance, "its drain exceeded the deadline")
            is_over = instance.is_empty or (is_late and not instance.num_outstanding)
            if is_over and self.is_owner and self._is_settled(instance, now_s):
                over.append(instance)
        for instance in [each for each in over if all(mate in over for mate in self._with_same_change(each))]:
            self._empty(instance)

    def _with_same_change(self, instance: Instance) -> list[Instance]:
        """Returns the members of its unit, itself included, that await the same change: they make it together."""
        wish = instance.service, instance.next_role
        return [each for each in self.unit_of(instance) if (each.service, each.next_role) == wish]

    def _is_settled(self, instance: Instance, now_s: float) -> bool:
        """Whether other schedulers send the instance no more requests, and those that they sent have ended or exceeded
        the deadline.
        """
        if self.shared is None:
            return True
        if now_s < instance.drain_deadline_s - instance.drain_timeout_s + self.shared.settle_s:
            return False
        return not instance.others_tokens or now_s >= instance.drain_deadline_s + LATE_S

    def _empty(self, instance: Instance) -> None:
        if instance.service == "leaving":
            log.info("%s has left", instance.name)
            self._membership.forget(instance)
            self._changed()
        elif instance.next_role is not None:
            log.info("%s changes from %s to %s", instance.name, instance.role, instance.next_role)
            instance.role, instance.next_role = instance.next_role, None
            self._membership.send_peers()
            self._changed()

    def _begin(self, instance: Instance, timeout_s: float | None) -> None:
        timeout_s = self._drain_timeout_s if timeout_s is None else timeout_s
        instance.drain_timeout_s, instance.drain_deadline_s = timeout_s, self._clock() + timeout_s
        if instance.service != "in" or instance.next_role is not None:
            log.info("%s is %s: it takes no more requests", instance.name, instance.shown_state)
        self._changed()
        self._begun.set()

    def _leave(self, instance: Instance, timeout_s: float | None) -> None:
        instance.service, instance.next_role = "leaving", None
        self._begin(instance, timeout_s)

    def _changed(self) -> None:
        self._membership.wake()
        if self.shared is not None:
            self.shared.changed()

    def _affected_by(self, instance: Instance) -> list[Instance]:
        """Returns the instances that a command for this one affects; if there are several, they are logged."""
        members = self.unit_of(instance)
        if len(members) > 1:
            names = ", ".join(each.name for each in members)
            log.info("a command for %s applies to its whole unit %s: %s", instance.name, instance.unit, names)
        return members

    # ---- refusals

    def _check_owner(self) -> None:
        if self.shared is not None:
            self.shared.check()

    def _find(self, name: str) -> Instance:
        for instance in self.instances:
            if instance.name == name:
                return instance
        names = ", ".join(instance.name for instance in self.instances)
        raise InstanceNotFound(f"name: there is no instance {name[:100]!r}; known are {names}", "name")

    def _staying(self, name: str) -> Instance:
        instance = self._find(name)
        if instance.service == "leaving":
            raise Refused(f"{name} is leaving")
        return instance

    def _refuse_the_last(self, going: Sequence[Instance], force: bool) -> None:
        """Raises Refused if no instance outside `going`, which is an instance or a unit, takes requests in its role."""
        # a prefill instance can compute images instead
        serving = [each for each in going if each.takes_requests and each.role != "encode"]
        if not serving or force:
            return
        role = serving[0].role
        if not any(each.takes_requests and each.role == role and each not in going for each in self.instances):
            names = " and ".join(each.name for each in serving)
            last = (
                f"is the last {role} instance that takes"
                if len(serving) == 1
                else f"are the last {role} instances that take"
            )
            raise Refused(f"{names} {last} requests; use force to let a single instance serve them")


def _instance_of(member: DesiredInstance) -> Instance:
    return Instance(member.name, member.role, member.host, member.port, member.device_ids, member.joined_as)


def _is_under_way(instance: Instance, now_s: float) -> bool:
    """Whether to keep watching the instance.

    An instance out of service is watched until its deadline: API processes may still send it requests.
    """
    return (
        instance.service == "leaving"
        or instance.next_role is not None
        or (instance.service == "out" and (instance.num_outstanding > 0 or now_s < instance.drain_deadline_s + 1))
    )
