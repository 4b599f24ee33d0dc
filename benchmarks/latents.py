"""`python -m benchmarks engine --shape mla-1B`: steps of a model with latent attention (MLA) and random weights.

Beside reading its weights and latents, beside the same modules of transformers, and beside a dense model of as many
parameters. Both models are made in this process, one after the other.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.figures import begin, finish, result
from benchmarks.peers.floors import read_bandwidth
from pd_cluster.kv.pool import KVPool
from pd_cluster.model.attention.latent import UpProjection
from pd_cluster.model.batch import build_batch
from pd_cluster.model.causal_lm import CausalLM, PlainCausalLM, Served
from pd_cluster.model.declared import caches_of, layout_of
from pd_cluster.model.fuse import fuse
from pd_cluster.model.loader import choose_ops
from pd_cluster.tables import Better, Report, Result
from pd_cluster.types import Order, Request, Sampling

NAME, BLOCK_SIZE = "mla-1B", 16
SHARED: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 16, "vocab_size": 32000}
WIDTHS: dict[str, int] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
OTHERS: dict[str, Any] = {"num_key_value_heads": 16, "q_lora_rank": None, "first_k_dense_replace": 16}
LATENT: dict[str, Any] = {**WIDTHS, **OTHERS, "intermediate_size": 6528}
DENSE: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 7100}
SMALL: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 320}
GOALS: tuple[tuple[str, Better, float, str, str], ...] = (
    ("decode at 512 tokens, times reading weights and latents", "lower", 1.3, "decode_512_ms", "read_ms"),
    ("decode at 8,192 tokens, times at 512", "lower", 1.6, "decode_8192_ms", "decode_512_ms"),
    ("modules' decode at 2,048 tokens, times ours", "higher", 3.0, "modules_2048_ms", "decode_2048_ms"),
    ("prefill of 2,048 tokens, share of the dense model's speed", "higher", 0.65, "dense_2048_ms", "prefill_2048_ms"),
)


def run(rounds: int, threads: int, quick: bool, json: str) -> None:
    begin(json)
    torch.set_num_threads(threads)
    started_s = time.monotonic()
    model = _model("deepseek_v3", LATENT, quick)
    nbytes = 4 * (sum(each.numel() for each in model.parameters()) - model.get_input_embeddings().weight.numel())
    latents_nbytes = 4 * model.config.num_hidden_layers * 512 * (512 + 64)
    read_ms = 1e3 * (nbytes + latents_nbytes) / read_bandwidth(1 << (24 if quick else 30))
    plain, served = PlainCausalLM(model), Served(caches_of(model))
    of = 64 if quick else 1  # of the numbers of tokens
    modules = [_step_ms(plain, 2048 // of, 1) for _ in range(rounds)]
    fused = _fused(model, served)
    del plain
    figures = [
        {
            "read_ms": read_ms,
            "modules_2048_ms": modules[at],
            **{f"decode_{past}_ms": _step_ms(fused, past // of, 1) for past in (512, 2048, 8192)},
            "prefill_2048_ms": _step_ms(fused, 0, 2048 // of),
        }
        for at in range(rounds)
    ]
    del fused, model
    gc.collect()
    model = _model("llama", DENSE, quick)
    dense = _fused(model, Served(caches_of(model)))
    found = [{**each, "dense_2048_ms": _step_ms(dense, 0, 2048 // of)} for each in figures]
    asked = f"--shape {NAME} --rounds {rounds} --threads {threads}{' --quick' * quick}"
    report = Report(f"python -m benchmarks engine {asked}", [*_results(found)])
    finish(report, f"{rounds} rounds, {threads} threads, {time.monotonic() - started_s:.0f} s", json, quick)


def _model(model_type: str, own: Mapping[str, Any], quick: bool) -> Any:
    sizes = {**SHARED, **own, **(SMALL if quick else {}), "max_position_embeddings": 16384}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=torch.float32).eval()


def _fused(model: Any, served: Served) -> CausalLM:
    values = {module.values.shape[2] for module in model.modules() if isinstance(module, UpProjection)}
    layout = layout_of(served.caches, BLOCK_SIZE, "float32")
    return fuse(model, choose_ops(layout, latent_values=values), served)


def _step_ms(model: CausalLM, past: int, num_tokens: int, num_tries: int = 4) -> float:
    """Returns the least time of a step of one sequence, after an uncounted one."""
    length = past + num_tokens
    table = list(range(-(-length // BLOCK_SIZE)))
    pool = KVPool(layout_of(model.caches, BLOCK_SIZE, "float32"), len(table) + 1)
    took_s = []
    try:
        for _ in range(num_tries if num_tokens == 1 else 2):
            request = Request("r", Order([5] * length, Sampling()), num_computed_tokens=past, block_table=table)
            batch = build_batch([(request, num_tokens)], pool)
            batch.sample_rows = torch.tensor([num_tokens - 1])
            start_s = time.perf_counter()
            with torch.inference_mode():
                model(batch)
            took_s.append(time.perf_counter() - start_s)
    finally:
        pool.close()
    return 1e3 * min(took_s[1:])


def _results(rounds: list[dict[str, float]]) -> Iterator[Result]:
    for name in rounds[0]:
        yield result(name.removesuffix("_ms"), [each[name] for each in rounds], "ms", "lower")
    for name, better, goal, above, below in GOALS:
        yield result(name, [each[above] / each[below] for each in rounds], "x", better, goal)
