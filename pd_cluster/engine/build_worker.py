"""Puts a worker together: engine, links, stages, mailbox, loop. The order is that of the values: each is finished."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from pd_cluster.devices.device import Device
from pd_cluster.engine.availability import Availability
from pd_cluster.engine.build import build_core, legs_of, side_of
from pd_cluster.engine.build_ranks import Inbox, a_mate_is_lost, a_rank_is_lost, device_of, ears_of, meet
from pd_cluster.engine.build_stages import stages_of
from pd_cluster.engine.build_unit import unit_of
from pd_cluster.engine.drain import WorkerDrain
from pd_cluster.engine.encode.build import build_encoder
from pd_cluster.engine.handover.context import HandoverContext
from pd_cluster.engine.handover.links import LaneEnds, LocalLanes, Side
from pd_cluster.engine.host_cores import HostCores
from pd_cluster.engine.loop import Loop
from pd_cluster.engine.mail import Mailroom
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.channel import Channel
from pd_cluster.engine.ranks.lead import LeadRunner, Watch
from pd_cluster.engine.ranks.remote_lanes import RankLanes
from pd_cluster.engine.sleep import EngineSleep
from pd_cluster.engine.unit.rounds import UnitRounds
from pd_cluster.engine.worker import Cores, Worker
from pd_cluster.model.runner import ModelRunner
from pd_cluster.net.admission import Life
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.reports import RankReport
from pd_cluster.settings.config import WorkerConfig
from pd_cluster.transport.factory import Transports


def build_worker(
    config: WorkerConfig, inbox: Inbox, tell: Callable[[RankReport], None]
) -> tuple[Loop, Mailbox, RankReport]:
    """Binds and loads a worker of any role, and opens its mailbox; the caller runs the loop.

    `tell` takes reports to the parent: that a member of a unit forms, and which rank or member is lost and why, on
    another thread, because this process may end before its loop reports it.
    """
    device = device_of(config)
    if config.role == "encode":
        mailroom = Mailroom(inbox)
        encoder, mailbox, report = build_encoder(config, device, inbox.put)
        mailroom.serve(encoder)
        mailbox.start(mailroom)
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
    unit = unit_of(config, mailbox, device, partial(a_mate_is_lost, inbox, tell_lost))
    mailroom = Mailroom(inbox, None if unit is None else unit.mates)

    def begin() -> None:
        mailbox.start(mailroom)
        tell(RankReport(state="forming", control_port=control_port, public_key=mailbox.public_key))

    exchange = None if unit is None else unit.group(config, device, begin)
    with cores.loading():
        core, runner = build_core(config.engine, group, followers, device, exchange)
    cores.share(runner.threads)
    side = side_of(config, runner)
    local = LocalLanes(side, Transports(config, runner.pools), mailbox.send)
    lanes: LaneEnds = local
    if isinstance(lead := core.runner, LeadRunner):  # there are followers
        lanes = RankLanes(local, followers, lambda: lead.progress, mailbox.send, inbox.put)
        lost = partial(a_rank_is_lost, config.ranks.size, wait_s, inbox, tell_lost)
        Watch(followers, ears_of(lead, lanes, inbox.put), lost, wait_s).start()
    context = HandoverContext(
        side,
        mailbox,
        lanes,
        inbox.put,
        config.timeouts,
        kv_open_links=config.kv_open_links,
        max_quarantined_share=config.kv_max_quarantine,
    )
    legs = legs_of(config, core, runner, context)
    is_host = not device.is_accelerator
    all_ranks = core.runner if isinstance(core.runner, LeadRunner) else runner
    sleep = EngineSleep(all_ranks.sleep if is_host and unit is None else None, core.scheduler.forget)
    state = Availability(WorkerDrain(config.timeouts.drain_timeout_s, context.clock), sleep)
    stages = list(stages_of(config, core, runner, legs, context))
    if unit is not None and exchange is not None:
        exchange.loaded()
        stages.append(UnitRounds(unit.mates, exchange, all_ranks, legs, state.drain, inbox.put))
    worker = Worker(core, legs, stages, state, context, Cores(is_host, runner.threads.rest))
    report = _ready(RankReport(state="ready", control_port=control_port, public_key=mailbox.public_key), side, runner)
    mailroom.serve(worker)
    if unit is None:
        mailbox.start(mailroom)
    return Loop(inbox, worker), mailbox, report


def _ready(report: RankReport, side: Side, runner: ModelRunner) -> RankReport:
    return msgspec.structs.replace(
        report,
        model_identity=runner.model_identity,
        numerics=runner.numerics,
        max_model_len=runner.max_model_len,
        max_num_seqs=runner.max_num_seqs,
        layout=side.layouts[0].to_info(),
        num_blocks=side.num_blocks[0],
        further_layouts=[layout.to_info() for layout in side.layouts[1:]],
    )


def _tell_lost(tell: Callable[[RankReport], None], why: str) -> None:
    tell(RankReport(state="failed", lost=why))
