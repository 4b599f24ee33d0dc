"""Sparse latent attention on the NPU path, over torch-npu's own schemas. Run by tests/model/test_npu.py."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pd_cluster.devices.device import Device
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ConfigError
from pd_cluster.kv.kv_layout import INDEX, KVLayout, latents
from pd_cluster.model.kernels.attention_backend import choose_attention
from pd_cluster.types import Sampling
from pd_cluster.wire import Plane
from tests.support.checkpoints import prefers
from tests.support.engines import generate, random_prompt
from tests.support.npu_cases import ATTENTION, NUM_SIZES, calls, core_of
from tests.support.npu_latent_cases import LONG_YARN, THREE_HEADS, folder_of
from tests.support.ranks import ranks

__all__ = ["calls"]  # a fixture

NPU = Device("npu")
INDEXER, SPARSE = "npu_lightning_indexer", "npu_sparse_flash_attention"
SHALLOW: dict[str, Any] = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
slow = pytest.mark.slow


def check(folder: Path, core: EngineCore, *lens: int) -> None:
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in lens]
    assert prefers(folder, prompts, generate(core, prompts, GREEDY), [GREEDY.max_tokens] * len(prompts))


@pytest.mark.parametrize(
    ("architecture", "changes", "eager"),
    [
        ("glm_moe_dsa", SHALLOW, False),
        pytest.param("glm_moe_dsa", {}, True, marks=slow),
        pytest.param("deepseek_v32", {**THREE_HEADS, **LONG_YARN}, False, marks=slow),
    ],
)
def test_fused_layers_are_exact(
    architecture: str,
    changes: dict[str, Any],
    eager: bool,
    tmp_path: Path,
    calls: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Covers chunked prompts beside decoded tokens, and graphs; some sequences first see all keys, then chosen ones."""
    monkeypatch.setattr("pd_cluster.model.graphs.step_graphs.MAX_START_S", 0.0)  # the limit for other devices
    folder = folder_of(tmp_path, architecture, index_head_dim=128, **changes)
    core, runner = core_of(folder, enforce_eager=eager)
    assert runner.model.kernels == "fused layers, NPU kernels, attention by torch-npu (sparse)"
    check(folder, core, 1, 5, 150, 127, 128)
    assert calls[INDEXER] * (2 if "glm" in architecture else 1) == calls[SPARSE] > 0
    assert ATTENTION not in calls
    assert (runner.graphs.decode is None) == eager
    assert runner.graphs.decode is None or runner.graphs.decode.num_captured == NUM_SIZES


@slow
def test_over_ranks(tmp_path: Path) -> None:
    """Each rank runs the whole indexer, and attends with its own heads."""
    folder = folder_of(tmp_path, "glm_moe_dsa", index_head_dim=128)
    settings = {"num_blocks": 24, "max_model_len": 300, "max_num_batched_tokens": 96, "max_num_seqs": 8}
    with ranks(folder, 2, NPU, npu_tp_graphs=True, dtype="float32", **settings) as core:
        check(folder, core, 1, 9, 150)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 64}, "its indexer has 32 heads of 64 numbers, but the operator takes up to 64 of 128; use cpu"),
        ({"index_heads": 72}, "its indexer has 72 heads of 128 numbers"),
        ({"most": 4096}, "index_topk is 4096, but the operator chooses at most 2048"),
        ({"latent": 256}, "it has latents of widths other than 512 and 64"),
        ({"heads": 129}, "129 heads: latent attention on NPUs supports at most 128"),
    ],
    ids=str,
)
def test_limits_of_the_operators(changes: dict[str, int], message: str) -> None:
    values = {"heads": 16, "index_heads": 32, "width": 128, "most": 2048, "latent": 512, **changes}
    layout = KVLayout(1, 1, (*latents(values["latent"], 64), Plane(INDEX, values["width"])), 128, "bfloat16")
    config = SimpleNamespace(
        num_attention_heads=values["heads"], index_n_heads=values["index_heads"], index_topk=values["most"]
    )
    with pytest.raises(ConfigError, match=f"^--device npu: this model's sparse attention: {message}"):
        choose_attention("auto", config, layout, NPU)
    with pytest.raises(ConfigError, match=r"^--attention-backend sdpa: sparse attention on"):
        choose_attention("sdpa", config, layout, NPU)
