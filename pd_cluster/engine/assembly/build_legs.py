"""Builds the parts of a worker that begin legs and hand them over, and the report of what it has loaded."""

from __future__ import annotations

import msgspec

from pd_cluster.engine.handover.handover import HandoverTerms
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.link_ends import LocalEndpoint
from pd_cluster.engine.handover.links.network_policy import NetworkPolicy
from pd_cluster.engine.legs.legs import Legs
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.engine.step.engine_limits import EngineLimits
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.net.peer_admission import peer_key
from pd_cluster.process_messages import RankReport
from pd_cluster.settings.process_configs import WorkerConfig


def limits_of(runner: ModelRunner) -> EngineLimits:
    images = None if runner.tower is None else runner.tower.rules
    return EngineLimits(runner.vocab_size, runner.max_model_len, runner.model.rope_limit, runner.held.variants, images)


def endpoint_of(config: WorkerConfig, runner: ModelRunner) -> LocalEndpoint:
    own = peer_key(config.name, config.epoch)
    return LocalEndpoint(
        own,
        config.credentials.secret,
        runner.model_identity,
        runner.numerics,
        tuple(pool.layout for pool in runner.pools),
        tuple(pool.num_blocks for pool in runner.pools),
        config.kv,
        NetworkPolicy(own, config.trusts_network),
    )


def legs_of(config: WorkerConfig, core: EngineCore, runner: ModelRunner, context: HandoverContext) -> Legs:
    terms = HandoverTerms(config.role == "prefill", config.engine.growth_tokens, runner.vocab_size)
    return Legs.of(context, core, limits_of(runner), terms)


def ready_report(report: RankReport, endpoint: LocalEndpoint, runner: ModelRunner) -> RankReport:
    """Returns the report with what other instances need to know."""
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
