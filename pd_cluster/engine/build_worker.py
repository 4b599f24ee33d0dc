"""Puts a worker together: engine, links, stages, mailbox, loop. The order is that of the values: each is finished."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from pd_cluster.devices.device import Device
from pd_cluster.engine.adapter_thread import AdapterSource, AdapterThread, reader_of
from pd_cluster.engine.adapters import WorkerAdapters
from pd_cluster.engine.availability import Availability
from pd_cluster.engine.build import build_core, device_of, legs_of, limits_of, meet, side_of
from pd_cluster.engine.cache_news import CacheNews
from pd_cluster.engine.drain import WorkerDrain
from pd_cluster.engine.encode.build import build_encoder, terms_of
from pd_cluster.engine.encode.encoders import Encoders, Engine
from pd_cluster.engine.encode.worker import EncodeWorker
from pd_cluster.engine.handover.context import HandoverContext
from pd_cluster.engine.handover.events import Event, StopEngine
from pd_cluster.engine.handover.links import LaneEnds, LocalLanes
from pd_cluster.engine.hang import end_within
from pd_cluster.engine.host_cores import HostCores
from pd_cluster.engine.kv_events import KVEvents
from pd_cluster.engine.legs import Legs
from pd_cluster.engine.loop import Loop
from pd_cluster.engine.mail import Mailroom
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.channel import Channel
from pd_cluster.engine.ranks.follower import Follower, send_to_rank_0
from pd_cluster.engine.ranks.lead import LeadRunner, Watch
from pd_cluster.engine.ranks.remote_lanes import RankLanes
from pd_cluster.engine.sleep import EngineSleep
from pd_cluster.engine.stage import Stage
from pd_cluster.engine.step.core import EngineCore
from pd_cluster.engine.tier_stores import open_tiers, tiers_of
from pd_cluster.engine.worker import Cores, Worker
from pd_cluster.errors import InstanceLost
from pd_cluster.model.load_runner import load_runner
from pd_cluster.model.runner import ModelRunner
from pd_cluster.net.admission import Life
from pd_cluster.net.event_publisher import EventPublisher
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.reports import RankReport
from pd_cluster.settings.config import WorkerConfig
from pd_cluster.transport.factory import Transports

log = logging.getLogger(__name__)
Inbox = queue.SimpleQueue[Event]


def build_follower(config: WorkerConfig) -> Follower:
    """Loads a rank other than 0; the caller starts and runs it."""
    device = device_of(config)
    cores, group = HostCores(config, device), meet(config, device)
    with cores.loading():
        runner = load_runner(config.engine, group, device)
    cores.share(runner.threads)
    channel = Channel(config.ranks.fds[0], to.ToFollower, config.timeouts.collective_timeout_s)
    for contents in open_tiers(config, runner, lambda report: channel.send(to.TierReport(report))):
        channel.send(to.TierReport(contents))
    transports = Transports(config, runner.pool)
    return Follower(runner, channel, LocalLanes(side_of(config, runner), transports, send_to_rank_0(channel)))


def build_worker(
    config: WorkerConfig, inbox: Inbox, tell_lost: Callable[[str], None]
) -> tuple[Loop, Mailbox, Mailroom, RankReport]:
    """Binds and loads a worker of any role; the caller starts the mailbox with the mailroom, and runs the loop.

    `tell_lost` receives which rank is lost and why, on another thread: this process may end before its loop reports it.
    """
    device = device_of(config)
    job: Worker | EncodeWorker
    if config.role == "encode":
        job, mailbox, report = build_encoder(config, device, inbox.put)
    else:
        job, mailbox, report = _build_engine(config, device, inbox, tell_lost)
    return Loop(inbox, job), mailbox, Mailroom(inbox, job), report


def _build_engine(
    config: WorkerConfig, device: Device, inbox: Inbox, tell_lost: Callable[[str], None]
) -> tuple[Worker, Mailbox, RankReport]:
    wait_s = config.timeouts.collective_timeout_s
    followers = [Channel(fd, to.FromFollower, wait_s) for fd in config.ranks.fds]
    cores, group = HostCores(config, device), meet(config, device)
    with cores.loading():
        core, runner = build_core(config.engine, group, followers, device)
    cores.share(runner.threads)
    mailbox = Mailbox(Life(config.name, config.epoch), "worker", config.credentials, config.timeouts)
    control_port = mailbox.bind(config.bind_address, config.kv_port_range)
    side = side_of(config, runner)
    local = LocalLanes(side, Transports(config, runner.pool), mailbox.send)
    lanes: LaneEnds = local
    if isinstance(core.runner, LeadRunner):  # there are followers
        lanes = _lead(config, core.runner, followers, local, mailbox, inbox, tell_lost)
    most = int(config.kv_max_quarantine * core.scheduler.blocks.num_blocks)
    context = HandoverContext(
        side,
        mailbox,
        lanes,
        inbox.put,
        config.timeouts,
        kv_open_links=config.kv_open_links,
        max_quarantined_blocks=most,
    )
    legs = legs_of(config, core, runner, context)
    stages = list(_stages(config, core, runner, legs, context))
    is_host = not device.is_accelerator
    lead = core.runner if isinstance(core.runner, LeadRunner) else runner
    sleep = EngineSleep(lead.sleep if is_host else None, core.scheduler.blocks.forget)
    state = Availability(WorkerDrain(config.timeouts.drain_timeout_s, context.clock), sleep)
    worker = Worker(core, legs, stages, state, context, Cores(is_host, runner.threads.rest))
    report = RankReport(
        state="ready",
        control_port=control_port,
        public_key=mailbox.public_key,
        model_identity=runner.model_identity,
        numerics=runner.numerics,
        max_model_len=runner.max_model_len,
        layout=runner.pool.layout.to_info(),
        num_blocks=runner.pool.num_blocks,
    )
    return worker, mailbox, report


def _stages(
    config: WorkerConfig, core: EngineCore, runner: ModelRunner, legs: Legs, context: HandoverContext
) -> Iterator[Stage]:
    """Yields the stages in the order in which legs pass them; those that only follow are last."""
    lead = core.runner if isinstance(core.runner, LeadRunner) else None
    yield adapters_of(config, runner, lead, legs, context)
    contents = open_tiers(config, runner, context.report)
    if runner.tiers and (tier := core.scheduler.blocks.tier) is not None:
        yield tiers_of(config, core.scheduler, tier, runner, lead or runner)
        for each in contents:
            context.report(each)
    if runner.tower is not None:
        engine = Engine(lambda: runner.tower, core.scheduler, limits_of(runner), legs.table)
        terms = replace(terms_of(config, runner.model_identity, runner.numerics), crossing=context.side.crossing)
        yield Encoders(engine, terms, context.post, context.report, context.clock, config.timeouts)
    yield CacheNews(context.post, core.scheduler.blocks)
    if (events := config.kv_events) is not None and events.is_on:
        publisher = EventPublisher(events, config.credentials)
        yield KVEvents(core.scheduler.blocks, runner.pool.layout.block_size, publisher)


def adapters_of(
    config: WorkerConfig, runner: ModelRunner, lead: LeadRunner | None, legs: Legs, context: HandoverContext
) -> WorkerAdapters:
    """`lead`: of several ranks."""
    settings, source = config.engine.adapters, None
    if settings.are_wanted:
        keeper = lead.adapters if lead is not None else runner.held
        thread = AdapterThread(keeper, reader_of(settings), context.report)
        source = AdapterSource(keeper, thread, runner.held.named, settings.max_cpu_loras)
    return WorkerAdapters(source, context.post.send, legs.variants, context.clock)


def _lead(
    config: WorkerConfig,
    runner: LeadRunner,
    followers: list[Channel],
    local: LocalLanes,
    mailbox: Mailbox,
    inbox: Inbox,
    tell_lost: Callable[[str], None],
) -> RankLanes:
    """Listens to the followers, and watches whether they are alive."""
    lanes = RankLanes(local, followers, lambda: runner.progress, mailbox.send, inbox.put)
    wait_s = config.timeouts.collective_timeout_s
    lost = partial(a_rank_is_lost, config.ranks.size, wait_s, inbox, tell_lost)

    def hear(message: to.OfLanes | to.LoadedAdapter | to.TierReport) -> None:
        if isinstance(message, to.LoadedAdapter):
            runner.adapters.hear(message)
        elif isinstance(message, to.TierReport):
            inbox.put(message.report)
        else:
            lanes.hear(message)

    Watch(followers, hear, lost, wait_s).start()
    return lanes


def a_rank_is_lost(
    size: int, wait_s: float, inbox: Inbox, tell_lost: Callable[[str], None], rank: int, why: str
) -> None:
    """Ends the engine's loop, or the process if the loop waits for that rank and never finishes its round.

    Nothing else would: NCCL's watchdog does not cover calls that a CUDA graph replays.
    """
    error = InstanceLost(f"rank {rank} of {size} {why}")
    inbox.put(StopEngine(error))
    end_within(2 * wait_s)
    tell_lost(str(error))
