"""Carries out operators' commands to the whole cluster: pausing and aborting requests, emptying prefix caches, sleep.

Knows nothing of HTTP. Processes that serve requests are reached through `ServingProcesses`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Literal, Protocol

from pd_cluster import wire
from pd_cluster.cluster.instances.roster import Roster
from pd_cluster.cluster.members.cluster_sleep import ClusterSleep
from pd_cluster.cluster.members.worker_membership import MembershipMailbox
from pd_cluster.errors import DeadlineExceeded, Refused
from pd_cluster.process_messages import Gate

log = logging.getLogger(__name__)

RESET_TIMEOUT_S = 60.0  # the time for all answers, since a step may have to finish first
PauseMode = Literal["abort", "wait", "keep"]
RUNNING_ONES = {"abort": "end now", "wait": "continue", "keep": "stop, and continue after the pause"}


class ServingProcesses(Protocol):
    """The processes that serve requests."""

    async def control_requests(self, gate: Gate, aborts: Collection[str] | None = None, keeps: bool = False) -> None:
        """Admits, delays or refuses new requests. Returns when all processes do so.

        `aborts`: ids, as clients know them, of requests to end; empty: all; None: none. `keeps`: running requests leave
        their instances, and continue when the gate is open again.
        """

    async def until_idle(self) -> None:
        """Waits until no instance has a request."""


class ClusterControl:
    """`roster`: every instance of the cluster. `may_sleep`: whether `serving` includes all processes that serve
    requests.
    """

    def __init__(
        self,
        roster: Roster,
        post: MembershipMailbox,
        serving: ServingProcesses,
        request_timeout_s: float,
        may_sleep: bool = True,
    ) -> None:
        self._may_sleep = may_sleep
        self._roster, self._post, self._serving = roster, post, serving
        self._request_timeout_s = request_timeout_s or None
        self._one_at_a_time = asyncio.Lock()
        self.cluster_sleep = ClusterSleep(roster, post)
        self.is_paused = False

    @property
    def is_asleep(self) -> bool:
        return self.cluster_sleep.level > 0

    async def pause(self, mode: PauseMode, empties_caches: bool) -> None:
        """Delays new requests. Returns when running ones have finished (mode "wait") or were stopped.

        Raises DeadlineExceeded, and stays paused, if they do not end within a request's maximum time.
        """
        async with self._one_at_a_time:
            self.is_paused = True
            log.warning("paused: new requests wait; running ones %s", RUNNING_ONES[mode])
            await self._empty("asleep" if self.is_asleep else "paused", mode, "POST /resume")
            if empties_caches:
                await self._reset_caches()

    async def resume(self) -> None:
        """Admits requests again. Raises Refused if the cluster is asleep."""
        async with self._one_at_a_time:
            if self.is_asleep:
                raise Refused("the cluster is asleep; POST /wake_up wakes it up")
            self.is_paused = False
            await self._serving.control_requests("open")
            log.warning("resumed")

    async def sleep(self, level: Literal[1, 2], mode: PauseMode) -> None:
        """Refuses new requests; when running ones have finished or were stopped, instances release their memory.

        Returns when all instances have done so. Raises Refused before it changes anything, and DeadlineExceeded.
        """
        if not self._may_sleep:
            raise Refused("one of several schedulers can refuse only its own requests; stop the other schedulers first")
        async with self._one_at_a_time:
            self.cluster_sleep.check()
            log.warning("sleep at level %d: new requests are refused; running ones %s", level, RUNNING_ONES[mode])
            if not self.is_asleep:
                await self._empty("asleep", mode, "POST /wake_up")
            await self.cluster_sleep.reach(level)

    async def wake_up(self) -> None:
        """Lets instances allocate their memory again, then admits requests, unless the cluster was paused before.

        Raises DeadlineExceeded if some instances have not done so in time; the others then serve.
        """
        async with self._one_at_a_time:
            try:
                await self.cluster_sleep.reach(0)
            finally:
                await self._serving.control_requests("paused" if self.is_paused else "open")
                log.warning("awake%s", ", and paused" if self.is_paused else "")

    async def while_empty(self, mode: PauseMode, job: Callable[[], Awaitable[None]]) -> None:
        """Runs a job while no instance has a request; then admits requests, unless the cluster was paused before.

        Raises Refused if the cluster is asleep, and DeadlineExceeded, without running the job, if requests do not end.
        """
        async with self._one_at_a_time:
            if self.is_asleep:
                raise Refused("the cluster is asleep; POST /wake_up wakes it up")
            try:
                await self._empty("paused", mode, "this command ends")
                await job()
            finally:
                await self._serving.control_requests("paused" if self.is_paused else "open")

    async def _empty(self, gate: Gate, mode: PauseMode, way_out: str) -> None:
        """Waits until no instance has a request. Raises DeadlineExceeded."""
        await self._serving.control_requests(gate, () if mode == "abort" else None, keeps=mode == "keep")
        try:
            await asyncio.wait_for(self._serving.until_idle(), self._request_timeout_s)
        except TimeoutError:
            after = f"requests still run after {self._request_timeout_s:g} s"
            raise DeadlineExceeded(f"{after}; new ones are not admitted until {way_out}") from None

    async def abort(self, names: Collection[str]) -> None:
        """Ends these requests; without names, all, including waiting ones."""
        async with self._one_at_a_time:
            gate: Gate = "asleep" if self.is_asleep else "paused" if self.is_paused else "open"
            await self._serving.control_requests(gate, names)

    async def reset_caches(self, is_external: bool = False) -> None:
        """Empties the prefix caches of all instances. Running requests keep their blocks, which no other request finds.

        `is_external`: the store that instances share is emptied too, for every cluster that uses it.

        Raises DeadlineExceeded if an instance does not answer in time.
        """
        async with self._one_at_a_time:
            await self._reset_caches(is_external)

    async def _reset_caches(self, is_external: bool = False) -> None:
        asked = {i.name: (i.conn, i.load.num_cache_resets) for i in self._roster.instances if i.is_ready}
        for conn, _ in asked.values():
            self._post.send(conn, wire.ResetCache(is_external))

        def lacking() -> list[str]:
            """Returns the instances that have not confirmed, except gone ones, which have lost their caches."""
            here = {i.name: (i.conn, i.load.num_cache_resets) for i in self._roster.instances if i.is_ready}
            return [name for name, (conn, num) in asked.items() if name in here and here[name] == (conn, num)]

        try:
            async with asyncio.timeout(RESET_TIMEOUT_S):
                while lacking():
                    await self._roster.change()
        except TimeoutError:
            names = ", ".join(lacking())
            raise DeadlineExceeded(f"{names}: no answer within {RESET_TIMEOUT_S:g} s; send the command again") from None
        log.info("the prefix caches of %s are empty", ", ".join(asked) or "no instance")
