"""`--kv-host-cache`: evicted blocks come back from host memory bit for bit, and never across salts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pd_cluster.engine.step.core import EngineCore
from pd_cluster.errors import ConfigError
from pd_cluster.kv.host_tier import HostTier, LoadCost
from pd_cluster.kv.prefix import chain_hashes
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.types import Order, Request, Sampling
from tests.support.engines import assert_same, generate, make_core, random_prompt, run

Checkpoints = Callable[..., Path]
NUM_PROMPTS, LENGTH = 6, 60


def make(folder: Path, gib: float = 0.01) -> EngineCore:
    """Makes an engine whose pool holds the last prompt or two."""
    return make_core(folder, num_blocks=16, block_size=8, max_model_len=128, kv_host_cache_gib=gib)


def test_evicted_prompts_are_loaded_and_exact(checkpoint: Checkpoints) -> None:
    model = checkpoint("llama")
    core, rng = make(model), random.Random(1)
    core.scheduler.blocks.tier.cost.is_worth_it = lambda: True  # type: ignore[union-attr,method-assign]
    prompts = [random_prompt(rng, LENGTH) for _ in range(NUM_PROMPTS)]
    first = [generate(core, [prompt], Sampling(max_tokens=6, temperature=0.0))[0] for prompt in prompts]
    assert core.scheduler.num_tier_hit_tokens == 0
    second = [generate(core, [prompt], Sampling(max_tokens=6, temperature=0.0))[0] for prompt in prompts]
    assert second == first
    for prompt, tokens in zip(prompts, second, strict=True):
        assert_same(model, prompt, tokens, 6)
    assert core.scheduler.num_tier_hit_tokens >= (NUM_PROMPTS - 2) * (LENGTH // 8 * 8)
    assert core.scheduler.num_prefix_hit_tokens >= core.scheduler.num_tier_hit_tokens


def test_a_loaded_block_has_the_bits_of_the_evicted_one(checkpoint: Checkpoints) -> None:
    core, rng = make(checkpoint("llama")), random.Random(2)
    tier, blocks = core.scheduler.blocks.tier, core.scheduler.blocks
    assert tier is not None
    tier.cost.is_worth_it = lambda: True  # type: ignore[method-assign]
    prompts = [random_prompt(rng, LENGTH) for _ in range(4)]

    def contents(prompt: list[int]) -> torch.Tensor:
        request = Request("r", Order(prompt, Sampling(max_tokens=1)))
        run(core, [request])
        hashes = request.block_hashes[: LENGTH // 8 - 1]  # the last one's tokens are computed again
        return torch.cat([core.runner.pool.block(block) for block in blocks.find(hashes)])  # type: ignore[attr-defined]

    before = contents(prompts[0])
    for prompt in prompts[1:]:
        contents(prompt)
    loaded = tier.num_loaded
    assert torch.equal(contents(prompts[0]), before)
    assert tier.num_loaded > loaded


def test_a_salt_finds_nothing_of_another(checkpoint: Checkpoints) -> None:
    core, rng = make(checkpoint("llama")), random.Random(3)
    prompts = [random_prompt(rng, LENGTH) for _ in range(4)]
    generate(core, prompts, Sampling(max_tokens=1))
    order = msgspec.structs.replace(Order(prompts[0], Sampling(max_tokens=1)), cache_salt="another tenant")
    before = core.scheduler.num_tier_hit_tokens
    run(core, [Request("r", order)])
    assert core.scheduler.num_tier_hit_tokens == before


def test_forgetting_the_prefix_cache_forgets_host_memory(checkpoint: Checkpoints) -> None:
    core, rng = make(checkpoint("llama")), random.Random(4)
    prompts = [random_prompt(rng, LENGTH) for _ in range(4)]
    generate(core, prompts, Sampling(max_tokens=1))
    tier = core.scheduler.blocks.tier
    assert tier is not None
    assert len(tier)
    core.scheduler.blocks.forget()
    assert not len(tier)
    generate(core, prompts, Sampling(max_tokens=1))
    assert core.scheduler.num_tier_hit_tokens == 0


def test_it_needs_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="--kv-host-cache: keeps blocks of the prefix cache"):
        EngineConfig(model="m", kv_host_cache_gib=1.0, enable_prefix_caching=False)


# ---- the tier alone


def tier_of(num_slots: int) -> tuple[HostTier, list[tuple[str, int, int]]]:
    tier, moves = HostTier(num_slots, 10, LoadCost(4)), []  # type: ignore[var-annotated]
    tier.begin(lambda *move: moves.append(move))
    return tier, moves


def test_the_least_recently_used_block_goes_and_pinned_ones_stay() -> None:
    tier, moves = tier_of(2)
    hashes = chain_hashes(b"", range(16), 4)
    for block, content in enumerate(hashes[:3]):
        tier.store(block, content)
    assert list(tier.contents) == hashes[:2], "both slots have moves of this step"
    assert moves == [("out", 0, 10), ("out", 1, 11)]
    tier.begin(lambda *move: moves.append(move))
    assert tier.pin([hashes[0]]) == [10]
    tier.store(7, hashes[3])
    assert list(tier.contents) == [hashes[0], hashes[3]]
    assert moves[2:] == [("out", 7, 11)]
    tier.load([10], [5])
    assert moves[3:] == [("in", 10, 5)]
    assert tier.changes() == {hashes[0], hashes[1], hashes[3]}
    tier.check()


def test_a_block_is_loaded_where_that_is_quicker() -> None:
    cost = LoadCost(block_size=16)
    assert cost.is_worth_it()
    cost.loaded(10, 1.0)  # 0.1 s a block
    cost.computed(100, 0.1)  # 0.016 s a block
    assert not cost.is_worth_it()
    for _ in range(300):
        cost.computed(100, 0.1)
    assert cost.is_worth_it(), "it is measured again some time"
    cost = LoadCost(block_size=16)
    cost.computed(100, 10.0)
    cost.loaded(10, 1.0)
    assert cost.is_worth_it()
