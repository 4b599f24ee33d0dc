"""Greedy output of the engine equals transformers' generate(), token for token."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from pd_cluster.checkpoints.checkpoint import SUPPORTED_MODEL_TYPES
from pd_cluster.errors import ModelError
from pd_cluster.model.language_model.causal_lm import PlainCausalLM
from pd_cluster.model.parallel.parallel_plan import REFUSED, ParallelPlan
from pd_cluster.model.runner.load_runner import load_runner
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import CONFIGS, make_checkpoint
from tests.support.engines import DEVICE, assert_all_same, assert_same, generate, make_core, random_prompt
from tests.support.hybrids import HYBRIDS
from tests.support.more_checkpoints import MORE
from tests.support.ranks import ranks

BLOCK_SIZE = 16
GREEDY = Sampling(max_tokens=24, temperature=0.0)
FEW = Sampling(max_tokens=8, temperature=0.0)  # enters the next block for some of the lengths below

Checkpoints = Callable[[str], Path]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_prompts_of_every_length(checkpoint: Checkpoints, architecture: str) -> None:
    """Covers prompts of one token, a block, a block and one token, and more than a step, alone and batched."""
    folder = checkpoint(architecture)
    core = make_core(folder, block_size=BLOCK_SIZE, max_num_batched_tokens=40, num_blocks=64)
    rng = random.Random(1)
    prompts = [random_prompt(rng, n) for n in (1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, 39, 40, 41, 100)]
    alone = [generate(core, [prompt], FEW)[0] for prompt in prompts[::2]]
    assert_all_same(folder, prompts[::2], alone, FEW.max_tokens)
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_32_at_once(checkpoint: Checkpoints, architecture: str) -> None:
    folder = checkpoint(architecture)
    core = make_core(folder, block_size=BLOCK_SIZE, max_num_batched_tokens=128, num_blocks=256)
    rng = random.Random(2)
    prompts = [random_prompt(rng, rng.randrange(1, 90)) for _ in range(32)]
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


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "llama"])
def test_up_to_the_last_position(checkpoint: Checkpoints, architecture: str) -> None:
    """With learned positions, the maximum length is the position table's, whose last row is used, too."""
    folder = checkpoint(architecture, max_position_embeddings=80)
    core = make_core(folder, block_size=BLOCK_SIZE, max_num_batched_tokens=40)
    assert core.runner.max_model_len == 80  # type: ignore[attr-defined]
    prompt = random_prompt(random.Random(6), 80 - GREEDY.max_tokens)
    (output,) = generate(core, [prompt], GREEDY)
    assert_same(folder, prompt, output, GREEDY.max_tokens)
    with pytest.raises(ModelError, match=r"--max-model-len 81: .* 80; use at most that"):
        make_core(folder, max_model_len=81)


@pytest.mark.parametrize(
    ("architecture", "fused"),
    [
        *((name, True) for name in ("llama", "gemma2", "qwen2_moe", "olmo2")),
        *((name, False) for name in ("llama", "gpt2")),
    ],
)
def test_layers_that_are_done_do_not_change(
    checkpoint: Checkpoints, architecture: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers reported as done during a step are final, so early sent KV cache equals the cache at the end."""
    if not fused:
        monkeypatch.setattr("pd_cluster.model.loading.model_loader.can_fuse", lambda *_: False)
    runner = load_runner(EngineConfig(model=str(checkpoint(architecture)), block_size=4, num_blocks=128))
    assert fused or isinstance(runner.model, PlainCausalLM)
    request = Request("r", RequestSpec(random_prompt(random.Random(1), 21), Sampling(max_tokens=2)))
    request.tables = [random.Random(2).sample(range(128), 6) for _ in runner.pools]
    seen: list[list[torch.Tensor]] = []

    def contents(num_layers: int) -> list[torch.Tensor]:
        """Returns the first layers' contents in the pools."""
        own = [[layer for layer in range(num_layers) if pool.has_layer(layer)] for pool in runner.pools]
        return [
            torch.stack([plane for layer in layers for plane in pool.planes(layer)])
            for pool, layers in zip(runner.pools, own, strict=True)
            if layers
        ]

    def on_layer(num_layers: int) -> None:
        assert num_layers == len(seen) + 1
        seen.append(contents(num_layers))

    num_layers = sum(pool.layout.num_layers for pool in runner.pools)
    for num_tokens in (10, 11):  # in two chunks
        seen.clear()
        runner.forward([(request, num_tokens)], on_layer)
        assert len(seen) == num_layers
        for at, then in enumerate(seen, 1):
            same = map(torch.equal, then, contents(at))
            assert all(same), f"layer {at} was not done"
        request.num_computed_tokens += num_tokens
    for pool, table in zip(runner.pools, request.tables, strict=True):
        written = pool.data[table[0]]
        assert (written.abs().sum(dim=(1, 2, 3, 4)) > 0).all(), "a layer has nothing in the pool"


# ---- architectures beside those: with two weight scales, and on two ranks


GREEDY_20 = Sampling(max_tokens=20, temperature=0.0)
NOT_SHARED = (*REFUSED, "gpt_bigcode", "gptj", "granite_swa", "hunyuan_v1_dense", "longcat_flash")
QUICK = (
    "phi",
    "olmoe",
    "deepseek_v3",
    "mimo_v2_flash",
)  # quick tests of every special feature would take too long
LENGTHS = (1, 2, 16, 17, 40, 41, 100, 70)


def params(*without: str) -> list[object]:
    names = [name for name in MORE if name not in without]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def test_the_list_is_what_is_tested() -> None:
    assert sorted(SUPPORTED_MODEL_TYPES) == sorted([*CONFIGS, *MORE, *HYBRIDS])  # HYBRIDS: see test_states.py


@pytest.mark.parametrize("scale", [0.25, pytest.param(0.06, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", params())
def test_prompts_of_other_architectures(tmp_path: Path, architecture: str, scale: float) -> None:
    """Runs prompts in chunks, batched, then from the prefix cache."""
    folder = make_checkpoint(tmp_path, architecture, initializer_range=scale)
    core = make_core(folder, block_size=16, max_num_batched_tokens=40, num_blocks=96)
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    for _ in range(2):
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY_20), GREEDY_20.max_tokens)


@pytest.mark.parametrize("architecture", params())
def test_two_ranks_or_a_refusal(tmp_path: Path, architecture: str) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    prompts = [random_prompt(random.Random(2), length) for length in (1, 16, 41)]
    if architecture in NOT_SHARED:
        with pytest.raises(ModelError, match=rf"--tensor-parallel-size 2: .*{architecture}.*; use 1"):
            ParallelPlan(AutoConfig.from_pretrained(folder), 2)
        return
    with ranks(folder, 2, max_num_batched_tokens=40, num_blocks=64) as core:
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY_20), GREEDY_20.max_tokens)
