"""Builds the parts of a worker that decide whether it accepts requests: drain, sleep, changes of weights."""

from __future__ import annotations

from collections.abc import Callable

from pd_cluster.engine.assembly.build_weights import weights_of
from pd_cluster.engine.lifecycle.availability import Availability
from pd_cluster.engine.lifecycle.engine_sleep import EngineSleep
from pd_cluster.engine.lifecycle.engine_weights import EngineWeights
from pd_cluster.engine.lifecycle.weight_copies import WeightCopies
from pd_cluster.engine.lifecycle.worker_drain import WorkerDrain
from pd_cluster.engine.ranks.lead_runner import LeadRunner
from pd_cluster.engine.stages.weight_transfers import TransferEnds, WeightTransfers
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.settings.process_configs import WorkerConfig


def all_ranks_of(core: EngineCore, runner: ModelRunner) -> LeadRunner | ModelRunner:
    """Returns rank 0's runner, with its followers if there are any."""
    return core.runner if isinstance(core.runner, LeadRunner) else runner


def transfers_of(config: WorkerConfig, runner: ModelRunner, mailbox: Mailbox) -> WeightTransfers:
    ends = TransferEnds(mailbox.send, mailbox.payload_sender, config.bind_address)
    return WeightTransfers(runner.model_folder, ends, WeightCopies())


def availability_of(
    config: WorkerConfig,
    core: EngineCore,
    runner: ModelRunner,
    transfers: WeightTransfers,
    clock: Callable[[], float],
    is_member: bool,
) -> Availability:
    """`is_member`: whether the worker is in a unit; then it neither sleeps nor changes its weights."""
    all_ranks = all_ranks_of(core, runner)
    can_sleep = not (is_member or runner.device.is_accelerator)
    sleep = EngineSleep(all_ranks.sleep if can_sleep else None, core.scheduler.forget)
    weights = EngineWeights(None if is_member else weights_of(core, runner, all_ranks, transfers))
    return Availability(WorkerDrain(config.timeouts.drain_timeout_s, clock), sleep, weights=weights)
