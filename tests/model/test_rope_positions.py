"""Requests with their own rotary positions get transformers' tokens for the same `position_ids`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.layers.rope.rope_limit import RopeLimit
from pd_cluster.model.layers.rope.rope_scaling import rope_limit_of
from pd_cluster.types import Request, RequestSpec, RopePositions, Sampling
from tests.support.checkpoints import ROPE, make_checkpoint, reference_model
from tests.support.engines import make_core, random_prompt, run
from tests.support.positions import KINDS, assert_same, gapped

Checkpoints = Callable[..., Path]
NUM_TOKENS = 10
SAMPLING = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
LENS = (1, 7, 33, 50)
ARCHITECTURES = (
    *("llama", "qwen3_moe", "gpt_oss"),  # fused layers with and without windows and experts
    *("glm4", "phi3", "smollm3", "gemma3_text"),  # rope of adjacent features, some features, some layers, two kinds
    *("gpt_neox", "gpt2"),  # transformers' modules; learned positions
)


def orders_of(
    seed: int, kinds: list[Any], lens: tuple[int, ...] = LENS, sampling: Sampling = SAMPLING
) -> list[RequestSpec]:
    """Returns a request of each kind and length; None: positions are the tokens' indices."""
    rng = random.Random(seed)
    return [
        RequestSpec(random_prompt(rng, length), sampling, rope_positions=kind(rng, length) if kind else None)
        for length in lens
        for kind in kinds
    ]


def assert_are_references(model: Any, orders: list[RequestSpec], core: EngineCore) -> None:
    requests = [Request(f"r{i}", order, arrival_s=float(i)) for i, order in enumerate(orders)]
    assert all(core_problem(core, request) is None for request in requests)
    found = run(core, requests)
    for i, order in enumerate(orders):
        tokens = [token.token_id for token in found[f"r{i}"][0]]
        assert len(tokens) == order.sampling.max_tokens
        assert_same(model, order.prompt_token_ids, order.rope_positions, tokens)


def core_problem(core: EngineCore, request: Request) -> str | None:
    runner: Any = core.runner
    limit: RopeLimit = getattr(runner, "runner", runner).model.rope_limit
    return limit.problem(request.order)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_engine_in_chunks(checkpoint: Checkpoints, architecture: str) -> None:
    """Requests without own positions run beside them; other positions must give other tokens."""
    folder = checkpoint(architecture)
    core = make_core(folder, max_num_batched_tokens=24, num_blocks=128, block_size=8)
    orders = orders_of(1, [*KINDS.values(), None])
    assert_are_references(reference_model(folder), orders, core)
    long = RequestSpec(orders[-1].prompt_token_ids, SAMPLING, rope_positions=gapped(random.Random(2), LENS[-1]))
    (answer, plain) = (run(core, [Request("r", each)])["r"][0] for each in (long, orders[-1]))
    assert [token.token_id for token in answer] != [token.token_id for token in plain]


def test_a_cached_prefix_has_the_same_positions(checkpoint: Checkpoints) -> None:
    """An equal request finds prompt and output cached; one with other positions finds only the part before them."""
    folder, rng = checkpoint("llama"), random.Random(4)
    core = make_core(folder, block_size=8, max_num_batched_tokens=40, num_blocks=64)
    prompt, model = random_prompt(rng, 40), reference_model(folder)
    own = RopePositions(((*range(20), *range(30, 50)),), 12)
    other = RopePositions(((*range(20), *range(31, 51)),), 12)
    for positions, num_cached in ((own, 0), (own, 32), (other, 16), (None, 16), (own, 32)):
        request = Request("r", RequestSpec(prompt, SAMPLING, rope_positions=positions))
        tokens = [token.token_id for token in run(core, [request])["r"][0]]
        assert request.num_cached_tokens == num_cached
        assert_same(model, prompt, positions, tokens)
        if positions is own:
            longer = Request("r", RequestSpec([*prompt, *tokens, 5], SAMPLING, rope_positions=extended(own, 11)))
            run(core, [longer])
            assert longer.num_cached_tokens == 48


def extended(own: RopePositions, num_tokens: int) -> RopePositions:
    """Returns the positions of a prompt extended by the answer's first tokens."""
    return RopePositions(tuple(map(tuple, own.between(0, len(own.rows[0]) + num_tokens))), own.delta)


def test_which_models_take_positions(checkpoint: Checkpoints, tmp_path: Path) -> None:
    def problem(folder: Path, own: RopePositions) -> str | None:
        request = Request("r", RequestSpec([1, 2], SAMPLING, rope_positions=own))
        return core_problem(make_core(folder, num_blocks=32), request)

    own, far = RopePositions(((0, 4),), 3), RopePositions(((0, 503),), 502)
    for architecture in ("llama", "gpt2"):
        folder = checkpoint(architecture)
        assert problem(folder, own) is None
        assert "positions from 0 to 513, with delta 502; this model supports" in (problem(folder, far) or "")
        assert "3 rows; this model takes 1" in (problem(folder, RopePositions(((0, 4),) * 3)) or "")
    dynamic = make_checkpoint(tmp_path / "dynamic", rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 2.0})
    assert "rope_type dynamic derives its frequencies from a request's number of tokens" in (
        problem(dynamic, own) or ""
    )
    plain, none = Checkpoint.open(str(checkpoint("llama"))), torch.nn.Linear(1, 1)
    for opened, is_scaled, why in (
        (plain, False, "has neither a rotary embedding nor a table of positions"),
        (replace(plain, is_unproven=True), False, "is unproven"),
        (plain, True, "use_logn_attn"),
    ):
        assert why in rope_limit_of(none, opened, is_scaled).why_not
