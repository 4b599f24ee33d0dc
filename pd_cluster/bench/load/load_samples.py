"""Samples the cluster's instances and the client's CPU time while a load runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from pd_cluster.bench.load.guidellm_process import cpu_seconds
from pd_cluster.bench.outcomes import InstanceSample
from pd_cluster.client.admin_client import Admin
from pd_cluster.client.instance_list import fetch_instances
from pd_cluster.errors import PdClusterError

PERIOD_S = 0.5


@dataclass(slots=True)
class LoadSamples:
    """Times are Unix times in seconds."""

    instances: list[InstanceSample] = field(default_factory=list)
    client_cpu: list[tuple[float, dict[int, float]]] = field(default_factory=list)  # process -> its CPU time

    def between(self, start_s: float, stop_s: float) -> list[InstanceSample]:
        """Returns the samples of that period, with times relative to `start_s`."""
        return [
            msgspec.structs.replace(each, at_s=each.at_s - start_s)
            for each in self.instances
            if start_s <= each.at_s <= stop_s
        ]

    def client_core_share(self, start_s: float, stop_s: float) -> float | None:
        """Returns the share of a core that the client's busiest process used; None if unknown."""
        inside = [(at_s, taken) for at_s, taken in self.client_cpu if start_s - PERIOD_S <= at_s <= stop_s + PERIOD_S]
        if len(inside) < 2:
            return None
        (first_s, first), (last_s, last) = inside[0], inside[-1]
        return max((taken - first.get(pid, 0.0) for pid, taken in last.items()), default=0.0) / (last_s - first_s)


@contextlib.asynccontextmanager
async def sampled(session: int, admin: Admin | None, period_s: float = PERIOD_S) -> AsyncIterator[LoadSamples]:
    """Takes samples until the block ends; without an admin address, only of the client."""
    samples = LoadSamples()
    task = asyncio.create_task(_sample(samples, session, admin, period_s))
    try:
        yield samples
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _sample(samples: LoadSamples, session: int, admin: Admin | None, period_s: float) -> None:
    while True:
        samples.client_cpu.append((time.time(), cpu_seconds(session)))
        if admin is not None:
            with contextlib.suppress(PdClusterError):  # this sample is missing
                samples.instances += await _look(admin)
        await asyncio.sleep(period_s)


async def _look(admin: Admin) -> list[InstanceSample]:
    entries = await fetch_instances(admin)
    at_s = time.time()
    return [
        InstanceSample(
            at_s=at_s,
            name=entry["instance_id"],
            role=entry["role"],
            num_running=entry["num_running"],
            num_waiting=entry["num_waiting"],
            num_held_blocks=entry["num_held_blocks"],
            num_blocks=entry["num_blocks"],
        )
        for entry in entries
        if entry["state"] == "ready"
    ]
