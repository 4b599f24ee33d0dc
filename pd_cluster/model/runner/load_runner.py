"""Builds a runner step by step: plan, weights, pool, adapters, proof, graphs.

Each step uses the results of the earlier ones and returns a complete object.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from pd_cluster.checkpoints.weight_files import num_weights
from pd_cluster.devices.device import Device, resolve, use
from pd_cluster.devices.process_groups import buffers_nbytes
from pd_cluster.kv.kv_layout import KVLayout, num_lanes
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.swap_space import SwapSpace
from pd_cluster.model.draft.draft_plan import with_draft
from pd_cluster.model.draft.load_draft_head import check_head
from pd_cluster.model.graphs.decode_graphs import sizes_of
from pd_cluster.model.graphs.prompt_graphs import sizes_up_to
from pd_cluster.model.graphs.step_graphs import capture_graphs, check_prompt_graphs, why_eager
from pd_cluster.model.kernels.cuda_speedups import numerics_name
from pd_cluster.model.language_model.adapter_devices import place_adapters
from pd_cluster.model.language_model.cache_declaration import has_states, layouts_of
from pd_cluster.model.language_model.causal_lm import CausalLM, PlainCausalLM
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.layers.expert_share import ExpertUnit
from pd_cluster.model.loading.load_proof import prove
from pd_cluster.model.loading.unlisted_model_check import prove_lengths, trial
from pd_cluster.model.loading.weight_sanity import warn_of_chance
from pd_cluster.model.parallel.rank_group import Group, SingleRank
from pd_cluster.model.planning.group_pool_sizing import GroupNeeds, GroupSizes, group_sizes
from pd_cluster.model.planning.layer_group_limits import check_states, splits_windows
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.planning.pool_sizing import (
    MemoryBeside,
    left_on,
    num_host_cache_blocks,
    num_pool_blocks,
    num_swap_blocks,
)
from pd_cluster.model.planning.pools_before_loading import check_before_loading, pool_layouts
from pd_cluster.model.runner.loaded_parts import LoadedParts, load_parts
from pd_cluster.model.runner.memory_profile import (
    check_pictures_fit,
    decode_workspace_nbytes,
    lists_nbytes,
    nbytes_of_adapters,
    nbytes_of_graphs,
    peak_of_a_step,
    peak_of_images,
)
from pd_cluster.model.runner.model_adapters import ModelAdapters
from pd_cluster.model.runner.model_runner import KVMemory, LoadProof, ModelRunner
from pd_cluster.native.malloc_settings import keep_what_is_freed
from pd_cluster.numerics import Numerics
from pd_cluster.settings.engine_config import PROMPT_GRAPHS, EngineConfig

log = logging.getLogger(__name__)


def load_runner(
    config: EngineConfig, group: Group | None = None, device: Device | None = None, unit: ExpertUnit | None = None
) -> ModelRunner:
    """Loads a runner. `group`: the ranks that share the model; all of them load their runners at the same time.

    `unit`: this rank's part of the exchange between instances that share the experts. All these instances load at
    the same time, too.

    Raises ConfigError, and ModelError for a model that must not be served; on an error all pools are closed.
    """
    device = device or resolve(config.device)
    use(device)
    if not device.is_accelerator:
        keep_what_is_freed()
    plan = with_draft(LoadPlan.of(config, group or SingleRank(), device, unit))
    check_head(plan)
    check_before_loading(plan)
    with contextlib.ExitStack() as undo:
        with trial(plan.checkpoint):
            parts = load_parts(plan)
            layouts, twin = _layouts_for(plan, parts), _twin_layout(plan.draft, parts.draft)
            eager = why_eager(plan, parts.model, layouts[0]) if device.is_accelerator else ""
            memory = _allocate(plan, layouts, twin, _peak_nbytes(plan, parts, layouts, eager), undo)
            held = _load_adapters(plan, parts, layouts[0])
            proof = _prove(plan, parts.model, memory.pools)
        if plan.draft is not None and parts.draft is not None and memory.twin is not None:
            with trial(plan.draft.checkpoint):
                _prove(plan.draft, parts.draft, (memory.twin,))
        graphs = capture_graphs(plan, parts.model, memory.pools[0], eager)
        runner = ModelRunner(plan, parts, memory, held, proof, graphs)
        plan.group.loaded()
        undo.pop_all()
    return runner


def _layouts_for(plan: LoadPlan, parts: LoadedParts) -> tuple[KVLayout, ...]:
    """Returns the layouts of this rank's pools. Raises ConfigError if the settings do not suit the model."""
    model, group = parts.model, plan.group
    if has_states(parts.caches):
        check_states(plan, isinstance(model, FusedCausalLM))
    identity = "" if parts.head is None else parts.head.identity
    own = layouts_of(parts.caches, plan.block_size, plan.dtype, identity, splits_windows(plan))
    warn_of_chance(model, plan.checkpoint, own, plan.device, group)
    if parts.tower is not None:
        check_pictures_fit(parts.tower.rules, plan.max_num_batched_tokens, plan.config.max_num_seqs)
    return pool_layouts(plan, parts.caches, identity)


def _twin_layout(plan: LoadPlan | None, model: CausalLM | None) -> KVLayout | None:
    """Returns the layout of the draft model's pool; None without a draft model."""
    return None if plan is None or model is None else _layouts_for(plan, LoadedParts(model, None))[0]


def _peak_nbytes(plan: LoadPlan, parts: LoadedParts, layouts: Sequence[KVLayout], eager: str) -> int:
    """Returns the most bytes that everything except the pools takes on an accelerator. `eager`: see `why_eager`."""
    config, device, model, num_seqs = plan.config, plan.device, parts.model, plan.config.max_num_seqs
    peak = peak_of_a_step(model, layouts, plan.max_num_batched_tokens, num_seqs, plan.max_model_len, device)
    layout = layouts[0]
    peak = max(peak, peak_of_images(parts.tower, device))
    check_prompt_graphs(model, plan.speedups)
    if device.is_accelerator and not eager:
        if PROMPT_GRAPHS in plan.speedups:
            most = sizes_up_to(num_seqs)[-1]
            peak += nbytes_of_graphs(model, layout, most.num_seqs, device, most.num_tokens)
        peak += nbytes_of_graphs(model, layout, sizes_of(config.graph_sizes, num_seqs)[-1], device)
    if device.is_accelerator:
        peak += nbytes_of_adapters(model.config, config.adapters, plan.dtype)
        peak += lists_nbytes(model, layout, plan.max_num_batched_tokens, num_seqs, plan.max_model_len)
    peak += decode_workspace_nbytes(model, layout, num_seqs, plan.max_model_len)
    num_pairs = sum(num_lanes(each, config.paired_tp_sizes) for each in layouts)
    if nbytes := buffers_nbytes(device, num_pairs, not plan.is_alone, plan.exchanges_rows):
        log.info("%.2f GiB are reserved for communicators, %d of them for KV transfers", nbytes / 2**30, num_pairs)
    return peak + nbytes


def _allocate(
    plan: LoadPlan, layouts: Sequence[KVLayout], twin: KVLayout | None, peak_nbytes: int, undo: contextlib.ExitStack
) -> KVMemory:
    """Allocates the same number of blocks on each rank, limited by the rank with the least memory, and as many for the
    draft model; `undo` closes the pools.
    """
    config, least = plan.config, plan.group.least
    if len(layouts) > 1:
        return _allocate_groups(plan, layouts, peak_nbytes, undo)
    (layout,) = layouts
    twin_nbytes = 0 if twin is None else twin.block_nbytes
    num_blocks = least(
        num_pool_blocks(config, layout, plan.max_model_len, plan.device, MemoryBeside(peak_nbytes, twin_nbytes))
    )
    log.info("KV pool: %s", GroupSizes((num_blocks,), (), config.max_num_seqs).describe(layouts))
    pool = undo.enter_context(KVPool(layout, num_blocks, plan.device))
    num_kept = least(num_host_cache_blocks(config, layout))
    swap = SwapSpace(pool, least(num_swap_blocks(config, layout)), num_kept)
    twin_pool = None if twin is None else undo.enter_context(KVPool(twin, num_blocks, plan.device))
    return KVMemory((pool,), (swap,), config.max_num_seqs, twin_pool)


def _allocate_groups(
    plan: LoadPlan, layouts: Sequence[KVLayout], peak_nbytes: int, undo: contextlib.ExitStack
) -> KVMemory:
    """Does the same as `_allocate` for a model with several groups of layers."""
    least, device = plan.group.least, plan.device
    left = left_on(device, plan.config, peak_nbytes) if device.is_accelerator else None
    sizes = group_sizes(GroupNeeds(plan.config, layouts, plan.max_model_len, plan.max_num_batched_tokens, left))
    log.info("KV pools: %s", sizes.describe(layouts))
    pools = [
        undo.enter_context(KVPool(layout, least(num_blocks), plan.device))
        for layout, num_blocks in zip(layouts, sizes.nums_blocks, strict=True)
    ]
    swaps = [SwapSpace(pool, least(count)) for pool, count in zip(pools, sizes.nums_swapped, strict=True)]
    return KVMemory(tuple(pools), tuple(swaps), least(sizes.max_num_seqs))


def _load_adapters(plan: LoadPlan, parts: LoadedParts, layout: KVLayout) -> ModelAdapters:
    """Returns the object that holds the adapters, and loads the adapters that the settings name.

    Only the model has adapters; its draft head has none.
    """
    settings, device, model = plan.config.adapters, plan.device, parts.model
    if device.is_accelerator and model.adapters is not None:
        place_adapters(model.adapters.places, settings, device, plan.dtype)
    held = ModelAdapters(model, layout.without_head, settings, device)
    held.load_named(settings)
    return held


def _prove(plan: LoadPlan, model: CausalLM, pools: Sequence[KVPool]) -> LoadProof:
    """Raises ModelError for a model that must not be served."""
    checkpoint = plan.checkpoint
    window = prove(model, pools, plan.dtype)
    if checkpoint.is_unproven:
        assert isinstance(model, PlainCausalLM)  # see load_model
        size = num_weights(checkpoint.path)
        prove_lengths(model, pools[0], plan.max_model_len, size, checkpoint.rope, plan.dtype)
    return LoadProof(window, numerics_of(plan, model))


def numerics_of(plan: LoadPlan, model: CausalLM) -> Numerics:
    """Returns a description of everything that affects the loaded model's numerics."""
    config, checkpoint, on_host = plan.config, plan.checkpoint, not plan.device.is_accelerator
    kernels = numerics_name(model.attention, plan.speedups, model.prompt_states)
    coded = checkpoint.quantization
    return Numerics(
        device=plan.device.kind,
        dtype=plan.dtype,
        attention_backend=config.attention_backend if on_host else kernels,
        deterministic=config.deterministic,
        quantization="" if coded is None else coded.numerics_name(on_host),
        quantize_head=checkpoint.head_scheme,
        kv_cache_dtype=plan.kv_dtype,
        hf_overrides=checkpoint.hf_overrides,
        rope=checkpoint.rope,
        key_order=model.key_order,
        bf16_way=model.bf16_way,
        logits_processors=", ".join(config.logits_processors),
    )
