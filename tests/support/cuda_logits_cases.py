"""A small model's logits through the CUDA path's kernels, interpreted.

Run by tests/model/test_cuda_logits.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.spec import QUICK_SHAPE
from benchmarks.peers.make_model import make_model
from pd_cluster.devices.device import CPU
from pd_cluster.model import loader
from pd_cluster.model.attention_choice import triton_attention
from tests.support.interpreted import choose_device
from tests.support.whole_logits import errors

choose_device()

CHUNKS = [40, 17, 1, 1, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_model(made, QUICK_SHAPE, torch.bfloat16)
    return made


@pytest.fixture(autouse=True)
def _as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "choose_attention", lambda *given: triton_attention())


@pytest.mark.parametrize("speedups", [(), ("skinny-gate",)], ids=["plain", "skinny-gate"])
def test_logits_are_as_near_as_those_of_transformers(folder: Path, speedups: tuple[str, ...]) -> None:
    ours, theirs = errors(folder, CPU, "bfloat16", CHUNKS, speedups)
    assert ours.is_within(theirs), (ours, theirs)
