"""Operators' commands to the whole cluster: new requests wait, running ones end, prefix caches are emptied.

Knows nothing of HTTP. A process that serves requests is reached through `Serving`, whether it is this one or others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Literal, Protocol

from pd_cluster import wire
from pd_cluster.cluster.members.membership import MemberPost
from pd_cluster.cluster.members.roster import Roster
from pd_cluster.errors import DeadlineExceeded

log = logging.getLogger(__name__)

RESET_TIMEOUT_S = 60.0  # a step may have to end first
PauseMode = Literal["abort", "wait"]


class Serving(Protocol):
    """The processes that serve requests."""

    async def steer(self, is_paused: bool, aborts: Collection[str] | None = None) -> None:
        """Lets new requests wait, or go on. Returns when all processes do so.

        `aborts`: requests to end, by the names that clients have of them; empty: all. None: none.
        """

    async def until_idle(self) -> None:
        """Returns when no request is at an instance."""


class Control:
    """`roster`: every instance of the cluster."""

    def __init__(self, roster: Roster, post: MemberPost, serving: Serving, request_timeout_s: float) -> None:
        self._roster, self._post, self._serving = roster, post, serving
        self._request_timeout_s = request_timeout_s or None
        self._one_at_a_time = asyncio.Lock()
        self.is_paused = False

    async def pause(self, mode: PauseMode, empties_caches: bool) -> None:
        """Lets new requests wait. Returns when running ones have ended, by themselves in mode "wait".

        Raises DeadlineExceeded, and stays paused, if they do not end within the time that a request may take.
        """
        async with self._one_at_a_time:
            self.is_paused = True
            log.warning("paused: new requests wait; running ones %s", "end now" if mode == "abort" else "go on")
            await self._serving.steer(True, () if mode == "abort" else None)
            try:
                await asyncio.wait_for(self._serving.until_idle(), self._request_timeout_s)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"requests still run after {self._request_timeout_s:g} s; new ones wait until POST /resume"
                ) from None
            if empties_caches:
                await self._reset_caches()

    async def resume(self) -> None:
        async with self._one_at_a_time:
            self.is_paused = False
            await self._serving.steer(False)
            log.warning("resumed")

    async def abort(self, names: Collection[str]) -> None:
        """Ends these requests; without names, all, also those that wait."""
        async with self._one_at_a_time:
            await self._serving.steer(self.is_paused, names)

    async def reset_caches(self) -> None:
        """Empties the prefix caches of all instances. Requests under way keep their blocks, which nobody finds.

        Raises DeadlineExceeded if an instance does not answer in time.
        """
        async with self._one_at_a_time:
            await self._reset_caches()

    async def _reset_caches(self) -> None:
        asked = {i.name: (i.conn, i.load.num_cache_resets) for i in self._roster.instances if i.is_ready}
        for conn, _ in asked.values():
            self._post.send(conn, wire.ResetCache())

        def lacking() -> list[str]:
            """Returns those that have not said that theirs is empty; an instance that is gone has lost its cache."""
            here = {i.name: (i.conn, i.load.num_cache_resets) for i in self._roster.instances if i.is_ready}
            return [name for name, (conn, num) in asked.items() if name in here and here[name] == (conn, num)]

        try:
            async with asyncio.timeout(RESET_TIMEOUT_S):
                while lacking():
                    await self._roster.change()
        except TimeoutError:
            names = ", ".join(lacking())
            raise DeadlineExceeded(f"{names}: no answer within {RESET_TIMEOUT_S:g} s; send it again") from None
        log.info("the prefix caches of %s are empty", ", ".join(asked) or "no instance")
