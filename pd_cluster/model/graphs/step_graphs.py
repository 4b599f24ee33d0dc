"""Captures the graphs of a loaded model, for decode steps and for steps with prompts, or says why it cannot."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pd_cluster.devices.device_streams import capture
from pd_cluster.errors import ConfigError, called
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.graphs.capture_check import obstacle
from pd_cluster.model.graphs.decode_graphs import MAX_ONLY_START_S, MAX_START_S, Capture, DecodeGraphs, GraphRules
from pd_cluster.model.graphs.prompt_graphs import PromptGraphs
from pd_cluster.model.kernels.attention_backend import SDPA
from pd_cluster.model.language_model.adapter_devices import are_in_tables
from pd_cluster.model.language_model.cache_declaration import has_index, has_states
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.settings.engine_config import PROMPT_GRAPHS

log = logging.getLogger(__name__)

ASKING_ROPES = ("dynamic", "longrope")  # for these, transformers compares the step's largest position on the host


class StepGraphs(NamedTuple):
    """Graphs of decode steps without adapters, with adapters, and of steps with prompts; None: such steps run eagerly.

    Ranks that share a model capture and replay the same steps, including the sums over ranks. They use the same graph,
    because the step's arrays determine it and are the same on all ranks.
    """

    decode: DecodeGraphs | None = None
    adapted: DecodeGraphs | None = None
    prompts: PromptGraphs | None = None


def check_prompt_graphs(model: CausalLM, speedups: Sequence[str]) -> None:
    """Raises ConfigError if graphs of steps with prompts are requested but impossible for this model."""
    if PROMPT_GRAPHS not in speedups:
        return
    why = "" if isinstance(model, FusedCausalLM) else "this model's layers are not fused"
    if not why and has_states(model.caches):
        why = "graphs do not support the states of its layers"
    if not why and has_index(model.caches):
        why = "its indexers choose keys by the lengths of a step"
    if not why and model.attention != "Triton":
        why = f"its attention runs on {model.attention}, not on Triton"
    if why:
        raise ConfigError(f"{called('cuda_speedups')} {PROMPT_GRAPHS}: {why}; remove it")


def why_eager(plan: LoadPlan, model: CausalLM, layout: KVLayout) -> str:
    """Returns why an accelerator captures no graphs of this model, or "".

    Ranks that share the model call this at the same time, because it may compute two decode steps.
    """
    device = plan.device
    if plan.config.enforce_eager:
        return "--enforce-eager"
    if (rope := rope_type(model.config)) in ASKING_ROPES:
        return f"rope_type {rope} reads positions from the device"
    if plan.exchanges_rows:
        return "instances of a unit agree on each step and exchange rows within it"
    if not plan.is_alone and not (device.traits.captures_sums or plan.config.npu_tp_graphs):
        return "graphs with several ranks are untested on NPUs; --npu-tp-graphs enables them"
    if has_states(model.caches):
        return "graphs do not support the states of its layers"
    if isinstance(model, FusedCausalLM):
        return "" if model.ops.is_capturable else "SDPA reads lengths from the device"
    if model.attention == SDPA.name:
        return "SDPA reads lengths from the device"
    if not device.traits.captures_modules:
        return f"its layers are not fused, and such graphs are untested on {device.kind.upper()}"
    found = obstacle(model, layout, device)
    return f"in its layers {found}" if found else ""


def capture_graphs(plan: LoadPlan, model: CausalLM, pool: KVPool, eager: str) -> StepGraphs:
    """Returns the graphs, some of them captured already. `eager`: see `why_eager`.

    On an NPU attention divides its work itself, and all graphs are captured here, so that no request waits for one.
    """
    if not plan.device.is_accelerator:
        return StepGraphs()
    if eager:
        log.info("decode steps run eagerly: %s", eager)
        return StepGraphs()
    config, traits, capturing = plan.config, plan.device.traits, capture(plan.device)
    rules = GraphRules(
        max_num_seqs=config.max_num_seqs,
        longest=min(plan.max_model_len, config.max_seq_len_to_capture or plan.max_model_len),
        sizes=config.graph_sizes,
        is_for_any_context=traits.graphs_take_any_context,
        is_alone=plan.is_alone,
        only_at_start=traits.captures_at_start_only,
    )
    decode = DecodeGraphs(model, pool, capturing, rules)
    adapted = prompts = None
    # Only adapters in tables have launches that graphs can capture.
    if config.adapters.enable_lora and are_in_tables(model):
        adapted = DecodeGraphs(model, pool, capturing, rules, config.adapters.max_loras)
    if PROMPT_GRAPHS in plan.speedups:
        prompts = _prompt_graphs(plan, model, pool, capturing, rules)
    stop_s = time.monotonic() + (MAX_ONLY_START_S if traits.captures_at_start_only else MAX_START_S)

    def agree(holds: bool) -> bool:
        """Whether `holds` is true on every rank that shares the model."""
        return bool(plan.group.least(int(holds)))

    with torch.inference_mode():
        decode.prepare(lambda: agree(time.monotonic() < stop_s), agree)
        if prompts is not None:
            prompts.prepare(lambda: agree(time.monotonic() < stop_s))
    return StepGraphs(decode, adapted, prompts)


def _prompt_graphs(
    plan: LoadPlan, model: CausalLM, pool: KVPool, capturing: Capture, rules: GraphRules
) -> PromptGraphs:
    from pd_cluster.model.kernels.cuda.attention.triton_planner import PaddedPlanner  # Triton may be missing

    dtype_bits = TORCH_DTYPES[plan.dtype].itemsize * 8
    planner = PaddedPlanner(model.config.num_attention_heads, pool.layout, dtype_bits, pool.device)
    return PromptGraphs(model, pool, capturing, rules, planner)


def rope_type(config: Any) -> str:
    """Returns the rope_type in a transformers config; of several, one that reads positions on the host, if any."""
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in given.values() if isinstance(each, dict)] or [given]
    found = [str(each.get("rope_type", "default")) for each in kinds]
    return next((each for each in found if each in ASKING_ROPES), found[0])
