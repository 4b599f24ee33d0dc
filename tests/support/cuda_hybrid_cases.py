"""Whole hybrid models through the CUDA path's kernels, interpreted, against transformers: see cuda_model_cases.py."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.devices.device import CPU, Device
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.errors import ConfigError
from pd_cluster.model.graphs.step_graphs import check_prompt_graphs, why_eager
from pd_cluster.model.kernels.attention_backend import triton_attention
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.loading import model_loader
from pd_cluster.model.loading.load_proof import ProofSchedule
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Sampling
from tests.support.checkpoints import make_checkpoint, reference_model
from tests.support.engines import assert_all_same, generate, random_prompt
from tests.support.hybrids import CONVOLUTIONS
from tests.support.interpreted import choose_device
from tests.support.state_world import StateWorld, load_fused, row_errors

choose_device()

SHALLOW = {**CONVOLUTIONS, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
HYBRIDS = (
    *("qwen3_next", "qwen3_5_text", "kimi_linear", "granitemoehybrid", "bamba", "falcon_h1", "nemotron_h", "lfm2_moe"),
)
SHORT = ProofSchedule(((3, 1), (4, 6), (1, 1)), kept=4)  # the schedule of the check at load takes minutes here
GREEDY = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "choose_attention", lambda *given: triton_attention())
    monkeypatch.setattr(model_loader, "STATES", SHORT)


def test_steps_have_the_logits_of_the_whole(tmp_path: Path) -> None:
    folder, ids = make_checkpoint(tmp_path, "lfm2", **SHALLOW), torch.randint(0, 100, (2, 9)).tolist()
    model = load_fused(folder)
    assert model.kernels == "fused layers, Triton kernels, attention by Triton"
    with torch.inference_mode():
        expected = reference_model(folder)(input_ids=torch.tensor(ids), use_cache=False).logits
    with StateWorld(model) as world:
        requests = [world.request(own, state) for state, own in enumerate(ids, start=2)]
        steps = [world.step(requests, nums) for nums in ((3, 5), (1, 1), (5, 3))]
    for own, wanted in zip(zip(*steps, strict=True), expected, strict=True):
        assert row_errors(torch.cat(own), wanted).max() < 2e-5
    plan = replace(
        LoadPlan.of(EngineConfig(model=str(folder), max_model_len=64), SingleRank(), CPU), device=Device("cuda")
    )
    why: Any = "graphs do not support the states of its layers"
    assert why_eager(plan, model, world.keys.layout) == why
    with pytest.raises(ConfigError, match=f"^--cuda-speedups prompt-graphs: {why}"):
        check_prompt_graphs(model, ("prompt-graphs",))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_tokens_are_transformers(architecture: str, tmp_path: Path) -> None:
    """Computes prompts in chunks beside decoding sequences, and again from kept states."""
    folder = make_checkpoint(tmp_path, architecture)
    settings: dict[str, Any] = {"num_blocks": 40, "max_model_len": 64, "max_num_seqs": 4, "state_cache_gib": 0.01}
    core, runner = build_core(
        EngineConfig(model=str(folder), device="cpu", max_num_batched_tokens=16, block_size=16, **settings)
    )
    assert isinstance(runner.model, FusedCausalLM)
    assert runner.model.ops.name == "Triton"
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in (1, 5, 21)]
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    assert core.scheduler.num_prefix_hit_tokens == 16
