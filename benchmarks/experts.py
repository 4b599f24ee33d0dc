"""`python -m benchmarks engine --shape moe-1B`: experts of a model with random weights, a router and a shared expert.

Experts alone beside reading the weights of those chosen, and a prompt beside a dense model that multiplies as much.
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
from pd_cluster.model.batch import build_batch
from pd_cluster.model.causal_lm import CausalLM, Served
from pd_cluster.model.cpu.ops import CpuOps
from pd_cluster.model.declared import caches_of, layout_of
from pd_cluster.model.fuse import fuse
from pd_cluster.model.layers.expert_weight import experts_of
from pd_cluster.model.layers.gated import ExpertRouter
from pd_cluster.model.loader import choose_ops
from pd_cluster.tables import Report, Result
from pd_cluster.types import Order, Request, Sampling

NAME = "moe-1B"
NUM_EXPERTS, TOP_K, NUM_TRIES = 64, 8, 16
PROMPT_LEN, BLOCK_SIZE = 512, 16
SIZES = {"hidden_size": 2048, "num_hidden_layers": 4, "vocab_size": 32000}
SHARED: dict[str, Any] = {**SIZES, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
SMALL: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
CHOICE = {"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K, "n_shared_experts": 1}
SPARSE: dict[str, Any] = {**CHOICE, "first_k_dense_replace": 0, "moe_intermediate_size": 576}
ROWS = (1, 8, 32)


def run(rounds: int, threads: int, quick: bool, json: str) -> None:
    """Measures in this process."""
    begin(json)
    torch.set_num_threads(threads)
    started_s = time.monotonic()
    asked = f"--shape {NAME} --rounds {rounds} --threads {threads}{' --quick' * quick}"
    report = Report(f"python -m benchmarks engine {asked}", [*measure(rounds, quick)])
    finish(report, f"{rounds} rounds, {threads} threads, {time.monotonic() - started_s:.0f} s", json, quick)


def measure(rounds: int, quick: bool) -> Iterator[Result]:
    sizes = {**SHARED, **(SMALL if quick else {})}
    few = model_of("glm4_moe", {**sizes, **SPARSE, "num_hidden_layers": 2})
    blocks = [Block(each.mlp) for each in few.model.layers]
    found = [_alone(blocks, sizes["hidden_size"], 1 << (24 if quick else 30)) for _ in range(rounds)]
    del blocks, few
    wide = {"intermediate_size": SPARSE["moe_intermediate_size"] * (TOP_K + 1)}
    for name, kind, own in (("prefill_512_ms", "glm4_moe", SPARSE), ("dense_512_ms", "llama", wide)):
        gc.collect()
        model = model_of(kind, {**sizes, **own})
        served = Served(caches_of(model))
        ours = fuse(model, choose_ops(layout_of(served.caches, BLOCK_SIZE, "float32")), served)
        for figures in found:
            figures[name] = _prompt_ms(ours)
        del ours, model
    for name in found[0]:
        yield result(name.removesuffix("_ms"), [each[name] for each in found], "ms", "lower")
    for num_rows in ROWS:
        times = [each[f"experts_{num_rows}_ms"] / each[f"read_{num_rows}_ms"] for each in found]
        yield result(f"experts of {num_rows} rows, times reading the chosen ones", times, "x", "lower", 1.25)
    shares = [each["dense_512_ms"] / each["prefill_512_ms"] for each in found]
    yield result("prefill of 512 tokens, share of the dense model's speed", shares, "x", "higher", 0.85)


def model_of(model_type: str, sizes: Mapping[str, Any]) -> Any:
    """Returns transformers' model in float32."""
    config = AutoConfig.for_model(model_type, max_position_embeddings=16384, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _prompt_ms(model: CausalLM) -> float:
    """Returns the time of the second of two steps of a prompt."""
    layout, num_blocks = layout_of(model.caches, BLOCK_SIZE, "float32"), PROMPT_LEN // BLOCK_SIZE
    with KVPool(layout, num_blocks) as pool, torch.inference_mode():
        for _ in range(2):
            request = Request("r", Order([5] * PROMPT_LEN, Sampling()), block_table=[*range(num_blocks)])
            batch = build_batch([(request, PROMPT_LEN)], pool)
            batch.sample_rows = torch.tensor([PROMPT_LEN - 1])
            start_s = time.perf_counter()
            model(batch)
            took_s = time.perf_counter() - start_s
    return 1e3 * took_s


class Block:
    """A layer's experts, and how many of them rows choose."""

    def __init__(self, block: Any) -> None:
        self.router = ExpertRouter.of(block)
        self.rows = CpuOps().experts(self.router, experts_of(block.experts), "silu")
        self._logits = self.router.linear()

    def num_chosen(self, x: torch.Tensor) -> int:
        _, chosen = self.router.routing.weigh(self._logits(x))
        return len(set(chosen.flatten().tolist()))


def _alone(blocks: list[Block], hidden_size: int, nbytes: int) -> dict[str, float]:
    """Returns the least time of a block's experts, in turn, so that each block's have left the cache meanwhile."""
    figures, bandwidth = dict[str, float](), read_bandwidth(nbytes)
    for num_rows in ROWS:
        x, took = torch.randn(num_rows, hidden_size), []
        for block in blocks * NUM_TRIES:
            start_s = time.perf_counter()
            block.rows(x)
            took.append((time.perf_counter() - start_s, block.num_chosen(x)))
        took_s, num_chosen = min(took, key=lambda each: each[0] / each[1])
        expert_nbytes = 4 * 3 * hidden_size * SPARSE["moe_intermediate_size"]
        figures[f"experts_{num_rows}_ms"] = 1e3 * took_s
        figures[f"read_{num_rows}_ms"] = 1e3 * expert_nbytes * num_chosen / bandwidth
    return figures
