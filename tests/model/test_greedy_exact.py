"""Greedy output of the engine equals transformers' generate(), token for token."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster.errors import ModelError
from pd_cluster.types import Sampling
from tests.support.checkpoints import CONFIGS, make_checkpoint
from tests.support.engines import DEVICE, assert_all_same, assert_same, generate, make_core, random_prompt

BLOCK_SIZE = 16
GREEDY = Sampling(max_tokens=24, temperature=0.0)
FEW = Sampling(max_tokens=8, temperature=0.0)  # into the next block, from some of the lengths below

Checkpoints = Callable[[str], Path]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_prompts_of_every_length(checkpoint: Checkpoints, architecture: str) -> None:
    """One token, a block, a block and one, more than a step takes; each alone and all in one batch."""
    folder = checkpoint(architecture)
    core = make_core(folder, block_size=BLOCK_SIZE, max_num_batched_tokens=40, num_blocks=64)
    rng = random.Random(1)
    prompts = [random_prompt(rng, n) for n in (1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, 39, 40, 41, 100)]
    alone = [generate(core, [prompt], FEW)[0] for prompt in prompts]
    assert_all_same(folder, prompts, alone, FEW.max_tokens)
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_32_at_once(checkpoint: Checkpoints, architecture: str) -> None:
    folder = checkpoint(architecture)
    core = make_core(folder, block_size=BLOCK_SIZE, max_num_batched_tokens=128, num_blocks=256)
    rng = random.Random(2)
    prompts = [random_prompt(rng, rng.randrange(1, 90)) for _ in range(32)]
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


def test_a_pool_so_small_that_preemption_is_constant(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    core = make_core(folder, block_size=4, max_num_batched_tokens=32, num_blocks=24, max_model_len=96)
    rng = random.Random(3)
    prompts = [random_prompt(rng, rng.randrange(1, 60)) for _ in range(16)]
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_any_block_size(checkpoint: Checkpoints, block_size: int) -> None:
    if DEVICE == "cuda" and block_size < 4:
        pytest.skip("Triton's kernels take powers of two from 4 on")
    folder = checkpoint("qwen3")
    core = make_core(folder, block_size=block_size, max_num_batched_tokens=50, num_blocks=2048 // block_size)
    rng = random.Random(4)
    prompts = [random_prompt(rng, n) for n in (1, 63, 64, 65, 120)]
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


def test_longrope_up_to_its_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
    rope |= {"original_max_position_embeddings": 64, "partial_rotary_factor": 1.0}
    folder = make_checkpoint(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    core = make_core(folder, block_size=BLOCK_SIZE, max_num_batched_tokens=40)
    assert core.runner.max_model_len == 64  # type: ignore[attr-defined]
    prompt = random_prompt(random.Random(7), 40)
    assert_same(folder, prompt, generate(core, [prompt], GREEDY)[0], GREEDY.max_tokens)


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "llama"])
def test_up_to_the_last_position(checkpoint: Checkpoints, architecture: str) -> None:
    """Learned positions are a table: there is a row for the last token, and the model's length is the table's."""
    folder = checkpoint(architecture, max_position_embeddings=80)
    core = make_core(folder, block_size=BLOCK_SIZE, max_num_batched_tokens=40)
    assert core.runner.max_model_len == 80  # type: ignore[attr-defined]
    prompt = random_prompt(random.Random(6), 80 - GREEDY.max_tokens)
    (output,) = generate(core, [prompt], GREEDY)
    assert_same(folder, prompt, output, GREEDY.max_tokens)
    with pytest.raises(ModelError, match=r"--max-model-len 81: .* 80; use at most that"):
        make_core(folder, max_model_len=81)
