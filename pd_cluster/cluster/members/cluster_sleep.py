"""Brings every instance to the requested level of sleep: sends this level to each instance that reports another one.

The state × event table is in docs/protocol/membership.md. Knows nothing of requests: cluster_control.py refuses them.
"""

from __future__ import annotations

import asyncio
import logging

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.roster import Roster
from pd_cluster.cluster.members.worker_membership import MembershipMailbox
from pd_cluster.errors import DeadlineExceeded, Refused

log = logging.getLogger(__name__)

LEVEL_TIMEOUT_S = 600.0  # the time for all answers, since all weights may have to be read


class ClusterSleep:
    """`level`: the requested level."""

    def __init__(self, roster: Roster, post: MembershipMailbox) -> None:
        self._roster, self._post = roster, post
        self.level: wire.SleepLevel = 0
        self._sent: dict[str, wire.SleepLevel] = {}  # open connection -> the last level sent

    async def run(self) -> None:
        """Sends the level to instances that join later; runs until cancelled."""
        while True:
            self._send_level()
            await self._roster.change()

    def check(self) -> None:
        """Raises Refused if an instance cannot sleep."""
        for instance in self._roster.instances:
            if instance.unit:
                raise Refused(
                    f"instances of a unit do not sleep, and {instance.name} is in {instance.unit}; drain the unit and "
                    f"stop its processes instead"
                )
            if instance.info is not None and instance.info.state == "ready" and instance.info.numerics.device != "cpu":
                raise Refused(
                    f"{instance.name} computes on {instance.info.numerics.device}, and only instances on a CPU "
                    f"return their memory to the system; drain it and stop its processes instead"
                )

    async def reach(self, level: wire.SleepLevel) -> None:
        """Requests a level; returns when every ready instance has it. Raises DeadlineExceeded; the level then stays
        requested.
        """
        self.level = level
        self._send_level()
        try:
            async with asyncio.timeout(LEVEL_TIMEOUT_S):
                while self._lacking():
                    await self._roster.change()
        except TimeoutError:
            names = ", ".join(instance.name for instance in self._lacking())
            raise DeadlineExceeded(f"{names}: no answer within {LEVEL_TIMEOUT_S:g} s; send the command again") from None

    def _lacking(self) -> list[Instance]:
        return [each for each in self._roster.instances if each.is_ready and each.load.sleep_level != self.level]

    def _send_level(self) -> None:
        """Sends the level to instances that report another level and have not been sent this one."""
        lacking = self._lacking()
        here = {instance.conn for instance in self._roster.instances}
        self._sent = {conn: level for conn, level in self._sent.items() if conn in here}
        for instance in lacking:
            if self._sent.get(instance.conn) != self.level:
                self._sent[instance.conn] = self.level
                self._post.send(instance.conn, wire.Sleep(self.level))
