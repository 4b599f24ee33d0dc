"""The faults of `benchmarks faults`: scripts for a cluster of two prefill and two decode instances under load.

Every script waits until the cluster is complete again, and reports its observations. Knows nothing of the load.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.faults.fault_types import Fault, FaultContext, FaultObservations
from benchmarks.faults.leaving_clients import aborts, resets, slow_readers
from pd_cluster.errors import PdClusterError

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
BREATH_S = 1.0  # pause after a kill, until all instances have requests again
DEATH_GOAL_S, STALL_GOAL_S, SERVED_GOAL_S = 1.0, 4.0, 5.0
SCHEDULER_STALL_S, SCHEDULER_PAUSE_S = 5.0, 3.6
NUM_PAUSES, NUM_LIVES = 4, 3


async def lose(context: FaultContext, *names: str, ranks: bool = False) -> float:
    """Kills instances at the same moment, while they work: their parents, or only their ranks.

    Returns the time until the loss is seen.
    """
    await context.stage.busy(names[0])
    kill = context.stage.kill_ranks if ranks else context.stage.kill
    at_s = min([kill(name) for name in names])
    detected_s = await context.stage.lost(*names) - at_s
    await context.stage.whole()
    return detected_s


async def kill(context: FaultContext, role: str) -> FaultObservations:
    """Kills the first instance's parent and, when that instance is back, the second instance's rank process."""
    first_s = await lose(context, f"{role}-0")
    await asyncio.sleep(BREATH_S)
    return FaultObservations([first_s, await lose(context, f"{role}-1", ranks=True)])


async def kill_several(context: FaultContext, *names: str) -> FaultObservations:
    return FaultObservations([await lose(context, *names)])


async def stop_parent_kill_rank(context: FaultContext, name: str) -> FaultObservations:
    """Stops a parent, so that it cannot report the death of its rank; kills the rank; continues the parent."""
    await context.stage.busy(name)
    context.stage.kill(name, signal.SIGSTOP)
    try:
        at_s = context.stage.kill_ranks(name)
        detected_s = await context.stage.lost(name) - at_s
    finally:
        context.stage.kill(name, signal.SIGCONT)
    await context.stage.whole()
    return FaultObservations([detected_s])


async def kill_while_loading(context: FaultContext, name: str) -> FaultObservations:
    """Kills an instance, and then kills it again several times before it has finished loading."""
    await context.stage.busy(name)
    pid, at_s = context.stage.pid_of(name), context.stage.kill(name)
    detected_s = await context.stage.lost(name) - at_s
    for _ in range(NUM_LIVES):
        await context.stage.new_pid(name, pid)
        pid = context.stage.pid_of(name)
        context.stage.kill(name)
    await context.stage.new_pid(name, pid)
    await context.stage.whole()
    return FaultObservations([detected_s])


async def kill_again_and_again(context: FaultContext, name: str) -> FaultObservations:
    """Kills the same instance several times, each time when it is back and has work."""
    return FaultObservations([await lose(context, name) for _ in range(NUM_LIVES)])


async def kill_all_ranks(context: FaultContext) -> FaultObservations:
    """Kills all rank processes at the same moment. Requests in progress wait until a rank is back; new requests wait
    for a few seconds, and then fail because no instance is available.
    """
    await context.stage.busy("decode-0")
    for name in WORKERS:
        context.stage.kill_ranks(name)
    back_s = await context.stage.served(context.probe)
    await context.stage.whole()
    return FaultObservations(back_s=back_s)


async def kill_preloader(context: FaultContext) -> FaultObservations:
    """Kills the preloader, without which ranks continue; then kills an instance, which starts a new preloader."""
    await context.stage.busy("prefill-1")
    context.stage.kill_preloader()
    await asyncio.sleep(BREATH_S)
    return FaultObservations([await lose(context, "decode-1")])


async def stall(context: FaultContext, name: str) -> FaultObservations:
    """Stops all processes of an instance for a while, and then continues them."""
    await context.stage.busy(name)
    at_s = context.stage.stop(name)
    try:
        detected_s = await context.stage.lost(name) - at_s
        await asyncio.sleep(max(0.0, context.stall_s - detected_s))
    finally:
        context.stage.go_on(name)
    await context.stage.whole()
    return FaultObservations([detected_s])


async def rolling_restart(context: FaultContext) -> FaultObservations:
    for name in WORKERS:
        old_pid = context.stage.pid_of(name)
        context.stage.kill(name, signal.SIGTERM)
        await context.stage.new_pid(name, old_pid)
        await context.stage.whole()
    return FaultObservations()


async def restart_scheduler(context: FaultContext) -> FaultObservations:
    old_pid = context.stage.pid_of("scheduler")
    context.stage.kill("scheduler")
    started_s = await context.stage.new_pid("scheduler", old_pid)
    back_s = await context.stage.served(context.probe)
    await context.stage.whole()
    return FaultObservations(served_s=[back_s - started_s], back_s=back_s)


async def pause_scheduler(context: FaultContext, pause_s: float, count: int = 1) -> FaultObservations:
    """Stops the scheduler for so long that the workers consider it dead."""
    for _ in range(count):
        context.stage.kill("scheduler", signal.SIGSTOP)
        try:
            await asyncio.sleep(min(pause_s, context.stall_s))
        finally:
            context.stage.kill("scheduler", signal.SIGCONT)
        await context.stage.whole()
    return FaultObservations()


async def endure(context: FaultContext, what: Callable[[FaultContext], Awaitable[str]]) -> FaultObservations:
    """Runs clients that must not affect others. Raises PdClusterError if a process of the cluster ends."""
    before = await context.stage.lives()
    print(await what(context), flush=True)
    await context.stage.whole()
    if ended := [name for name, pids in (await context.stage.lives()).items() if pids != before.get(name)]:
        raise PdClusterError(f"{', '.join(ended)} ended and was started again")
    return FaultObservations()


def _fault(
    title: str, script: Callable[..., Awaitable[FaultObservations]], *arguments: Any, goal_s: float | None = None
) -> Fault:
    return Fault(title, lambda context: script(context, *arguments), goal_s)


def _death(title: str, script: Callable[..., Awaitable[FaultObservations]], *arguments: Any) -> Fault:
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
