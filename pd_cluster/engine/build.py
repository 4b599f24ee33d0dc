"""Puts a worker together: model, pool, scheduler, links, mailbox."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pd_cluster.devices.device import Device, bind, use
from pd_cluster.engine.encode.build import build_encoder, terms_of
from pd_cluster.engine.encode.encoders import Encoders, Engine
from pd_cluster.engine.encode.mail import EncoderMail
from pd_cluster.engine.encode.worker import EncodeWorker
from pd_cluster.engine.handover.crossing import Crossing
from pd_cluster.engine.handover.events import Event, StopEngine
from pd_cluster.engine.handover.links import LaneEnds, LocalLanes, Side
from pd_cluster.engine.hang import end_within
from pd_cluster.engine.host_cores import HostCores
from pd_cluster.engine.kv_events import KVEvents
from pd_cluster.engine.mail import Mailroom
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.channel import Channel
from pd_cluster.engine.ranks.follower import Follower, send_to_rank_0
from pd_cluster.engine.ranks.lead import LeadRunner, Watch
from pd_cluster.engine.ranks.remote_lanes import RankLanes
from pd_cluster.engine.step.core import EngineCore
from pd_cluster.engine.step.limits import EngineLimits
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.engine.tier_stores import open_tiers, tiers_of
from pd_cluster.engine.worker import Worker
from pd_cluster.errors import InstanceLost
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.host_tier import HostTier, LoadCost
from pd_cluster.kv.prefix import PrefixScope
from pd_cluster.model.parallel.group import Group, Rendezvous, join
from pd_cluster.model.runner import ModelRunner
from pd_cluster.model.sampling.guided import Guides
from pd_cluster.net.admission import peer_key
from pd_cluster.net.event_publisher import EventPublisher
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.reports import RankReport
from pd_cluster.settings.config import WorkerConfig
from pd_cluster.settings.engine import SYMMETRIC_SUMS, EngineConfig
from pd_cluster.text.grammar import Compiler
from pd_cluster.transport.factory import Transports

log = logging.getLogger(__name__)


def build_core(
    config: EngineConfig,
    group: Group | None = None,
    followers: Sequence[Channel] = (),
    device: Device | None = None,
) -> tuple[EngineCore, ModelRunner]:
    """Loads an engine without peers: it generates by itself, together with its followers if there are any."""
    runner = ModelRunner(config, group, device)
    with contextlib.ExitStack() as undo:
        undo.callback(runner.let_go)
        core = _core_of(config, runner, followers)
        undo.pop_all()
    return core, runner


def _core_of(config: EngineConfig, runner: ModelRunner, followers: Sequence[Channel]) -> EngineCore:
    prefix = PrefixScope(runner.model_identity, runner.numerics) if config.enable_prefix_caching else None
    block_size, num_kept = runner.pool.layout.block_size, runner.swap.num_kept
    tier = HostTier(num_kept, runner.swap.num_blocks, LoadCost(block_size)) if num_kept and prefix is not None else None
    scheduler = StepScheduler(
        BlockPool(runner.pool.num_blocks, rests=runner.device.is_accelerator, tier=tier),
        runner.pool.layout.block_size,
        config.max_num_seqs,
        runner.max_num_batched_tokens,
        prefix,
        BlockPool(runner.swap.num_blocks),
        runner.window,
        config.adapters.max_loras if config.adapters.enable_lora else 0,
        keeps_pictures=runner.tower is not None and runner.tower.rules.sees_whole,
    )
    guides = Guides(lambda: Compiler(runner.tokenizer_file, runner.vocab_size, runner.eos_token_ids))
    return EngineCore(LeadRunner(runner, followers) if followers else runner, scheduler, guides=guides)


def limits_of(runner: ModelRunner) -> EngineLimits:
    images = None if runner.tower is None else runner.tower.rules
    return EngineLimits(runner.vocab_size, runner.max_model_len, runner.model.rope_limit, runner.held.variants, images)


def side_of(config: WorkerConfig, runner: ModelRunner) -> Side:
    own = peer_key(config.name, config.epoch)
    return Side(
        own,
        config.credentials.secret,
        runner.model_identity,
        runner.numerics,
        runner.pool.layout,
        runner.pool.num_blocks,
        runner.pool.probe_seed,
        config.kv,
        Crossing(own, config.trusts_network),
    )


def device_of(config: WorkerConfig) -> Device:
    """Selects this rank's device for this process and returns it. Raises ConfigError."""
    device = bind(config.engine.device, config.device_ids, config.ranks.rank)
    if config.environment and not device.is_accelerator and not config.ranks.rank:  # as serve.py gives NPUs
        log.warning(
            "this instance computes on the CPU: its rank table gives devices addresses of their own, as NPUs have, but "
            "no NPU is seen here; --device=npu makes that an error, --device=cpu says that it shall be so"
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
    cores, group = HostCores(config, device), meet(config, device)
    with cores.loading():
        runner = ModelRunner(config.engine, group, device)
    cores.share(runner.threads)
    channel = Channel(config.ranks.fds[0], to.ToFollower, config.timeouts.collective_timeout_s)
    for contents in open_tiers(config, runner, lambda report: channel.send(to.TierReport(report))):
        channel.send(to.TierReport(contents))
    transports = Transports(config, runner.pool)
    return Follower(runner, channel, LocalLanes(side_of(config, runner), transports, send_to_rank_0(channel)))


def build_worker(
    config: WorkerConfig, inbox: queue.SimpleQueue[Event], tell_lost: Callable[[str], None]
) -> tuple[Worker | EncodeWorker, Mailbox, Mailroom | EncoderMail, RankReport]:
    """Binds and loads a worker of any role; the caller starts the mailbox with the mailroom, and runs the worker.

    `tell_lost` receives which rank is lost and why, on another thread: this process may end before its loop reports it.
    """
    if config.role == "encode":
        return build_encoder(config, inbox, device_of(config))
    wait_s = config.timeouts.collective_timeout_s
    followers = [Channel(fd, to.FromFollower, wait_s) for fd in config.ranks.fds]
    device = device_of(config)
    cores, group = HostCores(config, device), meet(config, device)
    with cores.loading():
        core, runner = build_core(config.engine, group, followers, device)
    cores.share(runner.threads)
    mailbox = Mailbox(config.name, config.epoch, "worker", config.credentials, config.timeouts)
    control_port = mailbox.bind(config.bind_address, config.kv_port_range)
    layout, side = runner.pool.layout, side_of(config, runner)
    local = LocalLanes(side, Transports(config, runner.pool), mailbox.send)
    lanes: LaneEnds = local
    if isinstance(core.runner, LeadRunner):  # there are followers
        lanes = _lead(config, core.runner, followers, local, mailbox, inbox, tell_lost)
    shares = not runner.device.is_accelerator
    worker = Worker(
        *(config, core, side, limits_of(runner), mailbox, lanes, inbox),
        shares_cores=shares,
        rest=runner.threads.rest,
    )
    if shares:
        worker.take_sleep((core.runner if isinstance(core.runner, LeadRunner) else runner).sleep)
    if config.engine.adapters.are_wanted:
        keeper = core.runner.adapters if isinstance(core.runner, LeadRunner) else runner.held
        worker.take_adapters(keeper, runner.held.named)
    if (events := config.kv_events) is not None and events.is_on:
        publisher = EventPublisher(events, config.credentials)
        worker.take_kv_events(KVEvents(core.scheduler.blocks, layout.block_size, publisher))
    contents = open_tiers(config, runner, inbox.put)
    if runner.tiers and (tier := core.scheduler.blocks.tier) is not None:
        orders = core.runner if isinstance(core.runner, LeadRunner) else runner
        worker.take_tiers(tiers_of(config, core.scheduler, tier, runner, orders, worker.begin_leg))
        for each in contents:
            inbox.put(each)
    if runner.tower is not None:
        worker.take_encoders(_encoders_for(config, worker, runner, mailbox, side.crossing))
    hears = () if worker.encoders is None else (worker.encoders.links.meet,)
    mailroom = Mailroom(inbox, worker.handover, mailbox.send, worker.tracer.note, lambda: worker.load, *hears)
    report = RankReport(
        state="ready",
        control_port=control_port,
        public_key=mailbox.public_key,
        model_identity=runner.model_identity,
        numerics=runner.numerics,
        max_model_len=runner.max_model_len,
        layout=layout.to_info(),
        num_blocks=runner.pool.num_blocks,
    )
    return worker, mailbox, mailroom, report


def _encoders_for(
    config: WorkerConfig, worker: Worker, runner: ModelRunner, mailbox: Mailbox, crossing: Crossing
) -> Encoders:
    """Returns what lets encoders compute images of a worker's legs."""
    engine = Engine(
        tower=lambda: runner.tower,
        scheduler=worker.core.scheduler,
        limits=limits_of(runner),
        begin=worker.submit,
        is_here=worker.legs.sequences.__contains__,
    )
    terms = replace(terms_of(config, runner.model_identity, runner.numerics), crossing=crossing)
    return Encoders(engine, terms, mailbox, worker.inbox.put, time.monotonic, config.timeouts)


def _lead(
    config: WorkerConfig,
    runner: LeadRunner,
    followers: list[Channel],
    local: LocalLanes,
    mailbox: Mailbox,
    inbox: queue.SimpleQueue[Event],
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
    size: int, wait_s: float, inbox: queue.SimpleQueue[Event], tell_lost: Callable[[str], None], rank: int, why: str
) -> None:
    """Ends the engine's loop, or the process if the loop waits for that rank and never finishes its round.

    Nothing else would: NCCL's watchdog does not cover calls that a CUDA graph replays.
    """
    error = InstanceLost(f"rank {rank} of {size} {why}")
    inbox.put(StopEngine(error))
    end_within(2 * wait_s)
    tell_lost(str(error))
