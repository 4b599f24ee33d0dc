"""With KV from the prefix cache, shared by forks, or swapped out and in, tokens equal the model's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from pd_cluster.engine.scheduling.step_plan import Move
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import reference_model
from tests.support.engines import assert_all_same, assert_same, generate, make_core, random_prompt, run

Checkpoints = Callable[..., Path]
GREEDY = Sampling(max_tokens=16, temperature=0.0)
BLOCK_SIZE = 8


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt2", "gpt_oss"])
def test_a_cached_prefix_gives_the_same_tokens(checkpoint: Checkpoints, architecture: str) -> None:
    """Covers the same prompt, an extension of it, and one that diverges midway."""
    folder = checkpoint(architecture)
    core = make_core(folder, block_size=BLOCK_SIZE, max_num_batched_tokens=40, num_blocks=64)
    prompt = random_prompt(random.Random(7), 70)
    (answer,) = generate(core, [prompt], GREEDY)
    prompts, outputs = [], []
    for again, num_cached in (
        (prompt, 64),
        (prompt[:64], 56),  # the last token is always computed
        ([*prompt, *answer, 5, 6], 80),  # generated tokens are cached, too, as far as blocks are full
        ([*prompt[:30], 1, 2, 3, *prompt[30:]], 24),
    ):
        request = Request("again", RequestSpec(again, GREEDY))
        tokens = run(core, [request])["again"][0]
        assert request.num_cached_tokens == num_cached
        prompts.append(again)
        outputs.append([token.token_id for token in tokens])
    assert_all_same(folder, prompts, outputs, GREEDY.max_tokens)


def test_salts_and_a_cache_that_is_off_share_nothing(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    prompt = random_prompt(random.Random(8), 40)
    core = make_core(folder, block_size=BLOCK_SIZE, num_blocks=64, max_model_len=128)
    for salt, num_cached in (("", 0), ("a", 0), ("b", 0), ("a", 32), ("", 32)):
        request = Request("r", RequestSpec(prompt, GREEDY, cache_salt=salt))
        run(core, [request])
        assert request.num_cached_tokens == num_cached, salt
    off = make_core(folder, block_size=BLOCK_SIZE, num_blocks=64, max_model_len=128, enable_prefix_caching=False)
    for _ in range(2):
        request = Request("r", RequestSpec(prompt, GREEDY))
        run(off, [request])
        assert request.num_cached_tokens == 0
    assert off.scheduler.blocks.num_cached == 0


def tiny_core(folder: Path, **settings: object) -> EngineCore:
    """Returns an engine with so few blocks that most requests are preempted, some several times."""
    return make_core(folder, block_size=4, max_num_batched_tokens=32, num_blocks=24, max_model_len=96, **settings)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"preemption_mode": "swap", "swap_space_gib": 0.0001}),  # swap space for some of them
        ("llama", {"preemption_mode": "recompute"}),
        ("llama", {"preemption_mode": "recompute", "enable_prefix_caching": False}),
        ("mistral", {"preemption_mode": "swap", "swap_space_gib": 0.01}),  # only blocks in the window are swapped
    ],
    ids=str,
)
def test_constant_preemption(checkpoint: Checkpoints, architecture: str, settings: dict[str, object]) -> None:
    folder = checkpoint(architecture)
    core = tiny_core(folder, **settings)
    moves: list[Move] = []
    move = core.runner.move

    def count(each: Sequence[Move]) -> None:
        moves.extend(each)
        move(each)

    core.runner.move = count  # type: ignore[method-assign]
    rng = random.Random(3)
    prompts = [random_prompt(rng, rng.randrange(1, 40)) for _ in range(16)]
    long = Sampling(max_tokens=48, temperature=0.0)
    assert_all_same(folder, prompts, generate(core, prompts, long), long.max_tokens)
    assert core.scheduler.num_preemptions > 2
    kinds = {each.kind for each in moves}
    assert kinds == ({"out", "in"} if settings["preemption_mode"] == "swap" else set())


def test_n_sequences_are_the_same_alone_in_a_batch_and_after_preemption(checkpoint: Checkpoints) -> None:
    folder = checkpoint("qwen3")
    rng = random.Random(4)
    prompt = random_prompt(rng, 37)
    sampling = Sampling(n=3, max_tokens=20, temperature=1.0, seed=11, frequency_penalty=0.5)

    def outputs(core: EngineCore, others: int) -> list[list[int]]:
        request = Request("n", RequestSpec(prompt, sampling), arrival_s=2.0)
        more = [
            RequestSpec(random_prompt(rng, rng.randrange(1, 60)), Sampling(max_tokens=16, seed=i))
            for i in range(others)
        ]
        beside = [Request(f"o{i}", order, arrival_s=i) for i, order in enumerate(more)]
        found = run(core, [request, *beside])["n"]
        return [[token.token_id for token in found[index]] for index in range(3)]

    roomy = make_core(folder, block_size=4, num_blocks=400, max_model_len=96)
    alone = outputs(roomy, 0)
    assert len({tuple(each) for each in alone}) == 3
    assert outputs(roomy, 31) == alone
    tiny = tiny_core(folder)
    assert outputs(tiny, 12) == alone
    assert tiny.scheduler.num_preemptions > 0


def test_n_sequences_share_the_blocks_of_the_prompt(checkpoint: Checkpoints) -> None:
    core = make_core(checkpoint("llama"), block_size=4, num_blocks=60, max_model_len=96)
    sampling = Sampling(n=4, max_tokens=8, temperature=1.0, ignore_eos=True)
    core.scheduler.add(Request("n", RequestSpec(random_prompt(random.Random(1), 42), sampling)))
    core.step()
    core.step()
    # The prompt's 10 full blocks are shared; each sequence has its own block with the prompt's last tokens.
    assert core.scheduler.blocks.num_held == 10 + 4


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("budget", [7, 512])
def test_logprobs_are_those_of_the_model(checkpoint: Checkpoints, architecture: str, budget: int) -> None:
    """Covers logprobs of chosen tokens and of prompts, even chunked, cached or long ones."""
    folder = checkpoint(architecture)
    core = make_core(folder, block_size=BLOCK_SIZE, max_num_batched_tokens=budget, num_blocks=64)
    prompt = random_prompt(random.Random(5), 33)
    sampling = Sampling(max_tokens=6, temperature=0.0, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    for _ in range(2):
        request = Request("r", RequestSpec(prompt, sampling))
        tokens = run(core, [request])["r"][0]
        ids = [*prompt, *(token.token_id for token in tokens)]
        with torch.inference_mode():
            logprobs = reference_model(folder)(torch.tensor([ids])).logits[0].log_softmax(-1)  # [num_tokens, vocab]
        told = [*request.prompt_logprobs, *(token.logprobs for token in tokens)]
        assert told[0] is None
        assert len(told) == len(ids)
        for position, entry in enumerate(told[1:], start=1):
            assert entry is not None
            expected = logprobs[position - 1]
            best = expected.topk(len(entry.top))
            assert entry.logprob == pytest.approx(float(expected[ids[position]]), abs=2e-3)
            assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=2e-3)
            assert len(entry.top) == (2 if position < len(prompt) else 3)
            assert entry.rank == 1 + int((expected > expected[ids[position]]).sum())


@pytest.mark.parametrize("architecture", ["mistral", "starcoder2"])
def test_a_window_bounds_what_a_request_holds(checkpoint: Checkpoints, architecture: str) -> None:
    """With one window in all layers, blocks before it are released; tokens and prefix cache stay right."""
    folder = checkpoint(architecture)
    core = make_core(folder, block_size=4, max_num_batched_tokens=40, num_blocks=160)
    assert core.runner.window == 24  # type: ignore[attr-defined]
    prompt = random_prompt(random.Random(12), 90)
    long = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    request = Request("r", RequestSpec(prompt, long))
    core.scheduler.add(request)
    while core.scheduler.requests:
        core.step()
        core.scheduler.check()
        if request.output_token_ids and core.scheduler.requests:
            assert core.scheduler.blocks.num_held <= 24 // 4 + 1
    assert_same(folder, prompt, request.output_token_ids, long.max_tokens)
    (again,) = generate(core, [[*prompt, *request.output_token_ids]], GREEDY)
    assert_same(folder, [*prompt, *request.output_token_ids], again, GREEDY.max_tokens)


@pytest.mark.parametrize("architecture", ["gemma2", "llama"])
def test_windows_that_differ_free_nothing(checkpoint: Checkpoints, architecture: str) -> None:
    assert make_core(checkpoint(architecture)).runner.window is None  # type: ignore[attr-defined]
