"""Tiny checkpoints of architectures that share their code paths with others.

Their tests are marked slow; quick tests cover one architecture of each kind (tests/support/checkpoints.py).
"""

from __future__ import annotations

from typing import Any

from tests.support.checkpoints import MIXED_LAYERS, NO_GROUPS, ROPE, VOCAB_SIZE

HALF_ROPE: dict[str, Any] = {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
# All widths differ, so that confusing two of them fails.
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 16,  # some configs set it to qk_rope_head_dim
    "kv_lora_rank": 48,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
LATENTS_AND_EXPERTS: dict[str, Any] = {
    **LATENTS,
    **ROUTED_EXPERTS,
}
YARN: dict[str, Any] = {
    **ROPE,
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
# Many index heads: with few, relu gives keys equal scores, among which transformers' choice is arbitrary.
SPARSE: dict[str, Any] = {
    **LATENTS_AND_EXPERTS,
    "initializer_range": 0.15,
    "pad_token_id": None,  # a padding token's embedding is zero, and so would be all scores of its row
    "index_n_heads": 32,
    "index_head_dim": 64,
    "index_topk": 8,
}
# The last three layers reuse keys and values of earlier layers.
REUSED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
    "tie_word_embeddings": True,
    "pad_token_id": None,
}
LATENT_TYPES = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
INDEXED = ("deepseek_v32", "glm_moe_dsa")  # latent attention with index keys
# model_type -> differences from tests/support/checkpoints.COMMON
MORE: dict[str, dict[str, Any]] = {
    "apertus": {},
    "axk1": LATENTS_AND_EXPERTS,
    "deepseek_v2": {**LATENTS_AND_EXPERTS, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**LATENTS_AND_EXPERTS, "rope_parameters": YARN},
    "glm4_moe_lite": {**LATENTS_AND_EXPERTS, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "deepseek_v32": {**SPARSE, "rope_parameters": YARN},
    "glm_moe_dsa": {**SPARSE, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    "longcat_flash": {
        **LATENTS,
        "num_hidden_layers": 4,  # attention layers, two in each decoder layer
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 3,
        "routed_scaling_factor": 1.5,
    },
    "minicpm3": LATENTS,
    "youtu": LATENTS,
    "arcee": {},
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True, "tie_word_embeddings": True},
    "cohere2_moe": {**MIXED_LAYERS, **EXPERTS, "logit_scale": 2.0},
    "cwm": {**MIXED_LAYERS},
    "dots1": ROUTED_EXPERTS,
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "exaone_moe": {**MIXED_LAYERS, **EXPERTS, "moe_intermediate_size": 48, "num_shared_experts": 1},
    "flex_olmo": EXPERTS,
    "glm": HALF_ROPE,
    "glm4_moe": {**ROUTED_EXPERTS, "use_qk_norm": True},
    "gpt_bigcode": NO_GROUPS,
    "gptj": {**NO_GROUPS, "rotary_dim": 8},
    "granite_swa": {**MIXED_LAYERS},
    "granitemoe": LOCAL_EXPERTS,
    "granitemoeshared": {**LOCAL_EXPERTS, "shared_intermediate_size": 64},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": {**EXPERTS, "moe_intermediate_size": 48},
    "hyperclovax": {},
    "internlm3": {},
    "jais2": {},
    "minimax": {**LOCAL_EXPERTS, "layer_types": ["full_attention"] * 3},
    "minimax_m2": LOCAL_EXPERTS,
    "ministral": {**MIXED_LAYERS},
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "nanochat": {},
    "olmo": {"clip_qkv": None},
    "olmo3": {
        **MIXED_LAYERS,
        "rope_parameters": {"sliding_attention": {**ROPE, "rope_theta": 100.0}, "full_attention": ROPE},
    },
    "olmoe": EXPERTS,
    "phi": {**NO_GROUPS, **HALF_ROPE},
    "phimoe": {**LOCAL_EXPERTS, "sliding_window": None},
    "seed_oss": {"attention_bias": True},
    "solar_open": ROUTED_EXPERTS,
    "gemma3n_text": {**REUSED, "intermediate_size": [96] * 6, "laurel_rank": 8},
    "gemma4_text": {
        **REUSED,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "mimo_v2_flash": {
        **ROUTED_EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": 8,
        "head_dim": 24,
        "v_head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "vaultgemma": {**MIXED_LAYERS, "query_pre_attn_scalar": 16},
}
