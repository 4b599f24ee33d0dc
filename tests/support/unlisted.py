"""Tiny checkpoints of unlisted model types: some that --try-unlisted serves, and some that it rejects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import checkpoints
from tests.support.checkpoints import MIXED_LAYERS, NO_GROUPS

# model_type -> differences from tests/support/checkpoints.COMMON
SERVED: dict[str, dict[str, Any]] = {
    "helium": {},
    "nemotron": {},  # its layers do not pass the batch to attention
    "persimmon": {**NO_GROUPS, "qk_layernorm": True},
    "bitnet": {},
    "iquestcoder": {},
    "mellum": {**MIXED_LAYERS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "granitemoe_swa": {**MIXED_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
}
# Rejected when loaded: model_type -> differences from COMMON, and the error.
FAILED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({}, "bloom: layer 0 does not call the registered attention"),
    "diffllama": ({}, r"diffllama: layers \[0, 0, 1, 1, 2, 2\] wrote to the KV pool, but each of 3 must do so"),
    "gpt_neox_japanese": ({}, "gpt_neox_japanese: layer 0 does not call the registered attention"),
}


def make(folder: Path, architecture: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    own = SERVED.get(architecture) or FAILED.get(architecture, ({}, ""))[0]
    monkeypatch.setitem(checkpoints.CONFIGS, architecture, own)
    return checkpoints.make_checkpoint(folder, architecture, **changes)
