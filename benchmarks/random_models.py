"""Makes models with random weights in this process, times their steps, and computes the results of several rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.figures import result
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import build_batch
from pd_cluster.model.language_model.cache_declaration import layout_of
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.language_model.fuse_model import fuse
from pd_cluster.model.language_model.fused_lm import FusedCausalLM, Served
from pd_cluster.model.layers.attention.latent_attention import UpProjection
from pd_cluster.model.loading.model_loader import choose_ops
from pd_cluster.result_tables import Better, Result
from pd_cluster.types import Request, RequestSpec, Sampling

BLOCK_SIZE = 16
Goal = tuple[str, Better, float, str, str]  # name, direction, value, and the two figures whose ratio is compared


def model_of(model_type: str, sizes: Mapping[str, Any]) -> Any:
    """Returns transformers' model in float32."""
    config = AutoConfig.for_model(model_type, max_position_embeddings=16384, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def fused(model: Any, served: Served) -> FusedCausalLM:
    values = {module.values.shape[2] for module in model.modules() if isinstance(module, UpProjection)}
    layout = layout_of(served.caches, BLOCK_SIZE, "float32")
    return fuse(model, choose_ops(layout, latent_values=values), served)


def step_ms(model: CausalLM, past: int, num_tokens: int, num_tries: int = 4) -> float:
    """Returns the shortest time of a step of one sequence, after one step that is not counted."""
    length = past + num_tokens
    table = list(range(-(-length // BLOCK_SIZE)))
    pool = KVPool(layout_of(model.caches, BLOCK_SIZE, "float32"), len(table) + 1)
    took_s = []
    try:
        for _ in range(num_tries if num_tokens == 1 else 2):
            request = Request("r", RequestSpec([5] * length, Sampling()), num_computed_tokens=past, tables=[table])
            batch = build_batch([(request, num_tokens)], pool)
            batch.sample_rows = torch.tensor([num_tokens - 1])
            start_s = time.perf_counter()
            with torch.inference_mode():
                model(batch)
            took_s.append(time.perf_counter() - start_s)
    finally:
        pool.close()
    return 1e3 * min(took_s[1:])


def results(rounds: list[dict[str, float]], goals: tuple[Goal, ...]) -> Iterator[Result]:
    for name in rounds[0]:
        yield result(name.removesuffix("_ms"), [each[name] for each in rounds], "ms", "lower")
    for name, better, goal, above, below in goals:
        yield result(name, [each[above] / each[below] for each in rounds], "x", better, goal)
