"""Models are the same if modules are built without initializing weights, or weights go straight to a device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU, Device
from pd_cluster.errors import ConfigError
from pd_cluster.model.loading import model_loader, transformers_modules
from pd_cluster.settings.engine_config import SHIPPED_MODEL


def numbers(opened: Checkpoint) -> dict[str, torch.Tensor]:
    model = transformers_modules.load_plain(opened, "float32", CPU)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("architecture", ["gemma3_text", "gemma4_text", "stablelm", "gpt_neox", "opt", "mixtral"])
def test_buffers_and_weights_are_those_of_transformers_alone(
    architecture: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Checkpoint.open(str(checkpoint(architecture)))
    found = numbers(opened)
    monkeypatch.setattr(transformers_modules, "UninitializedModules", nullcontext)
    expected = numbers(opened)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_rank_on_a_cpu_loads_a_model_without_sympy() -> None:
    code = (
        "import sys\n"
        "from pd_cluster.engine.start.rank_main import import_engine\n"
        "import_engine(light=True)\n"
        "from pd_cluster.checkpoints.checkpoint import Checkpoint\n"
        "from pd_cluster.devices.device import CPU\n"
        "from pd_cluster.model.loading.model_loader import load_model\n"
        "load_model(Checkpoint.open(sys.argv[1]), 'float32', CPU)\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-c", code, str(SHIPPED_MODEL)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    imported = {*done.stdout.split()}
    assert "torch" in imported
    assert "sympy" not in imported


# ---- weights straight to a device, which the host replaces here


def test_an_accelerator_is_filled_directly_where_the_helper_library_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transformers_modules.straight_to(CPU) == {}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert transformers_modules.straight_to(Device("cuda", 3)) == {"device_map": {"": "cuda:3"}}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert transformers_modules.straight_to(Device("cuda", 3)) == {}


def test_it_loads_the_same_weights(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    opened = Checkpoint.open(str(checkpoint("gemma2")))
    usual = transformers_modules.load_plain(opened, "bfloat16", CPU).state_dict()
    monkeypatch.setattr(transformers_modules, "straight_to", lambda device: {"device_map": {"": "cpu"}})
    direct = transformers_modules.load_plain(opened, "bfloat16", CPU).state_dict()
    assert usual.keys() == direct.keys()
    assert all(torch.equal(usual[name], direct[name]) for name in usual)


def test_weights_that_do_not_fit_are_told_with_the_way_out(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: torch.nn.Module, place: str) -> torch.nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(ConfigError, match="the weights do not fit cpu in float32; give more devices"):
        transformers_modules.load_plain(Checkpoint.open(str(checkpoint("llama"))), "float32", CPU)


def test_in_sixteen_bits_a_row_may_take_another_expert() -> None:
    expected = torch.eye(4)
    changed = expected.clone()
    changed[1] += 0.4
    assert model_loader.change_of(changed, expected, "float32") == pytest.approx(0.4)
    assert model_loader.change_of(changed, expected, "bfloat16") == 0.0
    changed[2:] += 0.4
    assert model_loader.change_of(changed, expected, "bfloat16") == pytest.approx(0.4)
    assert model_loader.change_of(torch.full((4, 4), float("nan")), expected, "bfloat16") != 0.0
