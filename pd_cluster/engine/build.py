"""Puts a worker together: model, pool, scheduler, links, mailbox."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from functools import partial

from pd_cluster import wire
from pd_cluster.admission import peer_key
from pd_cluster.config import EngineConfig, WorkerConfig
from pd_cluster.device import Device, bind, use
from pd_cluster.engine import rank_messages as to
from pd_cluster.engine.channel import Channel
from pd_cluster.engine.core import EngineCore
from pd_cluster.engine.events import Closed, Event, HandedOver, Mail, Opened, Stop
from pd_cluster.engine.follower import Follower, send_to_rank_0
from pd_cluster.engine.hang import end_within
from pd_cluster.engine.lead import LeadRunner, Watch
from pd_cluster.engine.limits import Limits
from pd_cluster.engine.links import LaneEnds, LocalLanes, Side
from pd_cluster.engine.remote_lanes import RankLanes
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.engine.worker import Worker
from pd_cluster.errors import InstanceLost
from pd_cluster.grammar import Compiler
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.prefix import PrefixScope
from pd_cluster.mailbox import Mailbox
from pd_cluster.model.guided import Guides
from pd_cluster.model.parallel.group import Group, Rendezvous, join
from pd_cluster.model.runner import ModelRunner
from pd_cluster.reports import RankReport
from pd_cluster.transport.factory import Transports

log = logging.getLogger(__name__)


def build_core(
    config: EngineConfig,
    group: Group | None = None,
    followers: Sequence[Channel] = (),
    device: Device | None = None,
) -> tuple[EngineCore, ModelRunner]:
    """A loaded engine without peers: what generates by itself, together with its followers if it has any."""
    runner = ModelRunner(config, group, device)
    prefix = PrefixScope(runner.model_identity, runner.numerics) if config.enable_prefix_caching else None
    scheduler = Scheduler(
        BlockPool(runner.pool.num_blocks, rests=runner.device.is_accelerator),
        runner.pool.layout.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        prefix,
        BlockPool(runner.swap.num_blocks),
        runner.window,
    )
    guides = Guides(lambda: Compiler(runner.tokenizer_file, runner.vocab_size, runner.eos_token_ids))
    return EngineCore(LeadRunner(runner, followers) if followers else runner, scheduler, guides=guides), runner


def side_of(config: WorkerConfig, runner: ModelRunner) -> Side:
    return Side(
        peer_key(config.name, config.epoch),
        config.credentials.secret,
        runner.model_identity,
        runner.numerics,
        runner.pool.layout,
        runner.pool.num_blocks,
        runner.pool.probe_seed,
        config.kv,
    )


def device_of(config: WorkerConfig) -> Device:
    """This rank's, used from now on. Raises ConfigError."""
    device = bind(config.engine.device, config.device_ids, config.ranks.rank)
    if config.environment and not device.is_accelerator and not config.ranks.rank:  # as serve.py gives to NPUs
        log.warning(
            "this instance computes on the CPU: its rank table gives devices addresses of their own, as NPUs have, but "
            "no NPU is seen here; --device=npu makes that an error, --device=cpu says that it shall be so"
        )
    use(device)
    return device


def meet(config: WorkerConfig, device: Device) -> Group:
    """Where all ranks of this instance are. Raises InstanceLost."""
    ranks = config.ranks
    return join(Rendezvous(ranks.store, ranks.rank, ranks.size, config.timeouts.collective_timeout_s), device)


def build_follower(config: WorkerConfig) -> Follower:
    """A rank other than 0, loaded; the caller starts and runs it."""
    device = device_of(config)
    runner = ModelRunner(config.engine, meet(config, device), device)
    channel = Channel(config.ranks.fds[0], to.ToFollower, config.timeouts.collective_timeout_s)
    transports = Transports(config, runner.pool)
    return Follower(runner, channel, LocalLanes(side_of(config, runner), transports, send_to_rank_0(channel)))


class _Handler:
    """The mailbox's owner: everything becomes an event for the engine's thread, but what must not wait for its step.

    KV headers go straight to their link's thread; whether a transfer still stands is answered at once.
    """

    def __init__(self, inbox: queue.SimpleQueue[Event]) -> None:
        self._inbox = inbox
        self.worker: Worker | None = None
        self.mailbox: Mailbox | None = None

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self._inbox.put(Opened(conn, peer, kind))

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if self.worker is None or self.mailbox is None:
            return  # before the worker is there, nobody has its port
        match body:
            case wire.KVFrame():
                self.worker.in_links.route(conn, body)
            case wire.Confirm(transfer_id):
                held = self.worker.exports.held.take(conn, transfer_id)
                if held:
                    self.worker.tracer.note(transfer_id, "confirmed")
                self.mailbox.send(conn, wire.Confirmed(transfer_id, held))
                if held:
                    self._inbox.put(HandedOver(conn, transfer_id))
            case wire.Credit():
                self.worker.credits.put((conn, body))  # a running step looks here
                self._inbox.put(Mail(conn, peer, body))
            case _:
                self._inbox.put(Mail(conn, peer, body))

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self._inbox.put(Closed(conn, peer, reason))

    def on_fatal(self, error: BaseException) -> None:
        self._inbox.put(Stop(error))

    def load(self) -> wire.Load | None:
        return self.worker.load if self.worker is not None else None


def build_worker(
    config: WorkerConfig, inbox: queue.SimpleQueue[Event], tell_lost: Callable[[str], None]
) -> tuple[Worker, Mailbox, RankReport]:
    """A worker that is bound and loaded; the caller starts the mailbox and runs the worker.

    `tell_lost` is told on another thread which rank is lost, and why: this process may end before it can.
    """
    wait_s = config.timeouts.collective_timeout_s
    followers = [Channel(fd, to.FromFollower, wait_s) for fd in config.ranks.fds]
    device = device_of(config)
    core, runner = build_core(config.engine, meet(config, device), followers, device)
    handler = _Handler(inbox)
    mailbox = Mailbox(config.name, config.epoch, "worker", config.credentials, config.timeouts, handler)
    control_port = mailbox.bind(config.bind_address, config.kv_port_range)
    layout, side = runner.pool.layout, side_of(config, runner)
    local = LocalLanes(side, Transports(config, runner.pool), mailbox.send)
    lanes: LaneEnds = local
    if isinstance(core.runner, LeadRunner):  # there are followers
        lanes = _lead(config, core.runner, followers, local, mailbox, inbox, tell_lost)
    limits = Limits(runner.vocab_size, runner.max_model_len)
    worker = Worker(config, core, side, limits, mailbox, lanes, inbox, shares_cores=not runner.device.is_accelerator)
    handler.worker, handler.mailbox = worker, mailbox
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
    return worker, mailbox, report


def _lead(
    config: WorkerConfig,
    runner: LeadRunner,
    followers: list[Channel],
    local: LocalLanes,
    mailbox: Mailbox,
    inbox: queue.SimpleQueue[Event],
    tell_lost: Callable[[str], None],
) -> RankLanes:
    """Listens to the followers, and to whether they are still there."""
    lanes = RankLanes(local, followers, lambda: runner.progress, mailbox.send, inbox.put)
    wait_s = config.timeouts.collective_timeout_s
    lost = partial(a_rank_is_lost, config.ranks.size, wait_s, inbox, tell_lost)
    Watch(followers, lanes.hear, lost, wait_s).start()
    return lanes


def a_rank_is_lost(
    size: int, wait_s: float, inbox: queue.SimpleQueue[Event], tell_lost: Callable[[str], None], rank: int, why: str
) -> None:
    """Ends the engine's loop, or the process if the loop waits for that rank and does not come round.

    Nothing else would: what watches over NCCL's calls does not know of those that a graph makes again.
    """
    error = InstanceLost(f"rank {rank} of {size} {why}")
    inbox.put(Stop(error))
    end_within(2 * wait_s)
    tell_lost(str(error))
