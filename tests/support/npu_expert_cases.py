"""Experts divided among ranks, on the NPU path. Run by tests/model/test_npu.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from pd_cluster.devices.device import bind
from pd_cluster.model.kernels.npu.grouped_experts import NpuGroupedExperts
from pd_cluster.model.language_model.architecture_quirks import ARCHITECTURES
from pd_cluster.model.language_model.fuse_mlp import _experts
from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.layers.expert_weights import ExpertLayers
from pd_cluster.model.layers.gated_mlp import ExpertRouter, Experts
from pd_cluster.model.layers.ops import TorchOps
from pd_cluster.settings.engine_config import EXPERT_PLACEMENTS, ExpertPlacement
from tests.support.expert_shares import Members, rows_without, weights_of


@pytest.fixture(autouse=True)
def _bound() -> None:
    bind("npu", (), 0)  # imports torch-npu


@pytest.mark.parametrize("placement", EXPERT_PLACEMENTS)
def test_shares_of_ranks_add_up_to_the_whole(placement: ExpertPlacement) -> None:
    """A rank's result is 0 for rows of other ranks' experts; members of a unit get the sum, with or without rows."""
    torch.manual_seed(4)
    block: Any = GptOssMLP(GptOssConfig(hidden_size=32, intermediate_size=24, num_local_experts=6))
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    router, weights = ExpertRouter.of(block, "router"), _experts(block, ARCHITECTURES["GptOssForCausalLM"])
    router = replace(router, routing=replace(router.routing, top_k=2))
    whole = Experts(router, ExpertLayers(weights), TorchOps(), "swigluoai")

    def rank(share: ExpertShare) -> NpuGroupedExperts:
        return NpuGroupedExperts(router, weights_of(weights, share), TorchOps(), "swigluoai", share)

    num_zero = 0
    for num_rows in (1, 3, 33):
        x = torch.randn(num_rows, 32)
        total = torch.zeros_like(x)
        for share in (ExpertShare(0, 2, placement), ExpertShare(1, 2, placement)):
            part, zero = rank(share)(x), rows_without(router, share, x)
            assert not part[zero].any()
            total += part
            num_zero += int(zero.sum())
        assert torch.allclose(total, whole(x), rtol=1e-5, atol=1e-5)
    assert num_zero > 3
    members, rows = Members(rank, 3), [torch.randn(num_rows, 32) for num_rows in (3, 0, 5)]
    members.step([x] * 3)  # the step of the check at load
    for own, found in zip(rows, members.step(rows), strict=True):
        assert torch.allclose(found, whole(own), rtol=1e-5, atol=1e-5)
    assert all(len(found) == 0 for found in members.step([x[:0]] * 3))
