"""An engine whose windowed layers release blocks that others keep: long prompts, hits, preemption, forks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.group_rule import Rule
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.engines import assert_all_same, generate, make_core, random_prompt, run

GREEDY = Sampling(max_tokens=40, temperature=0.0)
FIRST = Sampling(max_tokens=1, temperature=0.0)
SIZE, WINDOW = 16, 24
ROOM: dict[str, Any] = {
    "block_size": SIZE,
    "num_blocks": 160,
    "max_model_len": 448,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 100,
}
# Fused layers; layers that reuse others' keys; groups with different heads
KINDS = ("gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4_text", "mimo_v2_flash")))
pytestmark = pytest.mark.usefixtures("one_thread")
Checkpoints = Callable[..., Path]


def core_of(folder: Path, **settings: Any) -> EngineCore:
    """Returns an engine whose padding blocks hold NaN, so that releasing too many blocks is detected."""
    core = make_core(folder, **{**ROOM, **settings})
    for pool in core.runner.pools:  # type: ignore[attr-defined]
        for layer in pool.layout.layers:
            for plane in pool.planes(layer):
                plane[pool.num_blocks] = torch.nan
    return core


def near_blocks(core: EngineCore) -> BlockPool:
    whole, near = core.scheduler.groups
    assert (whole.rule, near.rule) == (Rule(), Rule("window", WINDOW))
    return near.blocks


@pytest.mark.parametrize("architecture", KINDS)
def test_prompts_much_longer_than_the_window(checkpoint: Checkpoints, architecture: str) -> None:
    """All run at once, although the window's pool could hold less than half of their tokens."""
    folder, rng = checkpoint(architecture), random.Random(1)
    core = core_of(folder)
    prompts = [random_prompt(rng, n) for n in (400, 300, 350, 310, 25, 24, 23, 1)]
    assert near_blocks(core).num_blocks * SIZE < sum(map(len, prompts)) / 2
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    assert core.scheduler.num_preemptions == 0
    assert near_blocks(core).num_held == 0


@pytest.mark.parametrize("architecture", KINDS)
def test_a_hit_needs_the_last_tokens_of_a_window(checkpoint: Checkpoints, architecture: str) -> None:
    """A hit needs the windowed layers' last blocks of a prefix, but not their evicted earlier ones."""
    folder, rng = checkpoint(architecture), random.Random(2)
    core = core_of(folder, max_num_seqs=1)
    long = random_prompt(rng, 300)
    known = Request("long", RequestSpec(long, GREEDY))
    run(core, [known])
    hashes, near = list(known.block_hashes), near_blocks(core)
    generate(core, [random_prompt(rng, 200)], FIRST)
    first = 288 - WINDOW + 1
    assert hashes[0] in core.scheduler.blocks
    assert hashes[0] not in near
    assert all(each in near for each in hashes[first // SIZE : 18])
    before = core.scheduler.num_prefix_hit_tokens
    prompts = [long[:290] + random_prompt(rng, 9)]
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    assert core.scheduler.num_prefix_hit_tokens - before == 288
    near.drop(hashes[first // SIZE])
    before = core.scheduler.num_prefix_hit_tokens
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    assert core.scheduler.num_prefix_hit_tokens - before < 288


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("architecture", KINDS)
def test_preempted_sequences_go_on(checkpoint: Checkpoints, architecture: str, mode: str) -> None:
    folder, rng = checkpoint(architecture), random.Random(3)
    core = core_of(folder, num_blocks=16, max_model_len=200, preemption_mode=mode, swap_space_gib=0.1)
    prompts = [random_prompt(rng, rng.randrange(30, 90)) for _ in range(8)]
    found = generate(core, prompts, GREEDY)
    assert core.scheduler.num_preemptions
    assert_all_same(folder, prompts, found, GREEDY.max_tokens)


@pytest.mark.parametrize("architecture", KINDS)
def test_sequences_and_beams_share_what_the_window_has_not_passed(checkpoint: Checkpoints, architecture: str) -> None:
    """Several sequences and beams equal those of an engine that computes each alone."""
    folder, rng = checkpoint(architecture), random.Random(4)
    core, company = core_of(folder), [random_prompt(rng, n) for n in (40, 5, 90)]
    drawn = Sampling(n=3, max_tokens=30, temperature=1.0, seed=5, ignore_eos=True)
    beams = Sampling(beam_width=3, n=2, max_tokens=20, temperature=0.0, ignore_eos=True)
    prompt = random_prompt(rng, 115)
    for sampling in (drawn, beams):
        orders = [RequestSpec(prompt, sampling), *(RequestSpec(each, GREEDY) for each in company)]
        together = run(core, [Request(f"r{i}", order, arrival_s=float(i)) for i, order in enumerate(orders)])["r0"]
        alone = run(core_of(folder, max_num_seqs=3), [Request("r", RequestSpec(prompt, sampling))])["r"]
        found = {at: [token.token_id for token in tokens] for at, tokens in together.items()}
        assert found == {at: [token.token_id for token in tokens] for at, tokens in alone.items()}
        assert len({tuple(tokens) for tokens in found.values()}) == len(found)


@pytest.mark.parametrize("num_known", [0, 128])
def test_a_window_one_token_short_is_noticed(
    checkpoint: Checkpoints, num_known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault frees a block one step too early, and a hit lacks the block with the first visible token."""
    folder = checkpoint("gpt_oss", sliding_window=34)
    core, prompt = core_of(folder), random_prompt(random.Random(5), 130)
    sampling = FIRST if num_known else GREEDY
    generate(core, [prompt[:num_known] or prompt[:5]], sampling)
    first_seen = Rule.first_seen

    def one_too_late(rule: Rule, num_tokens: int) -> int:
        return first_seen(rule, num_tokens + 1)

    for fault in (first_seen, one_too_late):
        monkeypatch.setattr(Rule, "first_seen", fault)
        found = generate(core, [prompt], sampling)
        if fault is first_seen:
            assert_all_same(folder, [prompt], found, sampling.max_tokens)
        else:
            with pytest.raises(AssertionError, match="differs at output"):
                assert_all_same(folder, [prompt], found, sampling.max_tokens)
