"""Tiny checkpoints of hybrid models: some layers keep a recurrent state, others keys and values, or both.

Widths of keys and values and numbers of heads all differ, so that confusing two of them fails.
"""

from __future__ import annotations

from typing import Any

LAYERS: dict[str, Any] = {"num_hidden_layers": 4, "initializer_range": 0.15, "pad_token_id": None}
DELTA: dict[str, Any] = {
    **LAYERS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
MAMBA: dict[str, Any] = {
    **LAYERS,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_d_conv": 4,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
}
LATENTS: dict[str, Any] = {
    **LAYERS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_experts": 4,
    "moe_intermediate_size": 48,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
CONVOLUTIONS: dict[str, Any] = {
    **LAYERS,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_L_cache": 3,
}
# model_type -> differences from tests/support/checkpoints.COMMON
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS, "mlp_only_layers": [1]},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "olmo_hybrid": DELTA,
    "kimi_linear": {
        **LATENTS,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],  # counted from 1
            "full_attn_layers": [3],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "num_experts_per_token": 2,
        "num_expert_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "bailing_hybrid": {
        **LATENTS,
        "layer_types": DELTA["layer_types"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "q_lora_rank": 20,
        "num_experts_per_tok": 2,
        "n_group": 2,
    },
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": False},
    "lfm2": {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1},
    "nemotron_h": {
        **LAYERS,
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "M*-ME",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 24,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "time_step_min": 0.1,  # a limit that affects many time steps
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 48,
        "n_group": 2,
        "topk_group": 1,
    },
}
