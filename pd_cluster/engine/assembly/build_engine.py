"""Builds an engine without peers: model, pool, scheduler. build_worker.py adds links, mailbox and stages."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pd_cluster.costs.linear_costs import StepCost
from pd_cluster.devices.device import Device
from pd_cluster.engine.assembly.build_drafting import drafting_of
from pd_cluster.engine.assembly.build_processors import processors_of
from pd_cluster.engine.ranks.lead_runner import LeadRunner
from pd_cluster.engine.ranks.rank_channel import Channel
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.scheduling.state_checkpoints import KeepRule
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.engine.step.step_timing import StepTiming
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.group_rule import within
from pd_cluster.kv.host_tier import HostTier, LoadCost
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.model.layers.expert_share import ExpertUnit
from pd_cluster.model.parallel.rank_group import Group
from pd_cluster.model.runner.load_runner import load_runner
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.model.sampling.grammar_masks import Guides
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.text.grammar import Compiler


def build_core(
    config: EngineConfig,
    group: Group | None = None,
    followers: Sequence[Channel] = (),
    device: Device | None = None,
    unit: ExpertUnit | None = None,
) -> tuple[EngineCore, ModelRunner]:
    """Loads an engine that generates without peers, together with its followers if it has any."""
    runner = load_runner(config, group, device, unit)
    with contextlib.ExitStack() as undo:
        undo.callback(runner.let_go)
        core = _core_of(config, runner, followers)
        undo.pop_all()
    return core, runner


def _core_of(config: EngineConfig, runner: ModelRunner, followers: Sequence[Channel]) -> EngineCore:
    layout, num_kept = runner.pool.layout, runner.swap.num_kept
    block_size, scope = layout.block_size, PrefixScope(runner.model_identity, runner.numerics, layout.draft_head)
    prefix = scope if config.enable_prefix_caching else None
    tier = HostTier(num_kept, runner.swap.num_blocks, LoadCost(block_size)) if num_kept and prefix is not None else None
    timing, groups = StepTiming(), _groups_of(runner, tier)
    sees_all = any(not (each.rule.window or each.rule.is_state) for each in groups)
    scheduler = StepScheduler(
        groups,
        StepSizes(
            block_size,
            runner.max_num_seqs,
            runner.max_num_batched_tokens,
            config.adapters.max_loras if config.adapters.enable_lora else 0,
            keeps_images_whole=runner.tower is not None and runner.tower.rules.sees_whole,
            cost=(lambda: timing.cost) if sees_all else StepCost,  # if no group sees all tokens, contexts are bounded
        ),
        prefix,
        keep_rule_of(config, block_size),
    )
    guides = Guides(lambda: Compiler(runner.tokenizer_file, runner.vocab_size, runner.eos_token_ids))
    processors = processors_of(config, runner)
    drafting = None if processors else drafting_of(config.speculation, scheduler, guides, runner)
    lead = LeadRunner(runner, followers) if followers else runner
    return EngineCore(lead, scheduler, timing, guides, drafting, processors)


def keep_rule_of(config: EngineConfig, block_size: int) -> KeepRule:
    interval = config.mamba_block_size or -(-KeepRule().interval // block_size) * block_size
    return KeepRule(config.mamba_cache_mode, interval)


def _groups_of(runner: ModelRunner, tier: HostTier | None) -> list[LayerGroup]:
    """Returns the model's groups of layers.

    If there is only one group, its rule is the sliding window that was found at load, if any.
    """
    found = []
    for at, (pool, swap) in enumerate(zip(runner.pools, runner.swaps, strict=True)):
        rule = pool.layout.holds if len(runner.pools) > 1 else within(runner.window)
        blocks = BlockPool(pool.num_blocks, rests=runner.device.is_accelerator, tier=None if at else tier)
        found.append(LayerGroup(blocks, rule, BlockPool(swap.num_blocks)))
    return found
