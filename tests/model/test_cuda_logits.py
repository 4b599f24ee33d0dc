"""All rows of a model's logits are as close to transformers in float32 as transformers in 16 bits is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

MODEL = os.environ.get("PD_CLUSTER_TEST_MODEL", "")  # a folder with the 8B model's sizes; see scripts/gpu_check.sh
CHUNKS = [700, 396, 1, 1, 1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.skipif(not MODEL, reason="PD_CLUSTER_TEST_MODEL names no model")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("speedups", [(), ("pdl", "skinny-gate")], ids=["plain", "speed-ups"])
def test_logits_of_a_large_model(speedups: tuple[str, ...]) -> None:
    """Computes 1,100 tokens: two chunks of a prompt, and four decoded tokens."""
    from pd_cluster.devices.device import Device
    from tests.support.whole_logits import errors

    if "pdl" in speedups and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("dependent launches need Hopper")
    ours, theirs = errors(Path(MODEL), Device("cuda"), "bfloat16", CHUNKS, speedups)
    print(f"\nours {ours}, transformers in bfloat16 {theirs}")
    assert ours.is_within(theirs), (ours, theirs)
