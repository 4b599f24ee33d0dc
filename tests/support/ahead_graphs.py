"""Engines on a CPU whose decode steps replay graphs and are launched ahead of the host, as on an accelerator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.graphs.decode_graphs import DecodeGraphs, GraphRules
from pd_cluster.model.graphs.step_graphs import StepGraphs
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.planning import pools_before_loading
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.runner import load_runner
from pd_cluster.model.runner.model_runner import ModelRunner


def captured(launches: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    launches()
    return launches


def go_ahead_with_graphs(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int) -> list[ModelRunner]:
    """Makes every engine of the test use graphs and launch ahead. Returns a list to which their runners are added."""
    made: list[ModelRunner] = []
    plain_init = ModelRunner.__init__

    def make_graphs(plan: LoadPlan, model: CausalLM, pool: KVPool, eager: str) -> StepGraphs:
        return StepGraphs(DecodeGraphs(model, pool, captured, GraphRules(max_num_seqs, plan.max_model_len)))

    def init(runner: ModelRunner, *arguments: object) -> None:
        plain_init(runner, *arguments)  # type: ignore[arg-type]
        runner.goes_ahead = True
        made.append(runner)

    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
    monkeypatch.setattr(load_runner, "capture_graphs", make_graphs)
    for module in (load_runner, pools_before_loading):
        monkeypatch.setattr(module, "splits_windows", lambda plan: False)  # as on the accelerators that this imitates
    monkeypatch.setattr(ModelRunner, "__init__", init)
    return made


def num_captured(runners: list[ModelRunner]) -> list[int]:
    return [each.graphs.decode.num_captured for each in runners if each.graphs.decode is not None]
