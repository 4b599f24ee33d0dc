"""Puts a worker together: model, pool, scheduler, links, mailbox."""

from __future__ import annotations

import queue

from pd_cluster import wire
from pd_cluster.checkpoint import resolve_model
from pd_cluster.config import EngineConfig, WorkerConfig
from pd_cluster.engine.core import EngineCore
from pd_cluster.engine.events import Closed, Event, HandedOver, Mail, Opened, Stop
from pd_cluster.engine.limits import Limits
from pd_cluster.engine.links import Side
from pd_cluster.engine.scheduler import PrefixScope, Scheduler
from pd_cluster.engine.worker import Worker
from pd_cluster.grammar import Compiler
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.mailbox import Mailbox, peer_key
from pd_cluster.model.guided import Guides
from pd_cluster.model.runner import ModelRunner
from pd_cluster.reports import RankReport
from pd_cluster.transport.factory import Transports


def build_core(config: EngineConfig) -> tuple[EngineCore, ModelRunner]:
    """A loaded engine without peers: what one process needs to generate by itself."""
    runner = ModelRunner(config)
    prefix = PrefixScope(runner.model_identity, runner.pool.layout.dtype) if config.enable_prefix_caching else None
    scheduler = Scheduler(
        BlockPool(runner.pool.num_blocks),
        config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        prefix,
        BlockPool(runner.swap.num_blocks),
    )
    tokenizer_file = resolve_model(config.model) / "tokenizer.json"
    guides = Guides(lambda: Compiler(tokenizer_file, runner.vocab_size, runner.eos_token_ids))
    return EngineCore(runner, scheduler, guides=guides), runner


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


def build_worker(config: WorkerConfig, inbox: queue.SimpleQueue[Event]) -> tuple[Worker, Mailbox, RankReport]:
    """A worker that is bound and loaded; the caller starts the mailbox and runs the worker."""
    core, runner = build_core(config.engine)
    handler = _Handler(inbox)
    mailbox = Mailbox(config.name, config.epoch, "worker", config.secret, config.timeouts, handler)
    control_port = mailbox.bind(config.bind_address, config.kv_port_range)
    transports = Transports(config, runner.pool)
    layout = runner.pool.layout
    worker = Worker(
        config,
        core,
        Side(
            peer_key(config.name, config.epoch),
            config.secret,
            runner.model_identity,
            layout,
            runner.pool.num_blocks,
            runner.pool.probe_seed,
            config.kv,
        ),
        Limits(runner.vocab_size, runner.max_model_len),
        mailbox,
        transports,
        inbox,
    )
    handler.worker, handler.mailbox = worker, mailbox
    report = RankReport(
        state="ready",
        control_port=control_port,
        model_identity=runner.model_identity,
        max_model_len=runner.max_model_len,
        layout=layout.to_info(),
        num_blocks=runner.pool.num_blocks,
    )
    return worker, mailbox, report
