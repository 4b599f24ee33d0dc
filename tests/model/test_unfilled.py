"""Modules that are built without numbers become the same model, in less time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.model import modules
from pd_cluster.settings.engine import SHIPPED_MODEL


def numbers(opened: Checkpoint) -> dict[str, torch.Tensor]:
    model = modules.load_plain(opened, "float32", CPU)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3_text", "stablelm", "gpt_neox", "opt", "mixtral"])
def test_buffers_and_weights_are_those_of_transformers_alone(
    architecture: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Checkpoint.open(str(checkpoint(architecture)))
    found = numbers(opened)
    monkeypatch.setattr(modules, "Unfilled", nullcontext)
    expected = numbers(opened)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_rank_on_a_cpu_loads_a_model_without_sympy() -> None:
    code = (
        "import sys\n"
        "from pd_cluster.engine.start.process import import_engine\n"
        "import_engine(light=True)\n"
        "from pd_cluster.checkpoints.checkpoint import Checkpoint\n"
        "from pd_cluster.devices.device import CPU\n"
        "from pd_cluster.model.loader import load_model\n"
        "load_model(Checkpoint.open(sys.argv[1]), 'float32', CPU)\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-c", code, str(SHIPPED_MODEL)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    modules = {*done.stdout.split()}
    assert "torch" in modules
    assert "sympy" not in modules
