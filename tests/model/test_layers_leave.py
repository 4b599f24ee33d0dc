"""Layers reported as done during a step are final: KV cache sent early equals that at the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pd_cluster.model.causal_lm import PlainCausalLM
from pd_cluster.model.runner import ModelRunner
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.types import Order, Request, Sampling
from tests.support.checkpoints import CONFIGS, FUSED
from tests.support.engines import random_prompt

Checkpoints = Callable[[str], Path]
BLOCK_SIZE = 4


@pytest.mark.parametrize(
    ("architecture", "fused"), [*((name, True) for name in FUSED), *((name, False) for name in CONFIGS)]
)
def test_layers_that_are_done_do_not_change(
    checkpoint: Checkpoints, architecture: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fused:
        monkeypatch.setattr("pd_cluster.model.loader.can_fuse", lambda *_: False)
    runner = ModelRunner(EngineConfig(model=str(checkpoint(architecture)), block_size=BLOCK_SIZE, num_blocks=128))
    assert fused or isinstance(runner.model, PlainCausalLM)
    request = Request("r", Order(random_prompt(random.Random(1), 21), Sampling(max_tokens=2)))
    request.block_table = random.Random(2).sample(range(128), 6)
    seen: list[torch.Tensor] = []

    def on_layer(num_layers: int) -> None:
        assert num_layers == len(seen) + 1
        seen.append(runner.pool.data[:, :num_layers].clone())

    for num_tokens in (10, 11):  # in two chunks
        seen.clear()
        runner.forward([(request, num_tokens)], on_layer)
        assert len(seen) == runner.pool.layout.num_layers
        for num_layers, then in enumerate(seen, 1):
            assert torch.equal(then, runner.pool.data[:, :num_layers]), f"layer {num_layers} was not done"
        request.num_computed_tokens += num_tokens
    written = runner.pool.data[request.block_table[0]]
    assert (written.abs().sum(dim=(1, 2, 3, 4)) > 0).all(), "a layer has nothing in the pool"
