"""A model on several ranks generates what it does on one: transformers' tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.errors import ModelError
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import CONFIGS
from tests.support.engines import assert_all_same, generate, make_core, random_prompt, run
from tests.support.ranks import ranks
from tests.support.usual import usual_first

Checkpoints = Callable[..., Path]
GREEDY = Sampling(max_tokens=12, temperature=0.0)
WITHOUT_PLAN = ("gpt2", "opt", "stablelm", "gpt_oss")
REFUSED = (*WITHOUT_PLAN, "gpt_neox")


@pytest.mark.parametrize("architecture", usual_first(name for name in CONFIGS if name not in REFUSED))
def test_two_ranks_generate_the_same_tokens(checkpoint: Checkpoints, architecture: str) -> None:
    """Runs prompts in chunks and batched, with split KV heads."""
    folder = checkpoint(architecture)
    rng = random.Random(1)
    prompts = [random_prompt(rng, n) for n in (1, 16, 41, 70)]
    with ranks(folder, 2, max_num_batched_tokens=40, num_blocks=64) as core:
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


@pytest.mark.parametrize(
    ("architecture", "size", "changes"),
    [
        (
            "llama",
            4,
            {"num_key_value_heads": 1, "vocab_size": 321},
        ),  # replicated heads, and a vocabulary not divisible by the ranks
        ("gemma2", 4, {"num_key_value_heads": 4}),
        ("mixtral", 4, {"num_key_value_heads": 2}),
        # Neither heads nor ranks are powers of two.
        ("llama", 3, {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),
        # The norm's mean square is summed over ranks, and a replicated head must count once.
        ("olmo2", 4, {"num_key_value_heads": 2}),
    ],
    ids=str,
)
def test_three_and_four_ranks(checkpoint: Checkpoints, architecture: str, size: int, changes: dict[str, int]) -> None:
    folder, rng = checkpoint(architecture, **changes), random.Random(2)
    last = changes.get("vocab_size", 320) - 1
    prompts = [[last, 0, 161, 160, 5], *(random_prompt(rng, n) for n in (3, 17, 60))]
    with ranks(folder, size, block_size=8, num_blocks=64) as core:
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_and_forks_move_blocks_on_every_rank(checkpoint: Checkpoints, mode: str) -> None:
    """Seeded sampling with n = 3 in a too small pool swaps, copies and shares blocks, with one rank's results."""
    folder = checkpoint("llama")
    sizes: dict[str, Any] = {"block_size": 4, "max_model_len": 96}
    settings = {**sizes, "preemption_mode": mode, "swap_space_gib": 0.01, "max_num_batched_tokens": 32}
    rng = random.Random(4)
    prompts = [random_prompt(rng, rng.randrange(4, 40)) for _ in range(6)]

    def requests() -> list[Request]:
        sampling = Sampling(n=3, max_tokens=20, temperature=0.8, seed=7)
        return [Request(f"r{i}", RequestSpec(prompt, sampling), arrival_s=float(i)) for i, prompt in enumerate(prompts)]

    expected = run(make_core(folder, num_blocks=512, **sizes), requests())
    with ranks(folder, 2, num_blocks=26, **settings) as core:
        assert run(core, requests()) == expected
        assert core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_no_step_ends_before_all_ranks_have_written(
    checkpoint: Checkpoints, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk without logits also ends with a sum over the ranks, because otherwise a slower rank could still write a
    block that has been freed."""
    folder = checkpoint(architecture)
    with ranks(folder, 2, max_num_batched_tokens=16, num_blocks=64) as core:
        group, events = core.runner.runner.group, []  # type: ignore[attr-defined]
        plain_sum = group.sum

        def counted(x: torch.Tensor) -> torch.Tensor:
            events.append("sum")
            summed: torch.Tensor = plain_sum(x)
            return summed

        monkeypatch.setattr(group, "sum", counted)
        core.scheduler.add(Request("r", RequestSpec(random_prompt(random.Random(5), 40), GREEDY)))
        core.step(lambda plan: lambda num_layers: events.append(f"layer {num_layers}"))
        assert events.index("layer 3") < len(events) - 1
        assert events[-1] == "sum"
        core.scheduler.finish(core.scheduler.requests["r#0"])


def test_each_rank_holds_its_share_only(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    with ranks(folder, 2, num_blocks=32) as core:
        pool = core.runner.runner.pool  # type: ignore[attr-defined]
        assert (pool.layout.num_kv_heads, pool.layout.local_kv_heads, pool.data.shape[4]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("architecture", "size", "changes", "message"),
    [
        ("llama", 3, {}, "4 attention heads cannot be split evenly"),
        ("llama", 4, {"num_key_value_heads": 3, "num_attention_heads": 8}, "3 KV heads can be neither split"),
        ("llama", 4, {"intermediate_size": 98}, "intermediate_size 98 of config.json"),
        ("gpt2", 2, {}, "transformers has no tensor parallel plan for gpt2"),
        ("gpt_neox", 2, {}, "gpt_neox cannot be split"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    checkpoint: Checkpoints, architecture: str, size: int, changes: dict[str, int], message: str
) -> None:
    folder = checkpoint(architecture, **changes)
    with pytest.raises(ModelError, match=f"--tensor-parallel-size {size}: {message}"), ranks(folder, size):
        pass
