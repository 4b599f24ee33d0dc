"""An admission queue in front of two instances, for tests that fill and empty both."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.roster import RosterFollower
from pd_cluster.cluster.placement.spare_capacity import BACKLOG_S
from pd_cluster.cluster.queueing.fair_queue import QueueEntry
from pd_cluster.cluster.routing.admission_queue import AdmissionQueue, AdmissionRate, QueuedRequest
from pd_cluster.types import LinkState
from tests.support.router_world import info_of, ready

RATE = 1000.0  # prompt tokens per second
FULL = int(RATE * BACKLOG_S) + 1


def pair(num_places: int = 8, **decode: Any) -> list[Instance]:
    prefill, decoding = ready("prefill-0"), ready("decode-0")
    links = {decoding.key: LinkState("up", ("shm",))}
    prefill.load = wire.Load(links=links).at_rates(prefill_tokens_per_s=RATE)
    decoding.load = wire.Load(**decode)
    decoding.info = info_of("decode-0", "decode", max_num_seqs=num_places)
    return [prefill, decoding]


def fill(instance: Instance, num_tokens: int = FULL) -> None:
    instance.outstanding_tokens, instance.num_outstanding = num_tokens, 100


class Hall:
    """An admission queue in front of two instances, which the test fills and empties."""

    def __init__(self, max_wait_s: float = 0.0, has_priorities: bool = False) -> None:
        self.instances = pair()
        self.heard = asyncio.Event()
        self.room = AdmissionQueue(max_wait_s, self, has_priorities=has_priorities)

    def watch(self, follower: RosterFollower) -> None:
        """Does nothing, because no instance is lost here."""

    async def change(self) -> None:
        await self.heard.wait()
        self.heard.clear()

    def close(self) -> None:
        fill(self.instances[0])

    def open(self) -> None:
        fill(self.instances[0], 0)
        self.room.look()

    async def visit(
        self,
        name: str = "a",
        num_tokens: int = 10,
        client_timeout_s: float = math.inf,
        since_s: float | None = None,
        **more: Any,
    ) -> QueueEntry:
        """Queues a request, which begins as soon as it is admitted."""
        entry = await self.room.turn(QueuedRequest(name, num_tokens, 1, **more), client_timeout_s, since_s)
        self.room.begun(entry)
        return entry

    async def waiting(
        self, number: int, name: str = "a", num_tokens: int = 10, **more: Any
    ) -> list[asyncio.Task[QueueEntry]]:
        tasks = [asyncio.ensure_future(self.visit(name, num_tokens, **more)) for _ in range(number)]
        wanted = self.room.num_waiting + number
        while self.room.num_waiting < wanted:
            await asyncio.sleep(0)
        return tasks

    def measured(self, tokens_per_s: float) -> None:
        """Sets the measured rate of admitted prompt tokens."""
        self.room.rate = Steady(tokens_per_s)


class Steady(AdmissionRate):
    def __init__(self, tokens_per_s: float) -> None:
        super().__init__(0.0)
        self._steady = tokens_per_s

    @property
    def tokens_per_s(self) -> float:
        return self._steady
