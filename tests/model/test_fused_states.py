"""Fused hybrids: logits equal transformers' whole pass, and states have the same bits for any chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.native import state_kernels
from tests.model.test_states import KEPT, STEPS, ids_of
from tests.support.checkpoints import reference_model
from tests.support.hybrids import HYBRIDS
from tests.support.state_world import StateWorld, load_fused, row_errors
from tests.support.usual import slow_but

pytestmark = pytest.mark.skipif(not state_kernels.can_run(), reason="no C kernels here")

Checkpoints = Callable[..., Path]
NOT_FUSED = ("olmo_hybrid", "bailing_hybrid")
ARCHITECTURES = [name for name in HYBRIDS if name not in NOT_FUSED]
NUM_TOKENS = 200
BY_CHUNKS = 2e-4  # accounts for transformers' own sums of the gated delta rule
OTHERS = 2e-5


def in_steps(
    model: FusedCausalLM, ids: list[list[int]], steps: list[tuple[int, int]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns logits [2, num_tokens, vocab_size], and the planes of the first layer's states [2, …]."""
    rows: list[list[torch.Tensor]] = [[], []]
    with StateWorld(model) as world:
        world.states.memory.planes(0)[0][:] = float("nan")
        requests = [world.request(own, state) for state, own in enumerate(ids, start=2)]
        for step in steps:
            for own, part in zip(rows, world.step(requests, step), strict=True):
                own.append(part)
        kept = [plane[2:4].clone() for plane in world.states.memory.planes(0)]
    return torch.stack([torch.cat(own) for own in rows]), kept


@pytest.mark.parametrize(
    "architecture", slow_but(("qwen3_next", "kimi_linear", "falcon_h1", "nemotron_h"), ARCHITECTURES)
)
def test_steps_have_the_logits_of_the_whole(checkpoint: Checkpoints, architecture: str) -> None:
    folder, ids = checkpoint(architecture), ids_of(2, NUM_TOKENS)
    with torch.inference_mode():
        expected = reference_model(folder)(input_ids=torch.tensor(ids), use_cache=False).logits
    model = load_fused(folder)
    rest = NUM_TOKENS - sum(first for first, _ in STEPS), NUM_TOKENS - sum(second for _, second in STEPS)
    cut, cut_states = in_steps(model, ids, [*STEPS, rest])
    whole, whole_states = in_steps(model, ids, [(NUM_TOKENS, NUM_TOKENS)])
    limit = BY_CHUNKS if architecture.startswith("qwen") else OTHERS
    for found in (cut, whole):
        assert max(row_errors(own, wanted).max() for own, wanted in zip(found, expected, strict=True)) < limit
    for own, other in zip(cut_states, whole_states, strict=True):  # the first layer's, whose inputs are embeddings
        assert torch.equal(own, other)


@pytest.mark.parametrize(
    "architecture",
    slow_but(("kimi_linear", "lfm2_moe"), ["qwen3_5_text", "kimi_linear", "falcon_h1", "lfm2_moe", "nemotron_h"]),
)
def test_a_kept_state_continues(checkpoint: Checkpoints, architecture: str) -> None:
    (ids,) = ids_of(1, 130)
    with StateWorld(load_fused(checkpoint(architecture))) as world:
        first = world.request(ids, 2)
        (whole,) = world.step([first], [130], [(0, KEPT, 6)])
        (resumed,) = world.step([world.request(ids, 6, first, KEPT)], [130 - KEPT])
        assert row_errors(resumed, whole[KEPT:]).max() < 1e-5
        for plane in world.states.memory.planes(0):
            assert torch.equal(plane[2], plane[6])


@pytest.mark.parametrize("architecture", ["qwen3_next", "granitemoehybrid"])
def test_single_tokens_have_the_bits_of_each_alone(checkpoint: Checkpoints, architecture: str) -> None:
    ids = ids_of(3, 40)
    with StateWorld(load_fused(checkpoint(architecture))) as world:
        together, alone = ([world.request(own, first + i) for i, own in enumerate(ids)] for first in (0, 3))
        for request in (*together, *alone):
            world.step([request], [39])
        found = torch.cat(world.step(together, [1, 1, 1]))
        assert torch.equal(found, torch.cat([world.step([request], [1])[0] for request in alone]))
