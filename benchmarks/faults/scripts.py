"""The faults of `benchmarks faults`: scripts for a cluster of two prefill and two decode instances under load.

Every script leaves the cluster whole, and reports its observations. Knows nothing of the load.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

from benchmarks.faults.frames import frames
from benchmarks.faults.leaving import aborts, resets, slow_readers
from benchmarks.faults.terms import Fault, Means, Seen
from pd_cluster.errors import PdClusterError

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
BREATH_S = 1.0  # after a kill, until requests are everywhere again
DEATH_GOAL_S, STALL_GOAL_S, SERVED_GOAL_S = 1.0, 4.0, 5.0
SCHEDULER_STALL_S, SCHEDULER_PAUSE_S = 5.0, 3.6
NUM_PAUSES, NUM_LIVES = 4, 3


async def kill(means: Means, role: str) -> Seen:
    """Kills the parent of the first instance, and, once it is back, the rank process of the second."""
    detected_s = []
    for name, kill_it in ((f"{role}-0", means.stage.kill), (f"{role}-1", means.stage.kill_ranks)):
        await means.stage.busy(name)
        at_s = kill_it(name)
        detected_s.append(await means.stage.lost(name) - at_s)
        await means.stage.whole()
        await asyncio.sleep(BREATH_S)
    return Seen(detected_s)


async def kill_parent_of_one(means: Means, name: str) -> Seen:
    """Kills a parent; its ranks end with it."""
    await means.stage.busy(name)
    at_s = means.stage.kill(name)
    detected_s = await means.stage.lost(name) - at_s
    await means.stage.whole()
    return Seen([detected_s])


async def stop_parent_kill_rank(means: Means, name: str) -> Seen:
    """Stops a parent, which cannot report its rank's death, and continues it: it starts the rank again."""
    await means.stage.busy(name)
    means.stage.kill(name, signal.SIGSTOP)
    try:
        at_s = means.stage.kill_ranks(name)
        detected_s = await means.stage.lost(name) - at_s
    finally:
        means.stage.kill(name, signal.SIGCONT)
    await means.stage.whole()
    return Seen([detected_s])


async def kill_while_loading(means: Means, name: str) -> Seen:
    """Kills each later life before it serves."""
    await means.stage.busy(name)
    pid, at_s = means.stage.pid_of(name), means.stage.kill(name)
    detected_s = await means.stage.lost(name) - at_s
    for _ in range(NUM_LIVES):
        await means.stage.new_pid(name, pid)
        pid = means.stage.pid_of(name)
        means.stage.kill(name)
    await means.stage.new_pid(name, pid)
    await means.stage.whole()
    return Seen([detected_s])


async def kill_again_and_again(means: Means, name: str) -> Seen:
    """Kills the same instance as soon as it is back and has work."""
    detected_s = []
    for _ in range(NUM_LIVES):
        await means.stage.busy(name)
        at_s = means.stage.kill(name)
        detected_s.append(await means.stage.lost(name) - at_s)
        await means.stage.whole()
    return Seen(detected_s)


async def kill_all_ranks(means: Means) -> Seen:
    """Kills every rank process at the same moment. Requests in progress wait until one is back; new ones wait a few
    seconds, and then fail because no instance is available.
    """
    await means.stage.busy("decode-0")
    for name in WORKERS:
        means.stage.kill_ranks(name)
    back_s = await means.stage.served(means.probe)
    await means.stage.whole()
    return Seen(back_s=back_s)


async def kill_preloader(means: Means) -> Seen:
    """Kills the preloader: ranks continue without it, and an instance that dies then gets ranks from a new one."""
    await means.stage.busy("prefill-1")
    means.stage.kill_preloader()
    await asyncio.sleep(BREATH_S)
    at_s = means.stage.kill("decode-1")
    detected_s = await means.stage.lost("decode-1") - at_s
    await means.stage.whole()
    return Seen([detected_s])


async def kill_two(means: Means) -> Seen:
    """Kills a prefill and a decode instance at the same moment: one of each is left."""
    await means.stage.busy("decode-0")
    at_s = means.stage.kill("prefill-0")
    means.stage.kill("decode-0")
    detected_s = await means.stage.lost("prefill-0", "decode-0") - at_s
    await means.stage.whole()
    return Seen([detected_s])


async def stall(means: Means, name: str) -> Seen:
    """Stops all of its processes for a while, and continues them."""
    await means.stage.busy(name)
    at_s = means.stage.stop(name)
    try:
        detected_s = await means.stage.lost(name) - at_s
        await asyncio.sleep(max(0.0, means.stall_s - detected_s))
    finally:
        means.stage.go_on(name)
    await means.stage.whole()
    return Seen([detected_s])


async def rolling_restart(means: Means) -> Seen:
    for name in WORKERS:
        old_pid = means.stage.pid_of(name)
        means.stage.kill(name, signal.SIGTERM)
        await means.stage.new_pid(name, old_pid)
        await means.stage.whole()
    return Seen()


async def restart_scheduler(means: Means) -> Seen:
    old_pid = means.stage.pid_of("scheduler")
    means.stage.kill("scheduler")
    started_s = await means.stage.new_pid("scheduler", old_pid)
    back_s = await means.stage.served(means.probe)
    await means.stage.whole()
    return Seen(served_s=[back_s - started_s], back_s=back_s)


async def stall_scheduler(means: Means) -> Seen:
    """Stops it for long enough that the workers give it up."""
    means.stage.kill("scheduler", signal.SIGSTOP)
    try:
        await asyncio.sleep(min(SCHEDULER_STALL_S, means.stall_s))
    finally:
        means.stage.kill("scheduler", signal.SIGCONT)
    await means.stage.whole()
    return Seen()


async def pause_scheduler(means: Means) -> Seen:
    """Stops it again and again, each time long enough for the workers to give it up."""
    for _ in range(NUM_PAUSES):
        means.stage.kill("scheduler", signal.SIGSTOP)
        try:
            await asyncio.sleep(SCHEDULER_PAUSE_S)
        finally:
            means.stage.kill("scheduler", signal.SIGCONT)
        await means.stage.whole()
    return Seen()


async def endure(means: Means, what: Callable[[Means], Awaitable[str]]) -> Seen:
    """Runs clients or strangers that must harm nobody else. Raises PdClusterError if a process ended."""
    before = await means.stage.lives()
    print(await what(means), flush=True)
    await means.stage.whole()
    if ended := [name for name, pids in (await means.stage.lives()).items() if pids != before.get(name)]:
        raise PdClusterError(f"{', '.join(ended)} ended and was started again")
    return Seen()


FAULTS: dict[str, Fault] = {
    "kill-prefill": Fault("kill -9 of a prefill instance", lambda means: kill(means, "prefill"), DEATH_GOAL_S),
    "kill-decode": Fault("kill -9 of a decode instance", lambda means: kill(means, "decode"), DEATH_GOAL_S),
    "kill-both": Fault("kill -9 of one of each at once", kill_two, DEATH_GOAL_S),
    "kill-parent": Fault(
        "kill -9 of the parent alone", lambda means: kill_parent_of_one(means, "decode-1"), DEATH_GOAL_S
    ),
    "stop-parent": Fault(
        "SIGSTOP of a parent, kill -9 of its rank", lambda means: stop_parent_kill_rank(means, "decode-0"), DEATH_GOAL_S
    ),
    "kill-loading": Fault(
        "kill -9, and of each life that loads", lambda means: kill_while_loading(means, "prefill-1"), DEATH_GOAL_S
    ),
    "kill-again": Fault(
        "kill -9 of the same instance, again and again",
        lambda means: kill_again_and_again(means, "decode-1"),
        DEATH_GOAL_S,
    ),
    "kill-ranks": Fault("kill -9 of all ranks at once", kill_all_ranks),
    "kill-preloader": Fault("kill -9 of the preloader, then of a decode instance", kill_preloader, DEATH_GOAL_S),
    "stall-decode": Fault("SIGSTOP of a decode instance", lambda means: stall(means, "decode-1"), STALL_GOAL_S),
    "stall-prefill": Fault("SIGSTOP of a prefill instance", lambda means: stall(means, "prefill-1"), STALL_GOAL_S),
    "rolling": Fault("rolling restart of the workers", rolling_restart),
    "kill-scheduler": Fault("kill -9 of the scheduler", restart_scheduler),
    "stall-scheduler": Fault("SIGSTOP of the scheduler", stall_scheduler),
    "resets": Fault("connections that are reset at any byte", lambda means: endure(means, resets)),
    "aborts": Fault("clients that leave after a few tokens", lambda means: endure(means, aborts)),
    "slow-readers": Fault("clients that hardly read", lambda means: endure(means, slow_readers)),
    "frames": Fault("garbage at every port", lambda means: endure(means, frames)),
    "pause-scheduler": Fault("SIGSTOP of the scheduler, again and again", pause_scheduler),
}
