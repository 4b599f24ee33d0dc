"""Ranks that share a model, with steps as graphs and launched ahead of the host, as on GPUs; here over gloo on CPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.engine.step.look_ahead import Begins
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.ahead_graphs import go_ahead_with_graphs, num_captured
from tests.support.engines import assert_all_same, assert_same, generate, make_core, random_prompt, run
from tests.support.ranks import ranks

Checkpoints = Callable[..., Path]
GREEDY = Sampling(max_tokens=12, temperature=0.0)
ASKING = Sampling(max_tokens=12, temperature=0.8, top_k=20, seed=5, ignore_eos=True, frequency_penalty=0.4, logprobs=2)
LENS = (1, 9, 20, 33, 5)
SETTINGS = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "max_model_len": 64, "num_blocks": 64}


@pytest.fixture(autouse=True)
def runners(monkeypatch: pytest.MonkeyPatch) -> list[ModelRunner]:
    return go_ahead_with_graphs(monkeypatch, 8)


@pytest.mark.parametrize(("architecture", "size"), [("llama", 3), ("gemma2", 2), ("mixtral", 2)])
def test_tokens_are_those_of_transformers(
    checkpoint: Checkpoints, runners: list[ModelRunner], architecture: str, size: int
) -> None:
    changes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3} if size == 3 else {}
    folder = checkpoint(architecture, **changes)
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in LENS]
    with ranks(folder, size, **SETTINGS) as core:
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
        assert core.ahead.num_ahead >= core.num_steps - 1  # also those with chunks of prompts
    assert len(runners) == size
    assert len(set(num_captured(runners))) == 1
    assert num_captured(runners)[0] > 0


def test_what_is_asked_of_the_logits_is_what_one_rank_gives(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    rng = random.Random(2)
    prompts = [random_prompt(rng, length) for length in LENS]

    def requests() -> list[Request]:
        return [Request(f"r{i}", RequestSpec(prompt, ASKING), arrival_s=float(i)) for i, prompt in enumerate(prompts)]

    expected = run(make_core(folder, **SETTINGS), requests())
    with ranks(folder, 2, **SETTINGS) as core:
        actual = run(core, requests())
        assert core.ahead.num_ahead > 0
    for name, sequences in expected.items():
        for ours, theirs in zip(actual[name][0], sequences[0], strict=True):
            assert ours.token_id == theirs.token_id
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            assert [token_id for token_id, _ in ours.logprobs.top] == [token_id for token_id, _ in theirs.logprobs.top]
            assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)


def test_a_step_that_is_followed_by_layers_is_no_graph_on_any_rank(
    checkpoint: Checkpoints, runners: list[ModelRunner]
) -> None:
    """If only some ranks replayed a padded graph, sums would have different sizes. Some steps are launched ahead."""
    folder = checkpoint("llama")
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in (4, 7, 9)]
    told: list[int] = []
    with ranks(folder, 2, **SETTINGS) as core:
        for i, prompt in enumerate(prompts):
            core.scheduler.add(Request(f"r{i}", RequestSpec(prompt, GREEDY), arrival_s=float(i)))
        steps = itertools.count()
        found = drive(core, lambda plan: told.append if next(steps) % 3 == 1 else None)
        assert core.ahead.num_ahead > 0
    for i, prompt in enumerate(prompts):
        assert_same(folder, prompt, found[f"r{i}"], GREEDY.max_tokens)
    assert told
    assert num_captured(runners)[0] > 0


def drive(core: EngineCore, begins: Begins) -> dict[str, list[int]]:
    """Runs the engine, without planning ahead in every third step."""
    found: dict[str, list[int]] = {}
    at, plan_ahead = 0, core.scheduler.plan_ahead
    core.scheduler.plan_ahead = lambda *given: plan_ahead(*given) if at % 3 else None  # type: ignore[method-assign]
    for at in range(200):  # noqa: B007  plan_ahead reads it
        if not core.scheduler.requests:
            return found
        for _, token in core.step(begins).sampled:
            found.setdefault(token.request_id, []).append(token.token_id)
    raise AssertionError("the engine did not finish")


def test_an_abort_while_a_step_is_under_way(checkpoint: Checkpoints) -> None:
    """Every rank computes the aborted sequence once too often, but other requests' tokens do not change."""
    folder = checkpoint("llama")
    rng = random.Random(4)
    prompts = [random_prompt(rng, length) for length in (6, 11, 3)]
    sampling = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
    with ranks(folder, 2, **SETTINGS) as core:
        requests = [
            Request(f"r{i}", RequestSpec(prompt, sampling), arrival_s=float(i)) for i, prompt in enumerate(prompts)
        ]
        for request in requests:
            core.scheduler.add(request)
        while not core.ahead.num_ahead:
            core.step()
        core.scheduler.finish(requests[1])
        late = Request("late", RequestSpec(prompts[1], GREEDY), arrival_s=9.0)  # takes the freed blocks
        core.scheduler.add(late)
        for _ in range(100):
            if not core.scheduler.requests:
                break
            core.step()
        assert not core.scheduler.requests
    assert_same(folder, prompts[1], late.output_token_ids, GREEDY.max_tokens)
    (alone,) = generate(make_core(folder, **SETTINGS), [prompts[0]], sampling)
    assert requests[0].output_token_ids == alone
