"""`python -m benchmarks engine --shape moe-1B`: experts of a model with random weights, a router and a shared expert.

Compares the experts' time to the time of reading the chosen experts' weights, and a prompt's time to that of a dense
model with as many operations.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.peers.floors import read_bandwidth
from benchmarks.random_models import Goal, fused, model_of, results, step_ms
from pd_cluster.model.kernels.cpu.ops import CpuOps
from pd_cluster.model.language_model.cache_declaration import caches_of
from pd_cluster.model.language_model.fused_lm import Served
from pd_cluster.model.layers.expert_weights import experts_of
from pd_cluster.model.layers.gated_mlp import ExpertRouter
from pd_cluster.result_tables import Result

NAME = "moe-1B"
NUM_EXPERTS, TOP_K, NUM_TRIES = 64, 8, 16
SHARED: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
SPARSE: dict[str, Any] = {
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 576,
}
SMALL: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
ROWS = (1, 8, 32)
GOALS: tuple[Goal, ...] = (
    *(
        (f"experts of {n} rows ÷ reading the chosen ones", "lower", 1.25, f"experts_{n}_ms", f"read_{n}_ms")
        for n in ROWS
    ),
    ("prefill of 512 tokens, share of the dense model's speed", "higher", 0.85, "dense_512_ms", "prefill_512_ms"),
)


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
        ours = fused(model, Served(caches_of(model)))
        for figures in found:
            figures[name] = step_ms(ours, 0, 512)
        del ours, model
    return results(found, GOALS)


class Block:
    """A layer's experts, and the number of experts that each row chooses."""

    def __init__(self, block: Any) -> None:
        self.router = ExpertRouter.of(block)
        self.rows = CpuOps().experts(self.router, experts_of(block.experts), "silu")
        self._logits = self.router.linear()

    def num_chosen(self, x: torch.Tensor) -> int:
        _, chosen = self.router.routing.weigh(self._logits(x))
        return len(set(chosen.flatten().tolist()))


def _alone(blocks: list[Block], hidden_size: int, nbytes: int) -> dict[str, float]:
    """Returns the shortest time of a block's experts. Blocks take turns, so their weights are not in the cache."""
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
