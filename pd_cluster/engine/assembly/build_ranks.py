"""Builds the ranks of an instance. Each joins the others on its device; rank 0 handles the followers' messages."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable

from pd_cluster.devices.device import Device, bind, use
from pd_cluster.engine.assembly.build_legs import endpoint_of
from pd_cluster.engine.handover.engine_events import Event, StopEngine
from pd_cluster.engine.handover.links.link_ends import LocalLanes
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.follower import Follower, send_to_rank_0
from pd_cluster.engine.ranks.hang_watchdog import end_within
from pd_cluster.engine.ranks.rank_channel import Channel
from pd_cluster.engine.ranks.rank_cores import HostCores
from pd_cluster.engine.stages.tier_stores import open_tiers
from pd_cluster.engine.unit.unit_meeting import follower_group
from pd_cluster.errors import InstanceLost
from pd_cluster.model.parallel.rank_group import Group, Rendezvous, join
from pd_cluster.model.runner.load_runner import load_runner
from pd_cluster.settings.engine_config import SYMMETRIC_SUMS
from pd_cluster.settings.process_configs import WorkerConfig
from pd_cluster.transport.link_factory import Transports

log = logging.getLogger(__name__)
MATE_END_S = 1.0  # how long a step may take to end after a member of the unit is lost
Inbox = queue.SimpleQueue[Event]


def device_of(config: WorkerConfig) -> Device:
    """Selects the device of this rank, makes this process use it, and returns it. Raises ConfigError."""
    device = bind(config.engine.device, config.device_ids, config.ranks.rank)
    if config.environment and not device.is_accelerator and not config.ranks.rank:  # as serve_command.py does for NPUs
        log.warning(
            "this instance computes on the CPU: its rank table has an address for each device, as NPUs have, but "
            "no NPU is visible here; --device=npu makes this an error, --device=cpu confirms it"
        )
    use(device)
    return device


def meet(config: WorkerConfig, device: Device) -> Group:
    """Waits until all ranks of this instance have joined and returns their group. Raises InstanceLost."""
    ranks = config.ranks
    place = Rendezvous(ranks.store, ranks.rank, ranks.size, config.timeouts.collective_timeout_s)
    return join(place, device, config.engine.deterministic, SYMMETRIC_SUMS in config.engine.cuda_speedups)


def build_follower(config: WorkerConfig) -> Follower:
    """Loads a rank other than 0; the caller starts and runs it."""
    device = device_of(config)
    cores, group, unit = HostCores(config, device), meet(config, device), follower_group(config, device)
    with cores.loading():
        runner = load_runner(config.engine, group, device, unit)
    if unit is not None:
        unit.loaded()
    cores.share(runner.threads)
    channel = Channel(config.ranks.fds[0], to.ToFollower, config.timeouts.collective_timeout_s)
    for contents in open_tiers(config, runner, lambda report: channel.send(to.TierReport(report))):
        channel.send(to.TierReport(contents))
    transports = Transports(config, runner.pools)
    return Follower(runner, channel, LocalLanes(endpoint_of(config, runner), transports, send_to_rank_0(channel)))


def on_mate_lost(inbox: Inbox, tell_lost: Callable[[str], None], why: str) -> None:
    """Stops the engine's loop. If the loop waits for the lost member, a timer ends the processes of all ranks."""
    inbox.put(StopEngine(InstanceLost(why)))
    end_within(MATE_END_S)
    log.error("%s", why)  # logged here, because the loop may first finish a step
    tell_lost(why)
