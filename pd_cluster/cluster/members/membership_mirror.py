"""Keeps an API process's view of the cluster: the scheduler sends the members; this process's own connections show
their states. The process neither asks workers for descriptions nor sends them their peers: the scheduler does both
(worker_membership.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

import msgspec

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.roster import Roster, RosterMailbox
from pd_cluster.process_messages import (
    AdapterNames,
    AllStats,
    ApiReport,
    Busy,
    Instances,
    InstanceView,
    MoveOn,
    OthersBusy,
    OthersTokens,
    Outstanding,
    ToApi,
)

log = logging.getLogger(__name__)

TICK_S = 0.1
LOOK_S = 0.02  # the interval at which the process looks for changes in its work, which it reports at once
SILENT_TICKS = 10  # the scheduler receives a report at least this often, as a sign of life


class MembershipMirror(Roster):
    """The roster of an API process. Followers are also notified when the scheduler wants an instance emptied."""

    def __init__(self, lines: RosterMailbox, adapters: dict[str, str] | None = None, version: int = 0) -> None:
        """`adapters`: name -> digest, mutated in place; `version`: the version of the scheduler's message that listed
        them.
        """
        super().__init__([], lines)
        self._adapters = {} if adapters is None else adapters
        self.adapters_version = version
        self.pause_version = 0  # version of the last PauseUpdate that this process has applied
        self._views: dict[str, InstanceView] = {}
        self.totals: AllStats | None = None  # sums over all API processes; None: not received yet

    async def run(
        self,
        tell: Callable[[ApiReport], None],
        own: Callable[[], ApiReport],
        busy: Callable[[], Busy] | None = None,
    ) -> None:
        """Restores lost connections and reports to the scheduler, until cancelled.

        `tell` sends a report; `own` returns one without outstanding work. `busy` returns the work being served now.
        """
        told = ApiReport({})
        for tick in itertools.count():
            due_s = asyncio.get_running_loop().time() + TICK_S
            while busy is not None and asyncio.get_running_loop().time() + LOOK_S < due_s:
                await asyncio.sleep(LOOK_S)
                if (now := busy()) != told.busy:
                    told = self.report(msgspec.structs.replace(told, busy=now))
                    tell(msgspec.structs.replace(told, stats=None))
            await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
            report = self.report(own())
            if report != told or tick % SILENT_TICKS == 0:
                tell(report if report.stats != told.stats else msgspec.structs.replace(report, stats=None))
                told = report
            for instance in self.instances:
                self._connect_if_wanted(instance)

    def report(self, own: ApiReport) -> ApiReport:
        busy = [instance for instance in self.instances if instance.num_outstanding]
        outstanding = {i.name: Outstanding(i.num_outstanding, i.outstanding_tokens) for i in busy}
        return msgspec.structs.replace(own, outstanding=outstanding)

    def apply(self, news: ToApi) -> None:
        """Applies a message from the scheduler."""
        match news:
            case Instances(views):
                self._follow(views)
            case OthersTokens(tokens):
                for instance in self.instances:
                    instance.others_tokens = tokens.get(instance.name, 0)
            case AllStats():
                self.totals = news
            case OthersBusy(busy):
                if self.totals is not None:
                    self.totals = msgspec.structs.replace(self.totals, others=busy)
            case AdapterNames(names, version):
                self._adapters.clear()
                self._adapters.update(names)
                self.adapters_version = version
            case MoveOn(name, why):
                for instance in [each for each in self.instances if each.name == name]:
                    for follower in self._followers:
                        follower.move_on(instance, why)

    def _follow(self, views: list[InstanceView]) -> None:
        known = {instance.name: instance for instance in self.instances}
        self._views = {view.name: view for view in views}
        for gone in [each for each in self.instances if each.name not in self._views]:
            self._leave(gone)
        self.instances[:] = [known.get(view.name) or _instance(view) for view in views]
        for instance in self.instances:
            self._take_over(instance, self._views[instance.name])

    def _take_over(self, instance: Instance, view: InstanceView) -> None:
        instance.role, instance.next_role = view.role, view.next_role
        instance.service = view.service
        instance.host, instance.port = view.host, view.port
        if instance.conn and view.info is not None and view.info.epoch != instance.epoch:
            self._leave(instance)  # a new life; the old life's connection is about to close
        if not instance.conn:
            instance.info = view.info
        if view.state != "ready":
            self.set_state(instance, view.state, view.reason)
        elif instance.conn in self._open:
            self.set_state(instance, "ready", "")
        else:
            self._connect_if_wanted(instance)

    def _connect_if_wanted(self, instance: Instance) -> None:
        view = self._views[instance.name]
        if view.state == "ready" and view.info is not None and not instance.conn:
            instance.info = view.info
            self.connect(instance, view.info)

    def _leave(self, instance: Instance) -> None:
        """Treats an instance as if its connection had closed."""
        if instance.conn:
            self._lines.disconnect(instance.conn)
            self.on_closed(instance.conn, "the scheduler reports that it is gone")


def _instance(view: InstanceView) -> Instance:
    return Instance(view.name, view.role, view.host, view.port, view.device_ids)
