"""Vectors of prompts are transformers' hidden states, and the same to the bit in any company."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pd_cluster.devices.device import CPU
from pd_cluster.types import Order, Pooling, Request, Sampling
from tests.model.test_company import wide
from tests.support.checkpoints import CONFIGS, make_checkpoint, reference_model
from tests.support.engines import generate, make_core, random_prompt
from tests.support.more_checkpoints import MORE
from tests.support.ranks import ranks
from tests.support.vectors import embed_all, numbers, pooling_request, reference_vector, run_pooling

Checkpoints = Callable[[str], Path]

LAST, MEAN = Pooling(kind="last"), Pooling(kind="mean")
LOGITS = Pooling(kind="logits", token_ids=(9, 0, 258))
POOLINGS = [LAST, MEAN, Pooling(kind="last", normalizes=False), Pooling(kind="mean", dimensions=7)]
LENGTHS = (1, 2, 16, 17, 39, 40, 41, 100)
QUICK = ("llama", "qwen3", "gemma2", "gemma", "mixtral", "gpt2", "opt")  # fused or not, normed or not, projected
TOLERANCE = 1e-5
LOOSE = {"granitemoe": 2e-5, "minimax": 2e-5}  # 1.2e-5 were seen: random experts of these amplify rounding

pytestmark = pytest.mark.usefixtures("one_thread")


def prompts_of(seed: int = 1, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_prompt(rng, length) for length in lengths]


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """`tolerance` is relative to the vector's largest number, or to 1."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * max(1.0, float(np.abs(expected).max()))


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted({*CONFIGS, *MORE})],
)
def test_numbers_are_transformers(tmp_path: Path, architecture: str) -> None:
    """In chunks, and all in one batch."""
    folder = make_checkpoint(tmp_path, architecture)
    core = make_core(folder, block_size=16, max_num_batched_tokens=40, num_blocks=64)
    prompts = prompts_of()
    for pooling in POOLINGS:
        together = embed_all(core, prompts, pooling)
        for prompt, vector in zip(prompts, together, strict=True):
            expected = reference_vector(folder, prompt, pooling)
            assert_close(np.frombuffer(vector, "<f4"), expected, LOOSE.get(architecture, TOLERANCE))
        if architecture in QUICK:  # tiny widths of others are not packed; test_company.py has them all, wide
            assert [embed_all(core, [prompt], pooling)[0] for prompt in prompts] == together


@pytest.mark.parametrize("max_num_batched_tokens", [24, 2048])
def test_a_wide_model_has_the_same_bits_in_any_company(tmp_path: Path, max_num_batched_tokens: int) -> None:
    folder = wide(tmp_path, "llama")
    prompts = prompts_of(2, (7, 1, 33, 16, 40, 2))
    core = make_core(folder, num_blocks=64, max_model_len=200, max_num_batched_tokens=max_num_batched_tokens)
    for pooling in (LAST, MEAN):
        together = embed_all(core, prompts, pooling)
        assert [embed_all(core, [prompt], pooling)[0] for prompt in prompts] == together
        for prompt, vector in zip(prompts, together, strict=True):
            assert_close(np.frombuffer(vector, "<f4"), reference_vector(folder, prompt, pooling))


@pytest.mark.parametrize("architecture", QUICK)
def test_logits_are_transformers_and_the_same_in_any_company(tmp_path: Path, architecture: str) -> None:
    folder = wide(tmp_path, architecture) if architecture == "llama" else make_checkpoint(tmp_path, architecture)
    core = make_core(folder, block_size=16, max_num_batched_tokens=40, num_blocks=64, max_model_len=200)
    prompts = [*prompts_of(), prompts_of()[-1]]  # the last one finds the other's chunks in the prefix cache
    together = embed_all(core, prompts, LOGITS)
    assert [embed_all(core, [prompt], LOGITS)[0] for prompt in prompts] == together
    for prompt, vector in zip(prompts, together, strict=True):
        assert_close(np.frombuffer(vector, "<f4"), reference_logits(folder, prompt), 1e-4)


def reference_logits(folder: Path, prompt: list[int]) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = reference_model(folder)(torch.tensor([prompt])).logits[0, -1, [9, 0, 258]].numpy()
    return found


def test_beside_requests_that_generate(checkpoint: Checkpoints) -> None:
    """Neither changes the other, with logprobs of prompts, guides' absence and several sequences in the same steps."""
    core = make_core(checkpoint("llama"), block_size=16, max_num_batched_tokens=40, num_blocks=96)
    prompts = prompts_of(3, (50, 3, 33, 60))
    samplings = [
        Sampling(max_tokens=9, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=9, temperature=0.0, ignore_eos=True, prompt_logprobs=2),
        Sampling(max_tokens=9, n=3, seed=5, ignore_eos=True),
        Sampling(max_tokens=5, n=2, beam_width=3, temperature=0.0, ignore_eos=True),
    ]

    def generating() -> list[Request]:
        pairs = enumerate(zip(prompts, samplings, strict=True))
        return [Request(f"g{at}", Order(prompt, each), arrival_s=at + 0.5) for at, (prompt, each) in pairs]

    def pooling() -> list[Request]:
        kinds = [LAST, MEAN, MEAN, LAST]
        pairs = enumerate(zip(prompts, kinds, strict=True))
        return [pooling_request(f"p{at}", prompt, each, float(at)) for at, (prompt, each) in pairs]

    alone = generating()
    run_pooling(core, alone)
    vectors = {name: pooled.vector for name, pooled in run_pooling(core, pooling()).items()}
    mixed = generating()
    found = run_pooling(core, [*pooling(), *mixed])
    assert {name: pooled.vector for name, pooled in found.items()} == vectors
    assert [request.output_token_ids for request in mixed] == [request.output_token_ids for request in alone]
    assert mixed[1].prompt_logprobs == alone[1].prompt_logprobs


def test_the_prefix_cache_serves_the_last_token_and_not_a_mean(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    core = make_core(folder, block_size=16, num_blocks=64, max_num_batched_tokens=64)
    (prompt,) = prompts_of(4, (90,))
    generate(core, [prompt], Sampling(max_tokens=1, temperature=0.0))  # in one chunk: blocks of other bits
    for pooling, num_cached in ((LAST, 64), (MEAN, 0)):  # two chunks of 32
        first, again = (run_pooling(core, [pooling_request("r", prompt, pooling)])["r"] for _ in range(2))
        assert first.num_cached_tokens == 0
        assert again.vector == first.vector
        assert again.num_cached_tokens == num_cached
        assert_close(numbers(again), reference_vector(folder, prompt, pooling))


@pytest.mark.parametrize("swap_space_gib", [0.0, 0.01], ids=["computed again", "swapped"])
def test_preempted_in_the_middle_of_a_mean(checkpoint: Checkpoints, swap_space_gib: float) -> None:
    """An older sequence grows until the prompt under way gives its blocks up."""
    core = make_core(
        checkpoint("llama"),
        block_size=16,
        num_blocks=7,
        max_model_len=112,
        max_num_batched_tokens=4,
        swap_space_gib=swap_space_gib,
        preemption_mode="swap" if swap_space_gib else "recompute",
    )
    (prompt, other) = prompts_of(5, (60, 30))
    expected = run_pooling(core, [pooling_request("p", prompt, MEAN)])["p"].vector
    greedy = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    before = core.scheduler.num_preemptions
    found = run_pooling(core, [Request("g", Order(other, greedy)), pooling_request("p", prompt, MEAN, 1.0)])
    assert core.scheduler.num_preemptions > before
    assert found["p"].vector == expected


def test_an_abort_in_the_middle_holds_nothing(checkpoint: Checkpoints) -> None:
    core = make_core(checkpoint("llama"), block_size=16, num_blocks=64, max_num_batched_tokens=16)
    request = pooling_request("p", prompts_of(6, (60,))[0], MEAN)
    core.scheduler.add(request)
    core.step()
    assert request in core.pooler.sums
    core.scheduler.finish(request)
    del request
    core.step()
    assert not core.pooler.sums
    assert core.scheduler.blocks.num_held == 0


def test_more_dimensions_than_the_model_has(checkpoint: Checkpoints) -> None:
    core = make_core(checkpoint("llama"), block_size=16, num_blocks=64)
    core.scheduler.add(pooling_request("p", [1, 2, 3], Pooling(dimensions=65)))
    ((request, why),) = core.step().failed
    assert request.request_id == "p"
    assert why == "dimensions 65: this model's vectors have 64; ask for fewer"
    assert not core.scheduler.requests
    assert core.scheduler.blocks.num_held == 0


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_two_ranks(checkpoint: Checkpoints, architecture: str) -> None:
    folder = checkpoint(architecture)
    prompts = prompts_of(7, (1, 16, 41, 90))
    with ranks(folder, 2, block_size=16, max_num_batched_tokens=40, num_blocks=64, device=CPU) as core:
        for pooling in (LAST, MEAN):
            together = embed_all(core, prompts, pooling)
            for prompt, vector in zip(prompts, together, strict=True):
                assert_close(np.frombuffer(vector, "<f4"), reference_vector(folder, prompt, pooling))
            if architecture == "llama":  # fused: every product is packed
                assert [embed_all(core, [prompt], pooling)[0] for prompt in prompts] == together
        for prompt, vector in zip(prompts, embed_all(core, prompts, LOGITS), strict=True):
            assert_close(np.frombuffer(vector, "<f4"), reference_logits(folder, prompt), 1e-4)
