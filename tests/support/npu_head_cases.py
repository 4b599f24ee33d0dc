"""Head sizes on the NPU path. Run by tests/model/test_npu.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.devices.device import Device, bind
from pd_cluster.errors import ConfigError
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.model.kernels.npu.head_dim_probe import why_not
from tests.support.checkpoints import make_checkpoint
from tests.support.npu_cases import SIZES, calls, check, core_of

__all__ = ["calls"]  # a fixture

NPU = Device("npu")
PACKED = "fused layers, NPU kernels, attention by torch-npu (TND)"
BATCHED = "fused layers, NPU kernels, attention by torch-npu (BSND)"
slow = pytest.mark.slow


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the simulated machine, which accepts any head size in this test."""
    bind("npu", (), 0)
    from tests.support import npu_simulated

    monkeypatch.setattr(npu_simulated, "packed_head_dims", set(range(16, 513, 16)))
    return npu_simulated


@pytest.mark.parametrize(
    ("architecture", "head_dim"),
    [("gpt_oss", 64), ("gemma3_text", 256), pytest.param("phi3", 96, marks=slow)],  # gpt_oss has sinks and windows
)
def test_heads_of_any_size_are_packed_once_they_are_proven(
    architecture: str, head_dim: int, tmp_path: Path, machine: Any, calls: dict[str, int]
) -> None:
    folder = make_checkpoint(tmp_path, architecture, head_dim=head_dim, **SIZES)
    core, runner = core_of(folder, npu_head_dims="wide", graph_sizes=(8,))
    assert runner.model.kernels == PACKED
    check(folder, core)


def test_refusals_name_the_way_out(tmp_path: Path, machine: Any) -> None:
    folder = make_checkpoint(tmp_path, "gemma3_text", head_dim=256)
    with pytest.raises(ConfigError, match=r"head_dim 256: .*; --npu-head-dims wide tries it, .* sdpa is slow"):
        core_of(folder)
    machine.packed_head_dims.clear()
    with pytest.raises(ConfigError, match=r"head_dim 256: .* no .*window; --attention-backend sdpa is slow"):
        core_of(folder, npu_head_dims="wide")


def test_without_the_flag_nothing_is_tried(
    tmp_path: Path, machine: Any, calls: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path, "llama", head_dim=64, **SIZES)
    _, runner = core_of(folder, enforce_eager=True)
    assert runner.model.kernels == BATCHED
    assert "head_dim 64; --npu-head-dims wide tries another way" in caplog.text


def test_a_device_that_refuses_the_heads_goes_the_slow_way(
    tmp_path: Path, machine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    machine.packed_head_dims.remove(32)
    folder = make_checkpoint(tmp_path, "llama", head_dim=32, **SIZES)
    core, runner = core_of(folder, npu_head_dims="wide", enforce_eager=True)
    assert runner.model.kernels == BATCHED
    assert "--npu-head-dims wide has no effect: packed attention with head_dim 32" in caplog.text
    check(folder, core, (5, 150))


def test_a_device_that_computes_some_heads_wrongly_gets_only_others(
    tmp_path: Path, machine: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = machine.attended

    def without_the_end(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Simulates a fault: scores ignore a head's dimensions beyond 64."""
        return right(torch.cat((q[..., :64], torch.zeros_like(q[..., 64:])), dim=-1), k, *rest)

    monkeypatch.setattr(machine, "attended", without_the_end)
    folder = make_checkpoint(tmp_path, "gemma3_text", head_dim=96, **SIZES)
    with pytest.raises(ConfigError, match="head_dim 96"):
        core_of(folder, npu_head_dims="wide")
    assert "head_dim 96: its results differ from float32 by" in caplog.text
    (tmp_path / "other").mkdir()
    folder = make_checkpoint(tmp_path / "other", "llama", head_dim=64, **SIZES)
    _, runner = core_of(folder, npu_head_dims="wide", enforce_eager=True)
    assert runner.model.kernels == PACKED


LAYOUT = KVLayout(3, 2, keys_and_values(48), 128, "bfloat16")


@pytest.mark.parametrize(("dtype", "has_sinks"), [("float32", True), ("float16", False), ("bfloat16", True)])
def test_the_trial_accepts_what_is_right(dtype: str, has_sinks: bool, machine: Any, calls: dict[str, int]) -> None:
    assert why_not(NPU, replace(LAYOUT, dtype=dtype), 8, has_window=True, has_sinks=has_sinks) == ""
    suffix = "_v2" if has_sinks else ""
    assert calls[f"npu_fused_infer_attention_score{suffix}"] == 6  # three steps, with and without a window


FAULTS = {
    "a window of one key less": ("_mask", lambda right: lambda n, s, la, m, b, a, g: right(n, s, la, m, b - 1, a, g)),
    "no window while decoding": (
        "_mask",
        lambda right: lambda n, s, la, m, b, a, g: right(n, s, la, m, b if n > 1 else s, a, g),
    ),
    "sinks left out": (
        "attended",
        lambda right: lambda q, k, v, scale, mask, sinks: right(q, k, v, scale, mask, None),
    ),
    "the wrong key head": ("attended", lambda right: lambda q, k, *rest: right(q, k.flip(1), *rest)),
    "not a number": ("attended", lambda right: lambda *given: right(*given) * float("nan")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_trial_sees_every_fault_of_a_device(fault: str, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken = FAULTS[fault]
    monkeypatch.setattr(machine, name, broken(getattr(machine, name)))
    found = why_not(NPU, LAYOUT, 8, has_window=True, has_sinks=True)
    assert found.startswith("its results differ from float32 by "), found
