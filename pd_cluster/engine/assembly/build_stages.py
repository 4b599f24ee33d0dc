"""Builds the stages of a worker, in the order in which legs pass them."""

from __future__ import annotations

from collections.abc import Iterator

from pd_cluster import extra_table
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.legs.legs import Legs
from pd_cluster.engine.ranks.lead_runner import LeadRunner
from pd_cluster.engine.stages.adapter_loader import AdapterSource, AdapterThread, reader_of
from pd_cluster.engine.stages.adapter_stage import WorkerAdapters
from pd_cluster.engine.stages.cache_reports import CacheReports
from pd_cluster.engine.stages.kv_event_publisher import KVEvents
from pd_cluster.engine.stages.prefix_pulls import PrefixPulls
from pd_cluster.engine.stages.stage import Stage
from pd_cluster.engine.stages.tier_stores import open_tiers, tiers_of
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.net.event_publisher import EventPublisher
from pd_cluster.settings.process_configs import WorkerConfig


def stages_of(
    config: WorkerConfig, core: EngineCore, runner: ModelRunner, legs: Legs, context: HandoverContext
) -> Iterator[Stage]:
    """Yields the stages in the order in which legs pass them; stages that never hold a leg are last."""
    lead = core.runner if isinstance(core.runner, LeadRunner) else None
    yield adapters_of(config, runner, lead, legs, context)
    contents = open_tiers(config, runner, context.report)
    if runner.tiers and (tier := core.scheduler.blocks.tier) is not None:
        yield tiers_of(config, core.scheduler, tier, runner, lead or runner)
        for each in contents:
            context.report(each)
    for name in filter(extra_table.is_installed, extra_table.STAGES):
        yield from extra_table.load(name)(config, core, runner, legs, context)
    if context.pulls_prefixes:
        yield PrefixPulls(core.scheduler, legs, context.clock)
    yield CacheReports(context.post, core.scheduler.known)
    if (events := config.kv_events) is not None and events.is_on:
        publisher = EventPublisher(events, config.credentials)
        yield KVEvents(core.scheduler.known, runner.pool.layout.block_size, publisher)


def adapters_of(
    config: WorkerConfig, runner: ModelRunner, lead: LeadRunner | None, legs: Legs, context: HandoverContext
) -> WorkerAdapters:
    """Returns the stage that loads adapters. `lead`: rank 0's runner if the instance has several ranks."""
    settings, source = config.engine.adapters, None
    if settings.are_wanted:
        keeper = lead.adapters if lead is not None else runner.held
        thread = AdapterThread(keeper, reader_of(settings), context.report)
        source = AdapterSource(keeper, thread, runner.held.named, settings.max_cpu_loras)
    return WorkerAdapters(source, context.post.send, legs.variants, context.clock)
