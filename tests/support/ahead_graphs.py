"""Engines on a CPU whose decode steps replay graphs and are launched ahead of the host, as on an accelerator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pd_cluster.model.graphs import DecodeGraphs
from pd_cluster.model.runner import ModelRunner


def captured(launches: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    launches()
    return launches


def go_ahead_with_graphs(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int) -> list[ModelRunner]:
    """Makes every engine of the test do so; returns the list that receives their runners."""
    made: list[ModelRunner] = []
    plain_init = ModelRunner.__init__

    def make_graphs(runner: ModelRunner, config: object) -> DecodeGraphs:
        made.append(runner)
        return DecodeGraphs(runner.model, runner.pool, max_num_seqs, runner.max_model_len, captured)

    def init(runner: ModelRunner, *arguments: object) -> None:
        plain_init(runner, *arguments)  # type: ignore[arg-type]
        runner.goes_ahead = True

    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
    monkeypatch.setattr(ModelRunner, "_make_graphs", make_graphs)
    monkeypatch.setattr(ModelRunner, "__init__", init)
    return made


def num_captured(runners: list[ModelRunner]) -> list[int]:
    return [runner.graphs.num_captured for runner in runners if runner.graphs is not None]
