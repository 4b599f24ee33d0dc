"""Routers weigh and choose experts as in transformers, for every kind of scores, biases and groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pd_cluster.model.language_model.architecture_quirks import ARCHITECTURES
from pd_cluster.model.layers.gated_mlp import ExpertRouter
from tests.support.checkpoints import COMMON, CONFIGS, FUSED, shake
from tests.support.more_checkpoints import MORE

WITH_EXPERTS = [name for name in FUSED if any("experts" in key for key in {**CONFIGS, **MORE}[name])]
SIGMOIDS = {"dots1", "exaone_moe", "glm4_moe", "minimax_m2", "deepseek_v3", "glm4_moe_lite", "axk1", "hy_v3"}


def block_of(architecture: str, dtype: torch.dtype) -> tuple[Any, ExpertRouter]:
    """Returns the last sparse block of a tiny model, whose router has large weights and a bias, and its router."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[architecture](**{**COMMON, **{**CONFIGS, **MORE}[architecture]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shake(model)
    quirks = ARCHITECTURES[type(model).__name__]
    block = next(each for each in reversed(list(model.modules())) if hasattr(each, "experts"))
    with torch.no_grad():
        getattr(block, quirks.router).weight.mul_(8)
    return block, ExpertRouter.of(block, quirks.router)


@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_weights_and_choice(architecture: str) -> None:
    """Covers bfloat16, too, where routers with sigmoids or biased choices multiply in float32."""
    for dtype in (torch.float32, torch.bfloat16):
        block, router = block_of(architecture, dtype)
        given: list[Any] = []
        block.experts.register_forward_pre_hook(lambda _, args, found=given: found.append(args))
        x = torch.randn(1, 64, COMMON["hidden_size"]).to(dtype)
        with torch.inference_mode():
            block(x)
            routing, rows = router.routing, x[0]
            logits = router.linear()(rows.float() if routing.in_float32 else rows)
            weights, chosen = routing.weigh(logits, dtype)
        _, expected, expected_weights = given[0]
        order, expected_order = chosen.argsort(-1), expected.argsort(-1)
        assert torch.equal(chosen.gather(1, order), expected.gather(1, expected_order))
        difference = weights.gather(1, order) - expected_weights.float().gather(1, expected_order)
        assert difference.abs().max() <= (1e-5 if dtype == torch.float32 else 8e-3)
        assert len(chosen.unique()) > routing.top_k  # rows differ in their choice


def test_kinds_of_routers() -> None:
    """Every kind of router occurs in the test above."""
    routings = {name: block_of(name, torch.float32)[1].routing for name in WITH_EXPERTS}
    assert {name for name, each in routings.items() if each.sigmoid} >= SIGMOIDS
    assert any(each.choice_bias is not None and not each.sigmoid for each in routings.values())
    assert {each.best_two for each in routings.values() if each.top_groups < each.num_groups} == {False, True}
    assert any(each.scale != 1.0 for each in routings.values())
    assert any(not each.renormalise for each in routings.values())
