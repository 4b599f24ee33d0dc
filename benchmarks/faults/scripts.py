"""The faults of `benchmarks faults`: scripts for a cluster of two prefill and two decode instances under load.

Every script leaves the cluster whole, and reports its observations. Knows nothing of the load.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.faults.leaving import aborts, resets, slow_readers
from benchmarks.faults.terms import Fault, Means, Seen
from pd_cluster.errors import PdClusterError

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
BREATH_S = 1.0  # after a kill, until requests are everywhere again
DEATH_GOAL_S, STALL_GOAL_S, SERVED_GOAL_S = 1.0, 4.0, 5.0
SCHEDULER_STALL_S, SCHEDULER_PAUSE_S = 5.0, 3.6
NUM_PAUSES, NUM_LIVES = 4, 3


async def lose(means: Means, *names: str, ranks: bool = False) -> float:
    """Kills instances at the same moment, amid their work: their parents, or their ranks alone.

    Returns how soon the loss is seen.
    """
    await means.stage.busy(names[0])
    kill = means.stage.kill_ranks if ranks else means.stage.kill
    at_s = min([kill(name) for name in names])
    detected_s = await means.stage.lost(*names) - at_s
    await means.stage.whole()
    return detected_s


async def kill(means: Means, role: str) -> Seen:
    """Kills the parent of the first instance, and, once it is back, the rank process of the second."""
    first_s = await lose(means, f"{role}-0")
    await asyncio.sleep(BREATH_S)
    return Seen([first_s, await lose(means, f"{role}-1", ranks=True)])


async def kill_several(means: Means, *names: str) -> Seen:
    return Seen([await lose(means, *names)])


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
    return Seen([await lose(means, name) for _ in range(NUM_LIVES)])


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
    return Seen([await lose(means, "decode-1")])


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


async def pause_scheduler(means: Means, pause_s: float, count: int = 1) -> Seen:
    """Stops it for long enough that the workers give it up."""
    for _ in range(count):
        means.stage.kill("scheduler", signal.SIGSTOP)
        try:
            await asyncio.sleep(min(pause_s, means.stall_s))
        finally:
            means.stage.kill("scheduler", signal.SIGCONT)
        await means.stage.whole()
    return Seen()


async def endure(means: Means, what: Callable[[Means], Awaitable[str]]) -> Seen:
    """Runs clients that must harm nobody else. Raises PdClusterError if a process ended."""
    before = await means.stage.lives()
    print(await what(means), flush=True)
    await means.stage.whole()
    if ended := [name for name, pids in (await means.stage.lives()).items() if pids != before.get(name)]:
        raise PdClusterError(f"{', '.join(ended)} ended and was started again")
    return Seen()


def _fault(title: str, script: Callable[..., Awaitable[Seen]], *arguments: Any, goal_s: float | None = None) -> Fault:
    return Fault(title, lambda means: script(means, *arguments), goal_s)


def _death(title: str, script: Callable[..., Awaitable[Seen]], *arguments: Any) -> Fault:
    return _fault(title, script, *arguments, goal_s=DEATH_GOAL_S)


FAULTS: dict[str, Fault] = {
    "kill-prefill": _death("kill -9 of a prefill instance", kill, "prefill"),
    "kill-decode": _death("kill -9 of a decode instance", kill, "decode"),
    "kill-both": _death("kill -9 of one of each at once", kill_several, "decode-0", "prefill-0"),
    "kill-parent": _death("kill -9 of the parent alone", kill_several, "decode-1"),
    "stop-parent": _death("SIGSTOP of a parent, kill -9 of its rank", stop_parent_kill_rank, "decode-0"),
    "kill-loading": _death("kill -9, and of each life that loads", kill_while_loading, "prefill-1"),
    "kill-again": _death("kill -9 of one instance again and again", kill_again_and_again, "decode-1"),
    "kill-ranks": _fault("kill -9 of all ranks at once", kill_all_ranks),
    "kill-preloader": _death("kill -9 of the preloader, then of a decode instance", kill_preloader),
    "stall-decode": _fault("SIGSTOP of a decode instance", stall, "decode-1", goal_s=STALL_GOAL_S),
    "stall-prefill": _fault("SIGSTOP of a prefill instance", stall, "prefill-1", goal_s=STALL_GOAL_S),
    "rolling": _fault("rolling restart of the workers", rolling_restart),
    "kill-scheduler": _fault("kill -9 of the scheduler", restart_scheduler),
    "stall-scheduler": _fault("SIGSTOP of the scheduler", pause_scheduler, SCHEDULER_STALL_S),
    "pause-scheduler": _fault(
        "SIGSTOP of the scheduler again and again", pause_scheduler, SCHEDULER_PAUSE_S, NUM_PAUSES
    ),
    "resets": _fault("connections that are reset at any byte", endure, resets),
    "aborts": _fault("clients that leave after a few tokens", endure, aborts),
    "slow-readers": _fault("clients that hardly read", endure, slow_readers),
}
