"""Weights that change on simulated NPUs: in the memory that graphs refer to, or with graphs captured again.

Run by tests/model/test_npu.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.assembly.build_weights import weights_of
from pd_cluster.engine.ranks.lead_runner import LeadRunner
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.language_model.overwrite_tensors import CannotOverwrite
from pd_cluster.model.runner import weight_change
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import RequestSpec
from tests.support.adapters import digest_of, loaded, make_adapter
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import generate, together
from tests.support.npu_cases import GREEDY, SIZES, calls, core_of
from tests.support.npu_coded_cases import make_quantized
from tests.support.npu_tp_cases import HEADS, NPU, SETTINGS, runners
from tests.support.ranks import ranks
from tests.support.weight_versions import make_version, version_of

__all__ = ["calls", "runners"]  # fixtures

PROMPTS = [[5, 9, 2, 77], [3] * 150, [8, 1, 60, 33, 2, 9]]
slow = pytest.mark.slow


def change(core: EngineCore, base: Path, folder: Path, epoch: int = 1) -> None:
    runner = core.runner.runner if isinstance(core.runner, LeadRunner) else core.runner
    assert isinstance(runner, ModelRunner)
    all_ranks = core.runner if isinstance(core.runner, LeadRunner) else runner
    source, version = weights_of(core, runner, all_ranks), version_of(base, folder, epoch)
    source.check(version)
    source.load(version)


def assert_changed_in_place(base: Path, tmp_path: Path, **settings: Any) -> None:
    other = make_version(base, tmp_path / "other", 1)
    core, runner = core_of(base, **settings)
    before, graphs = generate(core, PROMPTS, GREEDY), runner.graphs
    assert graphs.decode is not None
    model, num_captured = runner.model, graphs.decode.num_captured
    change(core, base, other)
    assert (runner.graphs, runner.model) == (graphs, model)
    assert graphs.decode.num_captured == num_captured > 0
    after = generate(core, PROMPTS, GREEDY)
    assert after != before
    assert after == generate(core_of(other, **settings)[0], PROMPTS, GREEDY)
    change(core, base, base, 2)
    assert generate(core, PROMPTS, GREEDY) == before


@pytest.mark.parametrize("architecture", ["llama", *(pytest.param(name, marks=slow) for name in ("mixtral", "qwen3"))])
def test_graphs_compute_with_the_new_weights(architecture: str, tmp_path: Path) -> None:
    """A simulated graph repeats its launches on the tensors of its capture."""
    assert_changed_in_place(make_checkpoint(tmp_path / "base", architecture, head_dim=128, **SIZES), tmp_path)


@slow
@pytest.mark.parametrize("form", ["msmodelslim W4A16, pairs", "msmodelslim", "msmodelslim static"])
def test_codes_are_replaced_in_place(form: str, tmp_path: Path) -> None:
    base, _ = make_quantized(tmp_path, form)
    assert_changed_in_place(base, tmp_path)


def test_graphs_are_captured_again_where_memory_cannot_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", head_dim=128, **SIZES)
    other = make_version(base, tmp_path / "other", 1)
    core, runner = core_of(base)
    graphs = runner.graphs

    def stop_half_way(model: Any, *others: object) -> None:
        model.layers[0].input_norm.weight.fill_(torch.nan)
        raise CannotOverwrite("a test's part")

    monkeypatch.setattr(weight_change, "overwrite_weights", stop_half_way)
    change(core, base, other)
    assert runner.graphs.decode is not graphs.decode
    assert runner.graphs.decode is not None
    assert runner.graphs.decode.num_captured > 0
    assert generate(core, PROMPTS, GREEDY) == generate(core_of(other)[0], PROMPTS, GREEDY)


@slow
def test_adapters_stay(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", head_dim=128, **SIZES)
    other, adapter = make_version(base, tmp_path / "other", 1), make_adapter(tmp_path / "a", base, 1)
    core, runner = core_of(base, adapters=loaded(adapter))
    model = runner.model
    change(core, base, other)
    assert runner.model is model
    variant, fresh = digest_of(adapter), core_of(other, adapters=loaded(adapter))[0]
    assert adapted(core, variant) == adapted(fresh, variant) != adapted(core, "")


def adapted(core: EngineCore, variant: str) -> list[list[int]]:
    return together(core, [RequestSpec(prompt, GREEDY, variant=variant) for prompt in PROMPTS])


@slow
@pytest.mark.parametrize(("architecture", "expert_parallel"), [("llama", False), ("mixtral", True)])
def test_ranks_change_together(
    architecture: str, expert_parallel: bool, tmp_path: Path, runners: list[ModelRunner]
) -> None:
    base = make_checkpoint(tmp_path / "base", architecture, **HEADS)
    other = make_version(base, tmp_path / "other", 1)
    settings = {**SETTINGS, "npu_tp_graphs": True, "enable_expert_parallel": expert_parallel}
    with ranks(base, 2, NPU, **settings) as core:
        before = generate(core, PROMPTS, GREEDY)  # every rank has its graphs then
        graphs = [runner.graphs for runner in runners]
        change(core, base, other)
        found = generate(core, PROMPTS, GREEDY)
        assert [runner.graphs for runner in runners] == graphs
    alone, _ = build_core(EngineConfig(model=str(other), device="npu", **SETTINGS))
    assert found == generate(alone, PROMPTS, GREEDY) != before
