"""Faults of `benchmarks faults` other than signals: cut connections, and exhausted descriptors.

Every script waits until the cluster is complete again, and reports its observations. Only the cluster's processes are
affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import time
from collections.abc import Iterator

from benchmarks.faults.connection_cutting import between, check_can_cut, cut
from benchmarks.faults.fault_types import Fault, FaultContext, FaultObservations
from pd_cluster.result_tables import counted

NUM_CUTS = 8  # cuts of the links between prefill and decode instances, in turn
AROUND_DEADLINE_S = (2.4, 2.9, 3.1, 3.6)  # pauses, some of which peers take for a loss, because --dead-after is 3 s
CUT_REST_S = 0.7  # pause after a cut, longer than a link's first backoff
STARVED_S = 4.0
PROBE_TIMEOUT_S = 1.0


# ---- links


async def flap(context: FaultContext) -> FaultObservations:
    """Cuts links repeatedly; then pauses one end for durations around the deadline."""
    check_can_cut()
    num_cut = 0
    pairs = itertools.product((0, 1), (0, 1))
    for prefill, decode in itertools.islice(itertools.cycle(list(pairs)), NUM_CUTS):
        num_cut += await cut_link(context, f"prefill-{prefill}", f"decode-{decode}")
    for name in ("prefill-0", "decode-1"):
        num_cut += cut(between([context.stage.pid_of("scheduler")], context.stage.rank_pids(name)))
        await asyncio.sleep(CUT_REST_S)
        await context.stage.whole()
    for pause_s in AROUND_DEADLINE_S:
        await pause(context, "decode-0", pause_s)
    return FaultObservations(figures=[counted("connections cut", num_cut, "connections")])


async def cut_link(context: FaultContext, prefill: str, decode: str) -> int:
    """Cuts the connections between two instances while KV cache moves. Returns their number."""
    await context.stage.busy(prefill)
    num_cut = cut(between(context.stage.rank_pids(prefill), context.stage.rank_pids(decode)))
    await asyncio.sleep(CUT_REST_S)
    await context.stage.whole()
    return num_cut


async def pause(context: FaultContext, name: str, pause_s: float) -> None:
    context.stage.stop(name)
    try:
        await asyncio.sleep(pause_s)
    finally:
        context.stage.go_on(name)
    await asyncio.sleep(CUT_REST_S)
    await context.stage.whole()


# ---- descriptors


async def starve_scheduler(context: FaultContext) -> FaultObservations:
    """Prevents the scheduler from opening descriptors. Open connections continue; new ones wait or are closed."""
    num_refused = 0
    with no_more_descriptors([context.stage.pid_of("scheduler")]):
        until_s = time.monotonic() + STARVED_S
        while time.monotonic() < until_s:
            num_refused += not await context.stage.answers(context.probe, PROBE_TIMEOUT_S)
    back_s = await context.stage.served(context.probe)
    await context.stage.whole()
    return FaultObservations(back_s=back_s, figures=[counted("new connections refused", num_refused, "connections")])


async def starve_worker(context: FaultContext, name: str = "decode-1") -> FaultObservations:
    """Cuts a rank's connections while it and its worker's parent process cannot open descriptors."""
    check_can_cut()
    await context.stage.busy(name)
    pids = [context.stage.pid_of(name), *context.stage.rank_pids(name)]
    others = [pid for each in ("prefill-0", "prefill-1") for pid in context.stage.rank_pids(each)]
    with no_more_descriptors(pids):
        num_cut = cut(between(others, context.stage.rank_pids(name)))
        await asyncio.sleep(STARVED_S)
    await context.stage.whole()
    return FaultObservations(figures=[counted("connections cut", num_cut, "connections")])


@contextlib.contextmanager
def no_more_descriptors(pids: list[int]) -> Iterator[None]:
    """Lowers each process's soft limit of descriptors to its first unused number, and restores it afterwards."""
    before = {}
    for pid in pids:
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        first_free = next(number for number in itertools.count() if number not in used)
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        before[pid] = soft
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        yield
    finally:
        for pid, soft in before.items():
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


CONNECTION_FAULTS: dict[str, Fault] = {
    "flap": Fault("links cut and healed, again and again", flap),
    "descriptors-scheduler": Fault("no descriptor left at the scheduler", starve_scheduler),
    "descriptors-worker": Fault("no descriptor left at a decode instance", starve_worker),
}
