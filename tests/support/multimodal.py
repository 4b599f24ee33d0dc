"""Tiny multimodal checkpoints for tests of their text models, and changes to their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import padded_left, until_end
from tests.support.picture_kinds import make_kind
from tests.support.pictures import MODELS, make_vision, reference_of

NAMES = ("gemma3", "mistral3", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")


def make_multimodal(folder: Path, name: str, is_tied: bool | None = None, **changes: Any) -> Path:
    """Writes all files of a model. `changes` apply to its text config.

    `is_tied`: tie_word_embeddings of the outer config, if it differs from the text config's; not for Qwen's.
    """
    if name in MODELS:
        return make_vision(folder, name, **changes)
    return make_kind(folder, name, is_tied, **changes)


def rewrite_weights(folder: Path, old: str, new: str) -> None:
    """Replaces the prefix `old` of weights' names by `new`."""
    file = folder / "model.safetensors"
    weights = {new + key.removeprefix(old) if key.startswith(old) else key: w for key, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def reference_greedy(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Returns the tokens of the whole multimodal model's generate() for prompts of text only."""
    model = reference_of(folder)
    found = []
    for prompt in prompts:
        with torch.inference_mode():
            output = model.generate(**padded_left([prompt]), max_new_tokens=max_tokens, do_sample=False)
        found.append(until_end(output[0, len(prompt) :].tolist(), {model.generation_config.eos_token_id}))
    return found
