"""Hybrids on several ranks: each computes its heads' states, and tokens equal those of one rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.loading import model_loader
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support import ranks as rank_threads
from tests.support.engines import assert_all_same, generate, make_core, random_prompt, run
from tests.support.hybrids import HYBRIDS
from tests.support.ranks import ranks
from tests.support.usual import slow_but

Checkpoints = Callable[..., Path]
GREEDY = Sampling(max_tokens=12, temperature=0.0)
ROOM: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 96,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 50,
    "state_cache_gib": 0.02,
}
SPLIT = [name for name in HYBRIDS if name not in ("bailing_hybrid", "olmo_hybrid")]
CASES = [f"{name} {size}" for name in SPLIT for size in (2, 4)]
# On four ranks key heads, groups and KV heads are replicated; a norm group spans two ranks.
QUICK = ("qwen3_next 4", "kimi_linear 2", "nemotron_h 2")
pytestmark = pytest.mark.usefixtures("one_thread")


def check_tokens(folder: Path, size: int) -> str:
    """Runs prompts in chunks, batched, and from kept states; returns the model's kernels."""
    rng = random.Random(1)
    prompts = [random_prompt(rng, n) for n in (1, 16, 41, 70)]
    with ranks(folder, size, **ROOM) as core:
        for _ in range(2):
            assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
        assert core.scheduler.num_prefix_hit_tokens == 32 + 64
        kernels: str = core.runner.runner.model.kernels  # type: ignore[attr-defined]
        return kernels


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_ranks_generate_the_same_tokens(checkpoint: Checkpoints, case: str) -> None:
    name, size = case.split()
    assert "fused layers" in check_tokens(checkpoint(name), int(size))


BIASED = {"mamba_proj_bias": True, "projectors_bias": True, "mlp_bias": True, "attention_bias": True}
FIELDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "norm before the gate": ("falcon_h1", 2, {"mamba_rms_norm": True, "mamba_n_groups": 1, **BIASED}),
    "more groups than ranks": ("granitemoehybrid", 2, {"mamba_n_groups": 4, "num_local_experts": 0}),
    "three ranks": (
        "qwen3_next",
        3,
        {
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "hidden_size": 96,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "adjusted MLP": ("lfm2", 2, {"block_auto_adjust_ff_dim": True, "block_multiple_of": 32, "conv_bias": True}),
    "narrow experts": ("nemotron_h", 2, {"moe_latent_size": 32, "mlp_bias": True, "use_bias": True}),
}


@pytest.mark.parametrize("name", slow_but(("norm before the gate",), FIELDS))
@pytest.mark.parametrize("is_fused", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fused", "modules"])
def test_fields_that_change_what_is_cut(
    checkpoint: Checkpoints, name: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, size, changes = FIELDS[name]
    if not is_fused:
        monkeypatch.setattr(model_loader, "can_fuse", lambda _: False)
    assert ("fused layers" in check_tokens(checkpoint(architecture, **changes), size)) == is_fused


@pytest.mark.parametrize("case", slow_but(("granitemoehybrid 2",), CASES))
def test_transformers_modules_on_ranks(checkpoint: Checkpoints, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "can_fuse", lambda _: False)
    name, size = case.split()
    assert "transformers' modules" in check_tokens(checkpoint(name), int(size))


def block_of_a_state(core: EngineCore) -> int:
    """Computes a prompt in one step and three tokens; returns the block with the state after them."""
    sampling = Sampling(max_tokens=9, temperature=0.0, ignore_eos=True)
    core.scheduler.add(Request("r", RequestSpec(random_prompt(random.Random(2), 37), sampling)))
    for _ in range(4):
        core.step()
    (block,) = core.scheduler.requests["r#0"].tables[-1]
    return block


@pytest.mark.parametrize("architecture", slow_but(("granitemoehybrid",), SPLIT))
def test_ranks_keep_their_heads_of_each_state(
    checkpoint: Checkpoints, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks' planes are those parts of one rank's that the layouts name, so a state can be handed over."""
    folder, load, others = checkpoint(architecture), rank_threads.load_runner, list[Any]()

    def recorded(*arguments: Any) -> Any:
        others.append(load(*arguments))
        return others[-1]

    monkeypatch.setattr(rank_threads, "load_runner", recorded)
    alone: Any = make_core(folder, **ROOM)
    whole, whole_block = alone.runner.pools[-1], block_of_a_state(alone)
    with ranks(folder, 4, **ROOM) as core:
        block, first = block_of_a_state(core), core.runner.runner  # type: ignore[attr-defined]
        for pool in (runner.pools[-1] for runner in (first, *others)):
            layout = pool.layout
            assert replace(layout, tp_size=1, tp_rank=0) == whole.layout
            for layer, (at, plane) in itertools.product(range(layout.num_layers), enumerate(layout.planes)):
                ours, all_heads = (each.memory.planes(layer)[at] for each in (pool, whole))
                expected = all_heads[whole_block][:, slice(*layout.head_range_of(plane))]
                assert expected.any()
                torch.testing.assert_close(ours[block], expected, rtol=2e-3, atol=2e-3)
        core.scheduler.finish(core.scheduler.requests["r#0"])


@pytest.mark.parametrize("mode", slow_but(("swap",), ("recompute", "swap")))
def test_preempted_states_on_every_rank(checkpoint: Checkpoints, mode: str) -> None:
    """Seeded sampling with n = 3 in too small pools swaps, copies and clears states, with one rank's results."""
    folder, rng = checkpoint("qwen3_next"), random.Random(4)
    prompts = [random_prompt(rng, rng.randrange(4, 40)) for _ in range(4)]
    sizes = {**ROOM, "block_size": 4, "max_model_len": 96, "mamba_block_size": 4}
    sampling = Sampling(n=3, max_tokens=14, temperature=0.8, seed=7)

    def requests() -> list[Request]:
        return [Request(f"r{i}", RequestSpec(prompt, sampling), arrival_s=float(i)) for i, prompt in enumerate(prompts)]

    expected = run(make_core(folder, **{**sizes, "num_blocks": 512}), requests())
    with ranks(folder, 2, **{**sizes, "num_blocks": 30, "preemption_mode": mode, "swap_space_gib": 0.05}) as core:
        assert run(core, requests()) == expected
        assert core.scheduler.num_preemptions > 0


INT8 = ("granitemoehybrid", "qwen3_next", "lfm2", "kimi_linear", "nemotron_h")


@pytest.mark.parametrize("architecture", slow_but(("granitemoehybrid",), INT8))
def test_ranks_of_int8_have_the_tokens_of_one(checkpoint: Checkpoints, architecture: str) -> None:
    """int8 output projections gather whole rows, so tokens equal one rank's."""
    folder, rng, settings = checkpoint(architecture), random.Random(6), {**ROOM, "quantization": "int8"}
    prompts = [random_prompt(rng, n) for n in (3, 40)]
    expected = generate(make_core(folder, **settings), prompts, GREEDY)
    with ranks(folder, 2, **settings) as core:
        assert generate(core, prompts, GREEDY) == expected
