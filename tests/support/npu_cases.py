"""Whole models through the NPU path, over torch-npu's own operator schemas. Run by tests/model/test_npu.py."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.config import EngineConfig
from pd_cluster.engine.build import build_core
from pd_cluster.engine.core import EngineCore
from pd_cluster.errors import ConfigError
from pd_cluster.kv.layered import LayerMajor
from pd_cluster.model.runner import ModelRunner
from pd_cluster.types import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_same, generate, random_prompt

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LENS = (1, 5, 150, 127, 128)
SIZES = {"max_position_embeddings": 1024}


def core_of(folder: Path, **settings: Any) -> tuple[EngineCore, ModelRunner]:
    settings = {"num_blocks": 24, "max_model_len": 300, "max_num_batched_tokens": 96, "device": "npu", **settings}
    return build_core(EngineConfig(model=str(folder), dtype=settings.pop("dtype", "float32"), **settings))


def check(folder: Path, core: EngineCore) -> None:
    """Several prompts together, against transformers."""
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in LENS]
    for prompt, output in zip(prompts, generate(core, prompts, GREEDY), strict=True):
        assert_same(folder, prompt, output, GREEDY.max_tokens)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "mixtral", "qwen3"])
def test_fused_layers_are_exact(architecture: str, eager: bool, tmp_path: Path) -> None:
    import torch_npu

    from tests.support.npu_simulated import calls

    assert torch_npu.__version__.startswith("2.")
    folder = make_checkpoint(tmp_path, architecture, head_dim=128, **SIZES)
    core, runner = core_of(folder, enforce_eager=eager)
    assert runner.model.kernels == "fused layers, NPU kernels, attention by torch-npu (TND)"
    assert isinstance(runner.pool.memory, LayerMajor)
    assert runner.pool.layout.block_size == 128
    calls.clear()
    check(folder, core)
    assert calls["npu_fused_infer_attention_score"] > 0
    assert (runner._graphs is None) == eager
    if runner._graphs is not None:
        assert runner._graphs.num_captured > 1
    assert core.ahead.num_ahead > 0
