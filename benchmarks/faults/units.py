"""Faults of `benchmarks faults --units`, in a cluster of a prefill and a decode unit. Each has two members of two
ranks.

The loss of any process of a member ends its whole unit, which then forms again. The model has experts and random
weights.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import torch

from benchmarks.experts import SHARED, SMALL, SPARSE
from benchmarks.faults.fault_types import Fault, FaultContext, FaultObservations
from benchmarks.peers.make_model import write
from benchmarks.random_models import model_of
from pd_cluster.settings.timeouts import Timeouts

SIZE, TP_SIZE = 2, 2
LAUNCH: dict[str, Any] = {
    "unit_sizes": {"prefill": SIZE, "decode": SIZE},
    "tp_sizes": {"prefill": TP_SIZE, "decode": TP_SIZE},
}
FEW_EXPERTS: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KILLED_GOAL_S = 4.0
STOPPED_GOAL_S = Timeouts().dead_after_s + 2.0


def make_unit_model(folder: Path) -> str:
    """Writes a model of two layers with eight experts each. Returns its folder."""
    torch.manual_seed(0)
    write(model_of("glm4_moe", {**SHARED, **SMALL, **SPARSE, **FEW_EXPERTS}), folder)
    return str(folder)


def unit_of(name: str) -> list[str]:
    role = name.partition("-")[0]
    return [f"{role}-{rank}" for rank in range(SIZE)]


async def lose_unit(context: FaultContext, name: str, at_s: float) -> FaultObservations:
    """Waits until all members of the instance's unit are lost, and then until they are back."""
    detected_s = await context.stage.lost(*unit_of(name)) - at_s
    await context.stage.whole()
    return FaultObservations([detected_s])


async def kill_member(context: FaultContext, name: str) -> FaultObservations:
    """Kills all ranks of a member."""
    await context.stage.busy(name)
    return await lose_unit(context, name, context.stage.kill_ranks(name))


async def kill_follower(context: FaultContext, name: str) -> FaultObservations:
    """Kills the second rank of a member."""
    await context.stage.busy(name)
    return await lose_unit(context, name, context.stage.kill_rank(name, 1))


async def kill_parent(context: FaultContext, name: str) -> FaultObservations:
    await context.stage.busy(name)
    return await lose_unit(context, name, context.stage.kill(name))


async def stop_member(context: FaultContext, name: str) -> FaultObservations:
    """Stops all processes of a member, and continues them after the other members have ended."""
    await context.stage.busy(name)
    at_s = context.stage.stop(name)
    try:
        detected_s = await context.stage.lost(*unit_of(name)) - at_s
        await asyncio.sleep(max(0.0, context.stall_s - detected_s))
    finally:
        context.stage.go_on(name)
    await context.stage.whole()
    return FaultObservations([detected_s])


async def rolling_restart_of_units(context: FaultContext) -> FaultObservations:
    """Ends a member of each unit by SIGTERM. The whole unit then drains and starts again."""
    for name in ("prefill-0", "decode-0"):
        old_pids = {mate: context.stage.pid_of(mate) for mate in unit_of(name)}
        context.stage.kill(name, signal.SIGTERM)
        for mate, pid in old_pids.items():
            await context.stage.new_pid(mate, pid)
        await context.stage.whole()
    return FaultObservations()


UNIT_FAULTS: dict[str, Fault] = {
    "unit-member": Fault("kill -9 of a member's ranks", lambda m: kill_member(m, "decode-1"), KILLED_GOAL_S),
    "unit-follower": Fault("kill -9 of a follower", lambda m: kill_follower(m, "decode-0"), KILLED_GOAL_S),
    "unit-parent": Fault("kill -9 of a member's parent", lambda m: kill_parent(m, "prefill-1"), KILLED_GOAL_S),
    "unit-stall": Fault("SIGSTOP of a member", lambda m: stop_member(m, "decode-1"), STOPPED_GOAL_S),
    "unit-rolling": Fault("SIGTERM of a member of each unit", rolling_restart_of_units),
}
