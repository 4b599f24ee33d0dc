"""The architectures whose layers can be fused, described by their differences from Llama.

Their names appear only in this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pd_cluster.model.layers.gated_mlp import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT, Activation
from pd_cluster.model.layers.rope.rope_tables import NO_ROPE, WHOLE_MODEL, Turn, complex_tables, doubled_tables, turn

# The norms of a layer: field of FusedLayer -> name of the module in transformers.
BEFORE_EACH_HALF = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
BEFORE_FEED_FORWARD = {"input_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
BEFORE_EACH_HALF_OF_LFM = {"input_norm": "operator_norm", "mlp_norm": "ffn_norm"}
AFTER_EACH_HALF = {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
AROUND_EACH_HALF = {"input_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **AFTER_EACH_HALF}
AROUND_EACH_HALF_OF_GLM = {
    **BEFORE_EACH_HALF,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_mlp_norm": "post_mlp_layernorm",
}


def own_window(attention: Any) -> int | None:
    window: int | None = getattr(attention, "sliding_window", None)
    return window


def models_window(attention: Any) -> int | None:
    """Uses the config's window in all layers."""
    return own_window(attention.config)


def window_if_sliding(attention: Any) -> int | None:
    return own_window(attention) if attention.is_sliding else None


def one_rope(attention: Any) -> str:
    return WHOLE_MODEL


def rope_of_its_type(attention: Any) -> str:
    """Uses a different rope for sliding and for full layers."""
    kind: str = attention.layer_type
    return kind


def rope_of_its_attention_type(attention: Any) -> str:
    kind: str = attention.attention_type
    return kind


def rope_if_used(attention: Any) -> str:
    return WHOLE_MODEL if attention.use_rope else NO_ROPE


def rope_if_sliding(attention: Any) -> str:
    """Rotates only sliding layers, but all layers if all are full."""
    return WHOLE_MODEL if attention.sliding_window is None or attention.is_sliding else NO_ROPE


def no_rope(attention: Any) -> str:
    return NO_ROPE


def rope_if_of_its_type(attention: Any) -> str:
    """Uses rope if the config names it as the kind of positions (Granite 4)."""
    return WHOLE_MODEL if attention.config.position_embedding_type == "rope" else NO_ROPE


class Multipliers(NamedTuple):
    """Factors of the embeddings and of what each half of a layer adds, and the divisor of the logits."""

    embeddings: float = 1.0
    residual: float = 1.0
    logits_divisor: float = 1.0


def no_multipliers(config: Any) -> Multipliers:
    return Multipliers()


def multipliers_of_granite(config: Any) -> Multipliers:
    return Multipliers(config.embedding_multiplier, config.residual_multiplier, config.logits_scaling)


def multipliers_of_minicpm(config: Any) -> Multipliers:
    """Returns the factor 1 for embeddings, because MiniCPM's embedding module applies its own."""
    return Multipliers(1.0, config.scale_depth / math.sqrt(config.num_hidden_layers), config.logits_scaling)


def multipliers_of_falcon(config: Any) -> Multipliers:
    return Multipliers(config.embedding_multiplier, 1.0, 1.0 / config.lm_head_multiplier)


def never(config: Any) -> bool:
    return False


def always(config: Any) -> bool:
    return True


def if_interleaved(config: Any) -> bool:
    found: bool = config.rope_interleave
    return found


@dataclass(frozen=True, slots=True)
class Quirks:
    """Differences of an architecture from Llama that its modules do not reveal."""

    adds_one: bool = False  # norms multiply by 1 + w
    scales_in_float32: bool = False  # norms round after the multiplication, not before it
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE_EACH_HALF)  # names of a layer's norms, by field
    norms_span_heads: bool = False  # the norms of queries and keys treat all heads as one vector
    window: Callable[[Any], int | None] = own_window  # returns the window of an attention module
    rope: Callable[[Any], str] = one_rope  # returns the kind of layer whose rope an attention module uses
    # Whether rope rotates feature 2i with 2i + 1, depending on the config.
    pairs_neighbours: Callable[[Any], bool] = never
    indexer_pairs: bool = False  # the same for an indexer's rope, which has the same tables
    turn: Turn = turn  # calls the rotary embedding
    # The next two are set only for modules that use the config's fields; elsewhere these may have no effect.
    caps_scores: bool = False  # attention applies the config's softcap
    multipliers: Callable[[Any], Multipliers] = no_multipliers  # returns the config's factors
    activation: Activation | None = None  # replaces the config's activation
    mlp: str = "mlp"  # name of a layer's second half
    has_second_half: bool = True  # False: a layer is only an attention, a state or an MLP
    router: str = "gate"  # name of a sparse block's router
    interleaves_gates: bool = False  # the experts' files interleave gates and ups
    embedding: str = "embed_tokens"  # name of the module before the layers
    last_norm: str = "norm"  # name of the module after the layers
    # Config values that the kernels require. If a version of transformers lacks a field, its modules use this value.
    only_with: Mapping[str, float | str] = field(default_factory=dict)


ARCHITECTURES: dict[str, Quirks] = {
    "LlamaForCausalLM": Quirks(),
    "Qwen2ForCausalLM": Quirks(),
    "Qwen2MoeForCausalLM": Quirks(),
    "Qwen3ForCausalLM": Quirks(),
    "Qwen3MoeForCausalLM": Quirks(),
    "MistralForCausalLM": Quirks(window=models_window),
    "MixtralForCausalLM": Quirks(window=models_window),
    "MinistralForCausalLM": Quirks(),
    "Qwen3NextForCausalLM": Quirks(adds_one=True),
    "Qwen3_5ForCausalLM": Quirks(adds_one=True),
    "Qwen3_5MoeForCausalLM": Quirks(adds_one=True),
    "KimiLinearForCausalLM": Quirks(rope=no_rope),
    "GraniteMoeHybridForCausalLM": Quirks(
        multipliers=multipliers_of_granite, mlp="block_sparse_moe", router="router", rope=rope_if_of_its_type
    ),
    "BambaForCausalLM": Quirks(norms=BEFORE_FEED_FORWARD, mlp="feed_forward", last_norm="final_layernorm"),
    "FalconH1ForCausalLM": Quirks(
        norms=BEFORE_FEED_FORWARD,
        multipliers=multipliers_of_falcon,
        mlp="feed_forward",
        last_norm="final_layernorm",
    ),
    "Lfm2ForCausalLM": Quirks(
        norms=BEFORE_EACH_HALF_OF_LFM, activation="silu", mlp="feed_forward", last_norm="embedding_norm"
    ),
    "Lfm2MoeForCausalLM": Quirks(
        norms=BEFORE_EACH_HALF_OF_LFM, activation="silu", mlp="feed_forward", last_norm="embedding_norm"
    ),
    "NemotronHForCausalLM": Quirks(
        norms={"input_norm": "norm"},
        rope=no_rope,
        has_second_half=False,
        embedding="embeddings",
        last_norm="norm_f",
        only_with={"mlp_hidden_act": "relu2"},
    ),
    "CwmForCausalLM": Quirks(),
    "Phi3ForCausalLM": Quirks(window=models_window),
    "GemmaForCausalLM": Quirks(adds_one=True),
    "Gemma2ForCausalLM": Quirks(adds_one=True, norms=AROUND_EACH_HALF, caps_scores=True),
    "Gemma3ForCausalLM": Quirks(adds_one=True, norms=AROUND_EACH_HALF, rope=rope_of_its_type),
    "Olmo2ForCausalLM": Quirks(scales_in_float32=True, norms=AFTER_EACH_HALF, norms_span_heads=True),
    "Olmo3ForCausalLM": Quirks(
        scales_in_float32=True, norms=AFTER_EACH_HALF, norms_span_heads=True, rope=rope_of_its_attention_type
    ),
    "GraniteForCausalLM": Quirks(multipliers=multipliers_of_granite),
    "GraniteMoeForCausalLM": Quirks(multipliers=multipliers_of_granite, mlp="block_sparse_moe", router="router"),
    "GraniteMoeSharedForCausalLM": Quirks(multipliers=multipliers_of_granite, mlp="block_sparse_moe", router="router"),
    "SmolLM3ForCausalLM": Quirks(rope=rope_if_used),
    "Exaone4ForCausalLM": Quirks(norms=AFTER_EACH_HALF, window=window_if_sliding, rope=rope_if_sliding),
    "Ernie4_5ForCausalLM": Quirks(pairs_neighbours=always),
    "Ernie4_5_MoeForCausalLM": Quirks(pairs_neighbours=always),
    "Glm4MoeForCausalLM": Quirks(),
    "Dots1ForCausalLM": Quirks(),
    "HYV3ForCausalLM": Quirks(),
    "MiniMaxM2ForCausalLM": Quirks(norms_span_heads=True),
    "ExaoneMoeForCausalLM": Quirks(window=window_if_sliding, rope=rope_if_sliding),
    "DeepseekV2ForCausalLM": Quirks(pairs_neighbours=always, turn=complex_tables),
    "DeepseekV3ForCausalLM": Quirks(pairs_neighbours=if_interleaved),
    "DeepseekV32ForCausalLM": Quirks(pairs_neighbours=always),
    "GlmMoeDsaForCausalLM": Quirks(pairs_neighbours=always, indexer_pairs=True),
    "Glm4MoeLiteForCausalLM": Quirks(pairs_neighbours=if_interleaved),
    "AXK1ForCausalLM": Quirks(pairs_neighbours=if_interleaved),
    "YoutuForCausalLM": Quirks(pairs_neighbours=if_interleaved),
    "MiniCPM3ForCausalLM": Quirks(multipliers=multipliers_of_minicpm),
    "GlmForCausalLM": Quirks(pairs_neighbours=always),
    "Glm4ForCausalLM": Quirks(norms=AROUND_EACH_HALF_OF_GLM, pairs_neighbours=always),
    "GptOssForCausalLM": Quirks(
        scales_in_float32=True,
        turn=doubled_tables,
        activation="swigluoai",
        router="router",
        interleaves_gates=True,
        only_with={"swiglu_alpha": SWIGLUOAI_ALPHA, "swiglu_limit": SWIGLUOAI_LIMIT},
    ),
}
