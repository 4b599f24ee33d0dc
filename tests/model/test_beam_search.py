"""Beam search in one process gives the hypotheses of generate(), whatever happens to the beams' blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.engine.scheduling.step_plan import Move
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.types import Request, RequestSpec, Sampling, TokenOutput
from tests.support.checkpoints import EOS_ID, reference_model
from tests.support.engines import make_core, random_prompt, run
from tests.support.reference_beams import assert_all_same_beams, assert_same_beams, generate_beams, one_thread

Checkpoints = Callable[..., Path]
MANY_ENDS = tuple(range(1, 256, 4))  # so that hypotheses end at every length


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with one_thread():
        yield


def beams(width: int, **fields: Any) -> Sampling:
    return Sampling(**{"n": width, "beam_width": width, "temperature": 0.0, "max_tokens": 16, **fields})


def ids_of(tokens: dict[int, list[TokenOutput]], sampling: Sampling) -> list[list[int]]:
    """Returns every hypothesis, whole and in order."""
    assert sorted(tokens) == list(range(sampling.n))
    for each in tokens.values():
        assert [token.position for token in each] == list(range(len(each)))
        assert [token.finish_reason is None for token in each] == [True] * (len(each) - 1) + [False]
    return [[token.token_id for token in tokens[index]] for index in range(sampling.n)]


def check(core: EngineCore, folder: Path, prompt: list[int], sampling: Sampling) -> list[list[int]]:
    found = ids_of(run(core, [Request("r", RequestSpec(prompt, sampling))])["r"], sampling)
    assert_same_beams(folder, prompt, found, sampling)
    return found


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "deepseek_v3"])
def test_prompts_of_every_length(checkpoint: Checkpoints, architecture: str) -> None:
    """Covers prompts of one token, a block, a block and one token, and more than a step, batched and alone."""
    folder = checkpoint(architecture)
    core = make_core(folder, block_size=16, max_num_batched_tokens=40, num_blocks=256, max_model_len=128)
    rng = random.Random(architecture)
    prompts = [random_prompt(rng, length) for length in (1, 16, 17, 41, 100)]
    sampling = beams(rng.randrange(2, 6), stop_token_ids=MANY_ENDS)
    tokens = run(core, [Request(f"r{at}", RequestSpec(prompt, sampling)) for at, prompt in enumerate(prompts)])
    assert_all_same_beams(folder, prompts, [ids_of(each, sampling) for each in tokens.values()], sampling)
    sampling = beams(rng.randrange(2, 6), n=1)
    alone = [ids_of(run(core, [Request("r", RequestSpec(prompt, sampling))])["r"], sampling) for prompt in prompts]
    assert_all_same_beams(folder, prompts, alone, sampling)


def test_penalties_and_ways_to_stop(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    core = make_core(folder, block_size=8, num_blocks=200, max_model_len=128)
    rng = random.Random(5)
    ways: list[Any] = [False, True, "never"]
    ended = full = 0
    for width, penalty, way in product((2, 3, 4, 5), (0.0, 0.5, 1.0, 2.0, -1.0), ways):
        sampling = beams(
            width,
            max_tokens=rng.randrange(1, 17),
            length_penalty=penalty,
            early_stopping=way,
            stop_token_ids=rng.choice([(), (9,), MANY_ENDS, MANY_ENDS]),
        )
        for each in check(core, folder, random_prompt(rng, rng.randrange(1, 30)), sampling):
            full += len(each) == sampling.max_tokens
            ended += len(each) < sampling.max_tokens
    assert min(full, ended) > 40, "no hypothesis ended early"


def test_the_models_own_end(checkpoint: Checkpoints) -> None:
    """Some hypotheses end with the model's end token, others continue."""
    folder = checkpoint("llama", seed=41)
    prompt = random_prompt(random.Random(6), 20)
    usual = generate_beams(folder, prompt, beams(3))
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS_ID}, {usual[0][4]}, {usual[1][2]}]}}')
    reference_model.cache_clear()
    core = make_core(folder, block_size=8, num_blocks=64, max_model_len=128)
    found = check(core, folder, prompt, beams(3))
    assert found != usual
    tokens = run(core, [Request("r", RequestSpec(prompt, beams(3)))])["r"]
    reasons = {len(each): each[-1].finish_reason for each in tokens.values()}
    assert all((reason == "stop") == (length < 16) for length, reason in reasons.items())
    assert "stop" in reasons.values()
    assert check(core, folder, prompt, beams(3, ignore_eos=True)) == usual
    longer = ids_of(run(core, [Request("r", RequestSpec(prompt, beams(3, min_tokens=12)))])["r"], beams(3))
    assert all(len(each) > 12 for each in longer)


@pytest.mark.parametrize(
    "settings",
    [
        {"preemption_mode": "swap", "swap_space_gib": 0.0001},
        {"preemption_mode": "recompute", "enable_prefix_caching": False},
        {"max_num_seqs": 4},
    ],
    ids=str,
)
def test_constant_preemption(checkpoint: Checkpoints, settings: dict[str, object]) -> None:
    """Runs searches and single sequences in a pool that holds at most two of them."""
    folder = checkpoint("llama")
    core = make_core(folder, block_size=4, max_num_batched_tokens=32, num_blocks=24, max_model_len=96, **settings)
    moves: list[Move] = []
    move = core.runner.move

    def count(each: Sequence[Move]) -> None:
        moves.extend(each)
        move(each)

    core.runner.move = count  # type: ignore[method-assign]
    rng = random.Random(7)
    requests = []
    for at in range(8):
        ends = rng.choice([(), MANY_ENDS])
        sampling = beams(rng.randrange(2, 5), max_tokens=24, stop_token_ids=ends)
        if at % 3 == 2:
            sampling = Sampling(max_tokens=24, temperature=0.0)
        requests.append(
            Request(f"r{at}", RequestSpec(random_prompt(rng, rng.randrange(1, 50)), sampling), arrival_s=float(at))
        )
    found = run(core, requests)
    for request in [r for r in requests if r.sampling.beam_width]:
        outputs = ids_of(found[request.request_id], request.sampling)
        assert_same_beams(folder, request.prompt_token_ids, outputs, request.sampling)
    assert core.scheduler.num_preemptions > 3
    kinds = {each.kind for each in moves}
    assert kinds == ({"copy", "out", "in"} if settings.get("preemption_mode") == "swap" else {"copy"})


def test_a_cached_prefix_and_company_change_nothing(checkpoint: Checkpoints) -> None:
    folder = checkpoint("qwen3")
    core = make_core(folder, block_size=8, num_blocks=128, max_model_len=96)
    rng = random.Random(8)
    prompt, sampling = random_prompt(rng, 33), beams(4, stop_token_ids=MANY_ENDS)
    alone = check(core, folder, prompt, sampling)
    requests = [Request("again", RequestSpec(prompt, sampling))]
    for at in range(6):
        others = beams(3) if at % 2 else Sampling(n=2, max_tokens=12, temperature=1.0, seed=at)
        requests.append(Request(f"o{at}", RequestSpec(random_prompt(rng, rng.randrange(1, 40)), others)))
    assert ids_of(run(core, requests)["again"], sampling) == alone
    assert requests[0].num_cached_tokens == 32


def test_logprobs_of_every_token(checkpoint: Checkpoints) -> None:
    """Logprobs equal those of the same tokens in a prompt."""
    folder = checkpoint("llama")
    core = make_core(folder, block_size=8, num_blocks=64, max_model_len=96)
    prompt, sampling = random_prompt(random.Random(9), 12), beams(3, n=2, logprobs=2, presence_penalty=0.5)
    tokens = run(core, [Request("r", RequestSpec(prompt, sampling))])["r"]
    for output, told in zip(ids_of(tokens, sampling), tokens.values(), strict=True):
        again = Request(
            "p", RequestSpec([*prompt, *output], Sampling(max_tokens=1, prompt_logprobs=2, temperature=0.0))
        )
        run(core, [again])
        for token, known in zip(told, again.prompt_logprobs[len(prompt) :], strict=True):
            assert token.logprobs is not None
            assert known is not None
            assert token.logprobs.logprob == pytest.approx(known.logprob, abs=2e-3)
            assert token.logprobs.rank == known.rank
            assert [i for i, _ in token.logprobs.top] == [i for i, _ in known.top]
