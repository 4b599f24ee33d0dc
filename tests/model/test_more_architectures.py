"""Architectures beside those of test_greedy_exact.py: generate()'s tokens, with two weight scales and on two ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoConfig

from pd_cluster.checkpoints.checkpoint import SUPPORTED_MODEL_TYPES
from pd_cluster.errors import ModelError
from pd_cluster.model.parallel.plan import REFUSED, ParallelPlan
from pd_cluster.types import Sampling
from tests.support.checkpoints import CONFIGS, make_checkpoint
from tests.support.engines import assert_all_same, generate, make_core, random_prompt
from tests.support.more_checkpoints import MORE
from tests.support.ranks import ranks

GREEDY = Sampling(max_tokens=20, temperature=0.0)
NOT_SHARED = (*REFUSED, "gpt_bigcode", "gptj", "granite_swa", "hunyuan_v1_dense", "longcat_flash")
QUICK = ("phi", "olmoe", "deepseek_v3")  # each that has something that no other quick test has would be a slow set, too
LENGTHS = (1, 2, 16, 17, 40, 41, 100, 70)


def params(*without: str) -> list[object]:
    names = [name for name in MORE if name not in without]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def test_the_list_is_what_is_tested() -> None:
    assert sorted(SUPPORTED_MODEL_TYPES) == sorted([*CONFIGS, *MORE])


@pytest.mark.parametrize("scale", [0.25, 0.06])
@pytest.mark.parametrize("architecture", params())
def test_prompts_of_every_length(tmp_path: Path, architecture: str, scale: float) -> None:
    """In chunks, all in one batch; then again from the prefix cache."""
    folder = make_checkpoint(tmp_path, architecture, initializer_range=scale)
    core = make_core(folder, block_size=16, max_num_batched_tokens=40, num_blocks=96)
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    for _ in range(2):
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


@pytest.mark.parametrize("architecture", params())
def test_two_ranks_or_a_refusal(tmp_path: Path, architecture: str) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    prompts = [random_prompt(random.Random(2), length) for length in (1, 16, 41)]
    if architecture in NOT_SHARED:
        with pytest.raises(ModelError, match=rf"--tensor-parallel-size 2: .*{architecture}.*; use 1"):
            ParallelPlan(AutoConfig.from_pretrained(folder), 2)
        return
    with ranks(folder, 2, max_num_batched_tokens=40, num_blocks=64) as core:
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
