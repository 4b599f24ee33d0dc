"""Faults of `benchmarks faults` other than signals: cut connections, and exhausted descriptors.

Every script leaves the cluster whole, and reports its observations. Only processes of the cluster are affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import time
from collections.abc import Iterator

from benchmarks.faults.cut import between, check_can_cut, cut
from benchmarks.faults.terms import Fault, Means, Seen
from pd_cluster.tables import counted

NUM_CUTS = 8  # of the links between prefill and decode instances, in turn
AROUND_DEADLINE_S = (2.4, 2.9, 3.1, 3.6)  # pauses, some of which a peer sees as a loss: --dead-after is 3 s
CUT_REST_S = 0.7  # longer than a link's first backoff
STARVED_S = 4.0
PROBE_TIMEOUT_S = 1.0


# ---- links


async def flap(means: Means) -> Seen:
    """Cuts links repeatedly; then pauses one end of them for times around the deadline."""
    check_can_cut()
    num_cut = 0
    pairs = itertools.product((0, 1), (0, 1))
    for prefill, decode in itertools.islice(itertools.cycle(list(pairs)), NUM_CUTS):
        num_cut += await cut_link(means, f"prefill-{prefill}", f"decode-{decode}")
    for name in ("prefill-0", "decode-1"):
        num_cut += cut(between([means.stage.pid_of("scheduler")], means.stage.rank_pids(name)))
        await asyncio.sleep(CUT_REST_S)
        await means.stage.whole()
    for pause_s in AROUND_DEADLINE_S:
        await pause(means, "decode-0", pause_s)
    return Seen(figures=[counted("connections cut", num_cut, "connections")])


async def cut_link(means: Means, prefill: str, decode: str) -> int:
    """Cuts the connections between two instances while KV cache moves. Returns their number."""
    await means.stage.busy(prefill)
    num_cut = cut(between(means.stage.rank_pids(prefill), means.stage.rank_pids(decode)))
    await asyncio.sleep(CUT_REST_S)
    await means.stage.whole()
    return num_cut


async def pause(means: Means, name: str, pause_s: float) -> None:
    means.stage.stop(name)
    try:
        await asyncio.sleep(pause_s)
    finally:
        means.stage.go_on(name)
    await asyncio.sleep(CUT_REST_S)
    await means.stage.whole()


# ---- descriptors


async def starve_scheduler(means: Means) -> Seen:
    """Keeps the scheduler from opening descriptors: open connections continue, new ones wait or are closed."""
    num_refused = 0
    with no_more_descriptors([means.stage.pid_of("scheduler")]):
        until_s = time.monotonic() + STARVED_S
        while time.monotonic() < until_s:
            num_refused += not await means.stage.answers(means.probe, PROBE_TIMEOUT_S)
    back_s = await means.stage.served(means.probe)
    await means.stage.whole()
    return Seen(back_s=back_s, figures=[counted("new connections refused", num_refused, "connections")])


async def starve_worker(means: Means, name: str = "decode-1") -> Seen:
    """Keeps a worker's parent and rank from opening descriptors, and cuts their links meanwhile."""
    check_can_cut()
    await means.stage.busy(name)
    pids = [means.stage.pid_of(name), *means.stage.rank_pids(name)]
    others = [pid for each in ("prefill-0", "prefill-1") for pid in means.stage.rank_pids(each)]
    with no_more_descriptors(pids):
        num_cut = cut(between(others, means.stage.rank_pids(name)))
        await asyncio.sleep(STARVED_S)
    await means.stage.whole()
    return Seen(figures=[counted("connections cut", num_cut, "connections")])


@contextlib.contextmanager
def no_more_descriptors(pids: list[int]) -> Iterator[None]:
    """Lowers each process's soft limit to its first unused number; restores it afterwards."""
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


MEANS_FAULTS: dict[str, Fault] = {
    "flap": Fault("links cut and healed, again and again", flap),
    "descriptors-scheduler": Fault("no descriptor left at the scheduler", starve_scheduler),
    "descriptors-worker": Fault("no descriptor left at a decode instance", starve_worker),
}
