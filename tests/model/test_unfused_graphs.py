"""Decode steps of transformers' modules as graphs: recorded once and replayed without the model's Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU, Device
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.model.graphs import step_graphs
from pd_cluster.model.graphs.capture_check import OperatorWatch, obstacle
from pd_cluster.model.graphs.decode_graphs import DecodeGraphs, GraphRules
from pd_cluster.model.language_model.cache_declaration import layout_of
from pd_cluster.model.language_model.causal_lm import PlainCausalLM
from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.loading import model_loader
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.runner.loaded_parts import load_parts
from pd_cluster.native import float_products
from pd_cluster.settings.engine_config import EngineConfig
from tests.support.checkpoints import NOT_FUSED
from tests.support.graph_world import BLOCK_SIZE, MAX_LEN, MOST, World, one_token_each
from tests.support.recorded import attend_without_lengths, recorded

Checkpoints = Callable[..., Path]


def plain(folder: Path) -> PlainCausalLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float_products, "few_rows", lambda *_: None)  # recordings have torch's operators alone
        patch.setattr(float_products, "can_run", lambda: True)
        model = model_loader.load_model(Checkpoint.open(str(folder)), "float32", CPU)
    assert isinstance(model, PlainCausalLM)
    model.attend = attend_without_lengths
    return model


@pytest.mark.parametrize("architecture", [*NOT_FUSED, "gpt_bigcode"])
def test_replayed_steps_are_the_steps(checkpoint: Checkpoints, architecture: str) -> None:
    model = plain(checkpoint(architecture))
    assert obstacle(model, layout_of(model.caches, BLOCK_SIZE, "float32"), CPU) == ""
    with torch.inference_mode():
        world = World(model, 3)
        graphs = world.graphs = DecodeGraphs(model, world.pool, recorded, GraphRules(MOST, MAX_LEN))
        world.start(5)
        for _ in range(6):
            world.decode()
        assert 0 < graphs.num_captured < 6


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (lambda x: x.argmax().item(), "aten::_local_scalar_dense waits for the device"),
        (lambda x: x.nonzero(), "aten::nonzero waits for the device"),
        (lambda x: x[x > 0], "aten::index with a mask waits for the device"),
        (lambda x: x.repeat_interleave(torch.ones(len(x), dtype=torch.int64), 0), "aten::repeat_interleave"),
        (lambda x: x.to("meta"), "aten::_to_copy copies between host and device"),
        (lambda x: x[torch.tensor([0, 0])] + x.sum(), ""),
    ],
)
def test_what_no_graph_can_hold_is_named(does: Callable[[torch.Tensor], object], why: str) -> None:
    with torch.no_grad(), OperatorWatch() as watch:
        does(torch.ones(3, 3))
    assert watch.obstacle.startswith(why) if why else not watch.obstacle


def test_steps_whose_launches_differ_are_found(checkpoint: Checkpoints) -> None:
    model, steps = plain(checkpoint("opt")), itertools.count()

    def every_other(*_: object) -> None:
        if next(steps) % 2:
            torch.ones(1).sum()

    model.model.register_forward_pre_hook(every_other)
    layout = layout_of(model.caches, BLOCK_SIZE, "float32")
    assert obstacle(model, layout, CPU) == "its launches differ from step to step"


def test_a_reason_is_given_why_steps_run_eagerly(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LoadPlan.of(EngineConfig(model=str(checkpoint("opt")), max_model_len=64), SingleRank(), CPU)
    model, found = load_parts(plan).model, ["", "aten::nonzero waits for the device"]
    monkeypatch.setattr(step_graphs, "obstacle", lambda *_: found.pop(0))

    def why(kind: DeviceKind) -> str:
        layout = layout_of(model.caches, plan.block_size, plan.kv_dtype)
        return step_graphs.why_eager(replace(plan, device=Device(kind)), model, layout)

    assert why("cuda") == "SDPA reads lengths from the device"
    model.attention = "Triton"
    assert why("cuda") == ""
    assert why("cuda") == "in its layers aten::nonzero waits for the device"
    assert why("npu").startswith("its layers are not fused")
    exchange: Any = object()
    plan = replace(plan, experts=ExpertShare(0, 2, exchange=exchange))
    assert why("cuda") == "instances of a unit agree on each step and exchange rows within it"
    plan = replace(plan, experts=ExpertShare(0, 2))
    assert why("npu").startswith("its layers are not fused")


def test_a_capture_that_fails_leaves_steps_eager(checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    """Covers foreign modules; every later step runs eagerly, without another attempt."""
    error = RuntimeError("operation not permitted when stream is capturing\nand more")
    with torch.inference_mode():
        world = World(plain(checkpoint("opt")), refuse=lambda n: error)
        assert [world.graphs.compute(one_token_each(num_seqs)) for num_seqs in (3, 1)] == [None, None]
    assert world.num_asked == 1
    assert "run eagerly: their capture failed: operation not permitted when stream is capturing" in caplog.text
