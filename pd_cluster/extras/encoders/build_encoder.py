"""Builds an encoder: tower, socket, mailbox. Also builds the stage with which a prefill instance uses encoders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.engine.assembly.build_legs import limits_of
from pd_cluster.engine.handover.engine_events import Event
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.legs.legs import Legs
from pd_cluster.engine.lifecycle.worker_drain import WorkerDrain
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.extras.encoders.encode_worker import EncodeWorker, TowerSource
from pd_cluster.extras.encoders.encoder_links import EncoderTerms
from pd_cluster.extras.encoders.encoder_stage import Encoders, Engine
from pd_cluster.extras.encoders.feature_files import FeatureEndpoint
from pd_cluster.model.loading.model_loader import resolve_dtype
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.runner.loaded_parts import load_tower_part
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.net.peer_admission import Life
from pd_cluster.numerics import Numerics
from pd_cluster.process_messages import RankReport
from pd_cluster.settings.process_configs import WorkerConfig
from pd_cluster.transport.transport_interface import Checksum


def terms_of(config: WorkerConfig, model_identity: str, numerics: Numerics) -> EncoderTerms:
    times, checksum = config.timeouts, Checksum(config.kv.checksum)
    place = FeatureEndpoint(config.bind_address, times.connect_timeout_s, times.transfer_timeout_s, checksum)
    return EncoderTerms(model_identity, numerics, place, config.kv_transport)


def encoder_stages(
    config: WorkerConfig, core: EngineCore, runner: ModelRunner, legs: Legs, context: HandoverContext
) -> Iterator[Encoders]:
    """Yields the stage that asks encoders for features, if the model takes images."""
    if runner.tower is None:
        return
    engine = Engine(lambda: runner.tower, core.scheduler, limits_of(runner), legs.table)
    terms = replace(
        terms_of(config, runner.model_identity, runner.numerics), network_policy=context.endpoint.network_policy
    )
    yield Encoders(engine, terms, context.post, context.report, context.clock, config.timeouts)


def build_encoder(
    config: WorkerConfig, device: Device, report: Callable[[Event], None]
) -> tuple[EncodeWorker, Mailbox, RankReport]:
    """Binds and loads an encoder of a model that takes images. `report` passes an event to the loop's thread.

    Raises ModelError for weights that do not match.
    """
    engine = config.engine
    checkpoint = Checkpoint.of(engine)
    dtype = resolve_dtype(engine.dtype, checkpoint, device)
    load = partial(load_tower_part, checkpoint, engine, dtype, device, SingleRank())
    tower = load()
    mailbox = Mailbox(Life(config.name, config.epoch), "worker", config.credentials, config.timeouts)
    control_port = mailbox.bind(config.bind_address, config.kv_port_range)
    numerics = Numerics(device=device.kind, dtype=dtype, hf_overrides=checkpoint.hf_overrides)
    worker = EncodeWorker(
        TowerSource(tower, None if device.is_accelerator else load),
        terms_of(config, checkpoint.identity, numerics),
        mailbox,
        report,
        engine.mm_encoder_cache_tokens,
        WorkerDrain(config.timeouts.drain_timeout_s, time.monotonic),
    )
    ready = RankReport(
        state="ready",
        control_port=control_port,
        public_key=mailbox.public_key,
        model_identity=checkpoint.identity,
        numerics=numerics,
    )
    return worker, mailbox, ready
