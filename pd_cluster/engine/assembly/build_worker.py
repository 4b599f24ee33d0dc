"""Builds a worker: engine, links, stages, mailbox, loop. Each part is complete before the next part receives it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from pd_cluster import extra_table
from pd_cluster.devices.device import Device
from pd_cluster.engine.assembly.build_engine import build_core, endpoint_of, legs_of, weights_of
from pd_cluster.engine.assembly.build_ranks import (
    Inbox,
    device_of,
    meet,
    message_handler_of,
    on_mate_lost,
    on_rank_lost,
)
from pd_cluster.engine.assembly.build_stages import stages_of
from pd_cluster.engine.assembly.build_unit import unit_of
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.link_ends import LaneEnds, LocalEndpoint, LocalLanes
from pd_cluster.engine.lifecycle.availability import Availability
from pd_cluster.engine.lifecycle.engine_sleep import EngineSleep
from pd_cluster.engine.lifecycle.engine_weights import EngineWeights
from pd_cluster.engine.lifecycle.weight_copies import WeightCopies
from pd_cluster.engine.lifecycle.worker_drain import WorkerDrain
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.lead_runner import LeadRunner, Watch
from pd_cluster.engine.ranks.rank_channel import Channel
from pd_cluster.engine.ranks.rank_cores import HostCores
from pd_cluster.engine.ranks.remote_lanes import RankLanes
from pd_cluster.engine.stages.weight_transfers import TransferEnds, WeightTransfers
from pd_cluster.engine.unit.unit_rounds import UnitRounds
from pd_cluster.engine.worker.mailbox_reader import MailboxReader
from pd_cluster.engine.worker.processor_watch import watch_processors
from pd_cluster.engine.worker.worker import Cores, Worker
from pd_cluster.engine.worker.worker_loop import Loop
from pd_cluster.errors import called
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.net.peer_admission import Life
from pd_cluster.process_messages import RankReport
from pd_cluster.settings.process_configs import WorkerConfig
from pd_cluster.transport.link_factory import Transports


def build_worker(
    config: WorkerConfig, inbox: Inbox, tell: Callable[[RankReport], None]
) -> tuple[Loop, Mailbox, RankReport]:
    """Binds and loads a worker of any role, and opens its mailbox; the caller runs the loop.

    `tell` sends the parent two kinds of reports: that a member of a unit is forming, and which rank or member is lost
    and why. Other threads may call it, because this process may end before its loop could report the loss.
    """
    device = device_of(config)
    if config.role == "encode":
        mailbox_reader = MailboxReader(inbox)
        build_encoder = extra_table.load(extra_table.ENCODER, f"{called('role')} encode")
        encoder, mailbox, report = build_encoder(config, device, inbox.put)
        mailbox_reader.serve(encoder)
        mailbox.start(mailbox_reader)
        return Loop(inbox, encoder), mailbox, report
    return _build_engine(config, device, inbox, tell)


def _build_engine(
    config: WorkerConfig, device: Device, inbox: Inbox, tell: Callable[[RankReport], None]
) -> tuple[Loop, Mailbox, RankReport]:
    wait_s, tell_lost = config.timeouts.collective_timeout_s, partial(_tell_lost, tell)
    followers = [Channel(fd, to.FromFollower, wait_s) for fd in config.ranks.fds]
    cores, group = HostCores(config, device), meet(config, device)
    mailbox = Mailbox(Life(config.name, config.epoch), "worker", config.credentials, config.timeouts)
    control_port = mailbox.bind(config.bind_address, config.kv_port_range)
    unit = unit_of(config, mailbox, device, partial(on_mate_lost, inbox, tell_lost))
    mailbox_reader = MailboxReader(inbox, None if unit is None else unit.mates)

    def begin() -> None:
        mailbox.start(mailbox_reader)
        tell(RankReport(state="forming", control_port=control_port, public_key=mailbox.public_key))

    exchange = None if unit is None else unit.group(config, device, begin)
    with cores.loading():
        core, runner = build_core(config.engine, group, followers, device, exchange)
    cores.share(runner.threads)
    if processors := core.sampler.processors:
        watch_processors(processors.calls, mailbox, tell_lost)
    endpoint = endpoint_of(config, runner)
    local = LocalLanes(endpoint, Transports(config, runner.pools), mailbox.send)
    lanes: LaneEnds = local
    if isinstance(lead := core.runner, LeadRunner):  # there are followers
        lanes = RankLanes(local, followers, lambda: lead.progress, mailbox.send, inbox.put)
        lost = partial(on_rank_lost, config.ranks.size, wait_s, inbox, tell_lost)
        Watch(followers, message_handler_of(lead, lanes, inbox.put), lost, wait_s).start()
    context = HandoverContext(
        endpoint,
        mailbox,
        lanes,
        inbox.put,
        config.timeouts,
        kv_open_links=config.kv_open_links,
        pulls_prefixes=config.pulls_prefixes,
        max_quarantined_share=config.kv_max_quarantine,
    )
    legs = legs_of(config, core, runner, context)
    is_host = not device.is_accelerator
    all_ranks = core.runner if isinstance(core.runner, LeadRunner) else runner
    sleep = EngineSleep(all_ranks.sleep if is_host and unit is None else None, core.scheduler.forget)
    ends = TransferEnds(mailbox.send, mailbox.payload_sender, config.bind_address)
    transfers = WeightTransfers(runner.model_folder, ends, WeightCopies())
    weights = EngineWeights(weights_of(core, runner, all_ranks, transfers) if unit is None else None)
    drain = WorkerDrain(config.timeouts.drain_timeout_s, context.clock)
    state = Availability(drain, sleep, weights=weights)
    stages = [*stages_of(config, core, runner, legs, context), transfers]
    if unit is not None and exchange is not None:
        exchange.loaded()
        stages.append(UnitRounds(unit.mates, exchange, all_ranks, legs, state.drain, inbox.put))
    worker = Worker(core, legs, stages, state, context, Cores(is_host, runner.threads.rest))
    report = _ready(
        RankReport(state="ready", control_port=control_port, public_key=mailbox.public_key), endpoint, runner
    )
    mailbox_reader.serve(worker)
    if unit is None:
        mailbox.start(mailbox_reader)
    return Loop(inbox, worker), mailbox, report


def _ready(report: RankReport, endpoint: LocalEndpoint, runner: ModelRunner) -> RankReport:
    return msgspec.structs.replace(
        report,
        model_identity=runner.model_identity,
        numerics=runner.numerics,
        max_model_len=runner.max_model_len,
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        layout=endpoint.layouts[0].to_info(),
        num_blocks=endpoint.num_blocks[0],
        further_layouts=[layout.to_info() for layout in endpoint.layouts[1:]],
    )


def _tell_lost(tell: Callable[[RankReport], None], why: str) -> None:
    tell(RankReport(state="failed", lost=why))
