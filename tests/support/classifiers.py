"""A tiny sequence classifier, and transformers' scores for it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from tests.support.checkpoints import make_checkpoint

LABELS = ["calm", "glad", "sad"]


def make_classifier(folder: Path) -> Path:
    """Makes a classifier from a generating model: replaces its output layer by a head for LABELS."""
    make_checkpoint(folder, "llama")
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    weights.pop("lm_head.weight", None)
    size = weights["model.norm.weight"].shape[0]
    weights["score.weight"] = torch.randn(len(LABELS), size, generator=torch.Generator().manual_seed(5))
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "tie_word_embeddings": False}
    config |= {"id2label": dict(enumerate(LABELS)), "label2id": {label: at for at, label in enumerate(LABELS)}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def _reference(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()


def reference_classes(folder: Path, token_ids: list[int]) -> list[float]:
    """Returns transformers' score of each label."""
    with torch.inference_mode():
        found: list[float] = _reference(folder)(torch.tensor([token_ids])).logits[0].tolist()
    return found
