"""`python -m benchmarks engine --shape mla-1B`: steps of a model with latent attention (MLA) and random weights.

Compares steps to reading weights and latents, to transformers' modules (with a cache of their own, from which they
compute all keys and values in each step, and over the pool with absorbed queries), and to a dense model with as many
parameters. Both models are made in this process, one after the other.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache
from transformers.modeling_utils import AttentionInterface

from benchmarks.peers.floors import read_bandwidth
from benchmarks.random_models import Goal, fused, model_of, results, step_ms
from pd_cluster.model.language_model.cache_declaration import cache_argument, caches_of
from pd_cluster.model.language_model.causal_lm import PlainCausalLM
from pd_cluster.model.language_model.fused_lm import Served
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.result_tables import Result

NAME = "mla-1B"
SHARED: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 16, "vocab_size": 32000}
WIDTHS: dict[str, int] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
OTHERS: dict[str, Any] = {"num_key_value_heads": 16, "q_lora_rank": None, "first_k_dense_replace": 16}
LATENT: dict[str, Any] = {**WIDTHS, **OTHERS, "intermediate_size": 6528}
DENSE: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 7100}
SMALL: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 320}
GOALS: tuple[Goal, ...] = (
    ("decode at 512 tokens ÷ reading weights and latents", "lower", 1.3, "decode_512_ms", "read_ms"),
    ("decode at 8,192 tokens ÷ at 512", "lower", 1.6, "decode_8192_ms", "decode_512_ms"),
    ("transformers' decode at 2,048 tokens ÷ ours", "higher", 3.0, "transformers_2048_ms", "decode_2048_ms"),
    ("prefill of 2,048 tokens, share of the dense model's speed", "higher", 0.65, "dense_2048_ms", "prefill_2048_ms"),
)


def measure(rounds: int, quick: bool) -> Iterator[Result]:
    small = SMALL if quick else {}
    model = model_of("deepseek_v3", {**SHARED, **LATENT, **small})
    nbytes = 4 * (sum(each.numel() for each in model.parameters()) - model.get_input_embeddings().weight.numel())
    latents_nbytes = 4 * model.config.num_hidden_layers * 512 * (512 + 64)
    read_ms = 1e3 * (nbytes + latents_nbytes) / read_bandwidth(1 << (24 if quick else 30))
    of = 64 if quick else 1  # divisor of the numbers of tokens
    theirs = [transformers_step_ms(model, 2048 // of) for _ in range(rounds)]
    AttentionInterface.register(sdpa.NAME, sdpa.forward)
    model.set_attn_implementation(sdpa.NAME)
    plain, served = PlainCausalLM(model), Served(caches_of(model))
    modules = [step_ms(plain, 2048 // of, 1) for _ in range(rounds)]
    ours = fused(model, served)
    del plain
    figures = [
        {
            "read_ms": read_ms,
            "transformers_2048_ms": theirs[at],
            "modules_2048_ms": modules[at],
            **{f"decode_{past}_ms": step_ms(ours, past // of, 1) for past in (512, 2048, 8192)},
            "prefill_2048_ms": step_ms(ours, 0, 2048 // of),
        }
        for at in range(rounds)
    ]
    del ours, model
    gc.collect()
    model = model_of("llama", {**SHARED, **DENSE, **small})
    dense = fused(model, Served(caches_of(model)))
    return results([{**each, "dense_2048_ms": step_ms(dense, 0, 2048 // of)} for each in figures], GOALS)


def transformers_step_ms(model: Any, past: int, num_tries: int = 3) -> float:
    """Returns the shortest time of a step of transformers' modules with `past` cached latents of each layer, after one
    step that is not counted.
    """
    config, took_s = model.config, []
    for _ in range(1 + num_tries):
        cache = DynamicCache(config=config)
        for layer_idx in range(config.num_hidden_layers):
            planes = (torch.randn(1, 1, past, width) for width in (config.kv_lora_rank, config.qk_rope_head_dim))
            cache.update(*planes, layer_idx)
        start_s = time.perf_counter()
        with torch.inference_mode():
            model(input_ids=torch.tensor([[5]]), use_cache=True, **{cache_argument(model): cache})
        took_s.append(time.perf_counter() - start_s)
        assert cache.get_seq_length() == past + 1
    return 1e3 * min(took_s[1:])
