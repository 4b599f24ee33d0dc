"""Whole models on the CUDA path on a GPU; test_cuda_ops.py has interpreted tests."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Sampling
from tests.support.checkpoints import reference_model
from tests.support.engines import generate, random_prompt

pytest.importorskip("triton")

GREEDY = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
ON_GPU = (
    *("llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "gemma3_text", "gpt_oss", "phi3"),
    *("qwen2_moe", "qwen3_moe", "olmo2", "granite", "glm4", "smollm3", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
)
SPED_UP = ("llama", "gemma2", "gpt_oss", "qwen3_moe")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "speed-ups": {"cuda_speedups": ("pdl", "prompt-graphs")},  # other speed-ups need 16 bits, or several ranks
}


RUNS = [(name, way) for name in ON_GPU for way in WAYS if way != "speed-ups" or name in SPED_UP]


@needs_gpu
@pytest.mark.parametrize(("architecture", "way"), RUNS)
def test_greedy_tokens_are_those_of_transformers_on_the_gpu(
    architecture: str, way: str, checkpoint: Callable[[str], Path]
) -> None:
    """float32 tokens may differ only where the reference's two best logits are within 1e-4."""
    given = dict(WAYS[way])
    if way == "speed-ups" and torch.cuda.get_device_capability() < (9, 0):
        given["cuda_speedups"] = ("prompt-graphs",)
    folder = checkpoint(architecture)
    config = EngineConfig(model=str(folder), device="cuda", dtype="float32", num_blocks=200, max_model_len=256, **given)
    core, runner = build_core(config)
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (1, 7, 40, 130)]
    reference = copy.deepcopy(reference_model(folder)).to("cuda")  # the CPU tests of this process share it
    for prompt, output in zip(prompts, generate(core, prompts, GREEDY), strict=True):
        expected = _greedy_on_gpu(reference, prompt)
        if output != expected:
            at = next(i for i, (mine, its) in enumerate(zip(output, expected, strict=True)) if mine != its)
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + expected[:at]], device="cuda")).logits[0, -1]
            best = logits.topk(2).values.tolist()
            assert best[0] - best[1] < 1e-4, f"token {at} of a prompt of {len(prompt)}: {output[at]}, {expected[at]}"
    assert way == "eager" or core.ahead.num_ahead > 0
    assert (runner.graphs.prompts is not None and runner.graphs.prompts.num_captured > 0) == (way == "speed-ups")


def _greedy_on_gpu(reference: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Runs a forward pass over the whole sequence for each token, without a cache that could differ."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(GREEDY.max_tokens):
            logits = reference(torch.tensor([tokens], device="cuda")).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@needs_gpu
@pytest.mark.alone
def test_a_pool_is_as_large_as_the_memory_lets_it(checkpoint: Callable[[str], Path]) -> None:
    free, total = torch.cuda.mem_get_info()
    config = EngineConfig(model=str(checkpoint("llama")), device="cuda", gpu_memory_utilization=0.3)
    _, runner = build_core(config)
    assert 0.2 * total < runner.pool.nbytes < 0.3 * total
    assert torch.cuda.mem_get_info()[0] > free - 0.31 * total


@needs_gpu
def test_drawn_tokens_are_the_same_whatever_else_is_in_the_batch(checkpoint: Callable[[str], Path]) -> None:
    config = EngineConfig(
        model=str(checkpoint("llama")), device="cuda", dtype="float32", num_blocks=200, max_model_len=256
    )
    core, _ = build_core(config)
    rng = random.Random(2)
    prompts = [random_prompt(rng, length) for length in (3, 20, 60)]
    drawn = Sampling(max_tokens=20, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)
    together = generate(core, prompts, drawn)
    assert together == [generate(core, [prompt], drawn)[0] for prompt in prompts]
