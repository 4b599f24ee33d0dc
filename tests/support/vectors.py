"""Computes prompts' vectors with an engine in the test's process and with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel

from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.types import NO_SAMPLING, PooledOutput, Pooling, Request, RequestSpec

MAX_STEPS = 5000
Floats = npt.NDArray[np.float32]


def pooling_request(name: str, prompt: list[int], pooling: Pooling, arrival_s: float = 0.0) -> Request:
    return Request(name, RequestSpec(prompt, NO_SAMPLING, pooling=pooling), arrival_s=arrival_s)


def run_pooling(core: EngineCore, requests: Sequence[Request]) -> dict[str, PooledOutput]:
    """Runs all requests at once, including generating ones; returns the vectors. Asserts that nothing stays held."""
    for request in requests:
        core.scheduler.add(request)
    found: dict[str, PooledOutput] = {}
    for _ in range(MAX_STEPS):
        if not core.scheduler.requests:
            break
        for request, pooled in core.step().pooled:
            assert request.request_id == pooled.request_id
            assert pooled.request_id not in found
            found[pooled.request_id] = pooled
        core.scheduler.check()
    assert not core.scheduler.requests, "the engine did not finish"
    assert core.scheduler.blocks.num_held == core.scheduler.swap.num_held == 0
    assert not core.pooler.sums
    return found


def numbers(pooled: PooledOutput) -> Floats:
    return np.frombuffer(pooled.vector, "<f4")


def embed_all(core: EngineCore, prompts: list[list[int]], pooling: Pooling) -> list[bytes]:
    """Returns the vectors of all prompts, computed in one batch."""
    requests = [pooling_request(str(at), prompt, pooling, float(at)) for at, prompt in enumerate(prompts)]
    found = run_pooling(core, requests)
    return [found[str(at)].vector for at in range(len(prompts))]


@cache
def base_model(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def reference_vector(folder: Path, prompt: list[int], pooling: Pooling) -> Floats:
    """Returns the vector from transformers' `last_hidden_state`, by torch's functions."""
    with torch.inference_mode():
        states = base_model(folder)(torch.tensor([prompt])).last_hidden_state[0].double()
    pooled = states[-1] if pooling.kind == "last" else states.mean(dim=0)
    pooled = pooled[: pooling.dimensions]
    if pooling.normalizes:
        pooled = torch.nn.functional.normalize(pooled, dim=0)
    return pooled.float().numpy()
