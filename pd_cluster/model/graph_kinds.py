"""Makes the graphs of a model from an engine's settings: of decode steps, and of steps with prompts."""

from __future__ import annotations

from collections.abc import Sequence

from pd_cluster.errors import ConfigError, called
from pd_cluster.kv.memory import TORCH_DTYPES
from pd_cluster.kv.pool import KVPool
from pd_cluster.model.causal_lm import CausalLM, FusedCausalLM
from pd_cluster.model.graphs import Capture, DecodeGraphs
from pd_cluster.model.prompt_graphs import PromptGraphs
from pd_cluster.settings.engine import PROMPT_GRAPHS, EngineConfig


def check_prompt_graphs(model: CausalLM, speedups: Sequence[str]) -> None:
    """Raises ConfigError if graphs of steps with prompts are wanted and this model cannot have them."""
    if PROMPT_GRAPHS not in speedups:
        return
    why = "" if isinstance(model, FusedCausalLM) else "this model's layers are not fused"
    if not why and model.attention != "Triton":
        why = f"attention is by {model.attention}, not by Triton"
    if why:
        raise ConfigError(f"{called('cuda_speedups')} {PROMPT_GRAPHS}: {why}; leave it out")


def make_graphs(
    model: CausalLM,
    pool: KVPool,
    config: EngineConfig,
    max_model_len: int,
    is_alone: bool,
    capturing: Capture,
    max_loras: int = 0,
) -> DecodeGraphs:
    """Returns graphs, none of them captured yet. `is_alone`: the model is not shared with other ranks.

    `max_loras`: see DecodeGraphs.

    On an NPU attention divides its work itself, and no step of a client waits for a capture.
    """
    traits = pool.device.traits
    return DecodeGraphs(
        *(model, pool, config.max_num_seqs),
        longest=longest_captured(config, max_model_len),
        capture=capturing,
        is_for_any_context=traits.graphs_take_any_context,
        sizes=config.graph_sizes,
        is_alone=is_alone,
        only_at_start=traits.captures_at_start_only,
        max_loras=max_loras,
    )


def make_prompt_graphs(
    model: CausalLM,
    dtype: str,
    pool: KVPool,
    config: EngineConfig,
    max_model_len: int,
    is_alone: bool,
    capturing: Capture,
) -> PromptGraphs:
    """Returns graphs of steps with prompts, none of them captured yet; see `make_graphs`. `dtype`: the model's."""
    from pd_cluster.model.cuda.paged import PaddedPlanner  # Triton may be missing

    dtype_bits = TORCH_DTYPES[dtype].itemsize * 8
    planner = PaddedPlanner(model.config.num_attention_heads, pool.layout, dtype_bits, pool.device)
    longest = longest_captured(config, max_model_len)
    return PromptGraphs(model, pool, config.max_num_seqs, longest, capturing, planner, is_alone)


def longest_captured(config: EngineConfig, max_model_len: int) -> int:
    """Returns the longest context of a graph, in tokens."""
    return min(max_model_len, config.max_seq_len_to_capture or max_model_len)
