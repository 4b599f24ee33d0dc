"""Greedy output of the engine equals transformers' generate(), token for token."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster.types import SamplingParams
from tests.support.checkpoints import CONFIGS
from tests.support.engines import assert_same, generate, make_core, random_prompt

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)

Checkpoints = Callable[[str], Path]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_prompts_of_every_length(checkpoint: Checkpoints, architecture: str) -> None:
    """One token, a block, a block and one, more than a step takes; each alone and all in one batch."""
    folder = checkpoint(architecture)
    core = make_core(folder, block_size=BLOCK_SIZE, max_num_batched_tokens=40, num_blocks=64)
    rng = random.Random(1)
    prompts = [random_prompt(rng, n) for n in (1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, 39, 40, 41, 100)]
    for prompt in prompts:
        assert_same(folder, prompt, generate(core, [prompt], GREEDY)[0], GREEDY.max_tokens)
    for prompt, output in zip(prompts, generate(core, prompts, GREEDY), strict=True):
        assert_same(folder, prompt, output, GREEDY.max_tokens)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_32_at_once(checkpoint: Checkpoints, architecture: str) -> None:
    folder = checkpoint(architecture)
    core = make_core(folder, block_size=BLOCK_SIZE, max_num_batched_tokens=128, num_blocks=256)
    rng = random.Random(2)
    prompts = [random_prompt(rng, rng.randrange(1, 90)) for _ in range(32)]
    for prompt, output in zip(prompts, generate(core, prompts, GREEDY), strict=True):
        assert_same(folder, prompt, output, GREEDY.max_tokens)


def test_a_pool_so_small_that_preemption_is_constant(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    core = make_core(folder, block_size=4, max_num_batched_tokens=32, num_blocks=24, max_model_len=96)
    rng = random.Random(3)
    prompts = [random_prompt(rng, rng.randrange(1, 60)) for _ in range(16)]
    outputs = generate(core, prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same(folder, prompt, output, GREEDY.max_tokens)


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_any_block_size(checkpoint: Checkpoints, block_size: int) -> None:
    folder = checkpoint("qwen3")
    core = make_core(folder, block_size=block_size, max_num_batched_tokens=50, num_blocks=2048 // block_size)
    rng = random.Random(4)
    prompts = [random_prompt(rng, n) for n in (1, 63, 64, 65, 120)]
    for prompt, output in zip(prompts, generate(core, prompts, GREEDY), strict=True):
        assert_same(folder, prompt, output, GREEDY.max_tokens)
