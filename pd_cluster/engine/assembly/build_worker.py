"""Builds a worker: engine, links, stages, mailbox, loop. Each part is complete before the next part receives it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pd_cluster import extra_table
from pd_cluster.devices.device import Device
from pd_cluster.engine.assembly.build_availability import all_ranks_of, availability_of, transfers_of
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.assembly.build_lanes import followers_of, lanes_of
from pd_cluster.engine.assembly.build_legs import endpoint_of, legs_of, ready_report
from pd_cluster.engine.assembly.build_ranks import (
    Inbox,
    device_of,
    meet,
    on_mate_lost,
)
from pd_cluster.engine.assembly.build_stages import stages_of
from pd_cluster.engine.assembly.build_unit import unit_of
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.link_ends import LocalLanes
from pd_cluster.engine.ranks.rank_cores import HostCores
from pd_cluster.engine.unit.unit_rounds import UnitRounds
from pd_cluster.engine.worker.mailbox_reader import MailboxReader
from pd_cluster.engine.worker.processor_watch import watch_processors
from pd_cluster.engine.worker.worker import Cores, Worker
from pd_cluster.engine.worker.worker_loop import Loop
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
        build_encoder = extra_table.load(extra_table.ENCODER, "--role encode")
        encoder, mailbox, report = build_encoder(config, device, inbox.put)
        mailbox_reader.serve(encoder)
        mailbox.start(mailbox_reader)
        return Loop(inbox, encoder), mailbox, report
    return _build_engine(config, device, inbox, tell)


def _build_engine(
    config: WorkerConfig, device: Device, inbox: Inbox, tell: Callable[[RankReport], None]
) -> tuple[Loop, Mailbox, RankReport]:
    tell_lost, followers = partial(_tell_lost, tell), followers_of(config)
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
    lanes = lanes_of(config, core, local, mailbox, inbox, tell_lost)
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
    transfers = transfers_of(config, runner, mailbox)
    state = availability_of(config, core, runner, transfers, context.clock, is_member=unit is not None)
    stages = [*stages_of(config, core, runner, legs, context), transfers]
    if unit is not None and exchange is not None:
        exchange.loaded()
        stages.append(UnitRounds(unit.mates, exchange, all_ranks_of(core, runner), legs, state.drain, inbox.put))
    worker = Worker(core, legs, stages, state, context, Cores(not device.is_accelerator, runner.threads.rest))
    report = ready_report(
        RankReport(state="ready", control_port=control_port, public_key=mailbox.public_key), endpoint, runner
    )
    mailbox_reader.serve(worker)
    if unit is None:
        mailbox.start(mailbox_reader)
    return Loop(inbox, worker), mailbox, report


def _tell_lost(tell: Callable[[RankReport], None], why: str) -> None:
    tell(RankReport(state="failed", lost=why))
