"""Two schedulers that share workers, and a lease record in a folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pd_cluster import wire
from pd_cluster.cluster.leases.lease_folder import LeaseFolder
from pd_cluster.cluster.members.shared_membership import Lease, SharedMembership
from pd_cluster.net.peer_admission import Fence
from tests.support.elastic_world import ElasticWorld

LEASE_S = 1.5


class Scheduler:
    """One of several schedulers, with its own membership of ready instances."""

    def __init__(self, folder: Path, index: int, clock: Callable[[], float]) -> None:
        self.world = ElasticWorld()
        self.fence = Fence()
        self.wall_s = 0.0
        self.store = LeaseFolder(folder / "lease")
        self.world.membership.own_key = f"scheduler-{index}@{index + 1}"
        lease = Lease(index, self.store, f"http://127.0.0.1:{9001 + 2 * index}", LEASE_S, 5.0)
        members = self.world.membership, self.world.elastic
        self.shared = SharedMembership(lease, *members, self, clock, lambda: self.wall_s)

    def note_term(self, term: int) -> None:
        self.fence.note(term)

    async def look(self) -> None:
        await self.shared.look()

    async def stop(self) -> None:
        """Releases the lease, as its process does at its end."""
        running = asyncio.create_task(self.shared.run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait((running,))

    @property
    def orders(self) -> list[wire.Peers]:
        return [body for _, body in self.world.mailbox.of(wire.Peers)]


class Two:
    def __init__(self, folder: Path) -> None:
        self.now_s = 10.0
        self.one, self.other = (Scheduler(folder, index, lambda: self.now_s) for index in range(2))

    @classmethod
    async def begun(cls, folder: Path) -> Self:
        """Returns two schedulers, of which the first owns membership."""
        two = cls(folder)
        await two.one.look()
        two.now_s += LEASE_S  # time for a scheduler with an earlier list to write it
        await two.one.look()
        await two.other.look()
        assert (two.one.shared.is_owner, two.other.shared.is_owner) == (True, False)
        return two

    async def fail_over(self) -> None:
        self.now_s += LEASE_S
        await self.other.look()
        assert (self.one.shared.is_owner, self.other.shared.is_owner) == (False, True)
