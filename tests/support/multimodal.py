"""Tiny multimodal checkpoints: a text model of tests/support/checkpoints.py beside a small vision model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import COMMON, MIXED_LAYERS, ROPE, make_checkpoint, padded_left, shake, until_end

SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
MROPE = {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
GEMMA = {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}
# model_type -> the config's class, the text model's type, its differences from COMMON, and further settings
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3Config",
        "gemma3_text",
        {**MIXED_LAYERS, **GEMMA},
        {"vision_config": SIGLIP, "mm_tokens_per_image": 4, "image_token_index": 300, "boi_token_index": 301},
    ),
    "mistral3": (
        "Mistral3Config",
        "mistral",
        {"sliding_window": None},
        {"vision_config": {**SIGLIP, "model_type": "pixtral", "head_dim": 16}, "image_token_index": 300},
    ),
    "llava": (
        "LlavaConfig",
        "llama",
        {},
        {"vision_config": {**SIGLIP, "model_type": "clip_vision_model"}, "image_token_index": 300},
    ),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "qwen2_5_vl_text", MROPE, {"vision_config": QWEN_VISION}),
    "qwen2_vl": (
        "Qwen2VLConfig",
        "qwen2_vl_text",
        MROPE,
        {"vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 1, "hidden_size": 64}},
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        "qwen3_vl_text",
        {"rope_parameters": {**MROPE["rope_parameters"], "mrope_interleaved": True}},
        {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}},
    ),
}
TOKENS = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}


def make_multimodal(folder: Path, name: str, is_tied: bool | None = None, **changes: Any) -> Path:
    """Writes config, weights and tokenizer; returns the folder.

    `changes` apply to the text model's config; `is_tied`: the whole config's tied embeddings, if they differ.
    """
    make_checkpoint(folder)  # tokenizer and generation_config.json
    (folder / "model.safetensors").unlink()
    config_class, text_type, own, settings = MODELS[name]
    text = {**COMMON, **own, **changes, "model_type": text_type}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"] if is_tied is None else is_tied}
    tokens = TOKENS if name.startswith("qwen") else {}
    config = getattr(transformers, config_class)(text_config=text, **settings, **tokens, **tied)
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    shake(model)
    model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def rewrite_weights(folder: Path, old: str, new: str) -> None:
    """Renames the weights whose names begin with `old`."""
    file = folder / "model.safetensors"
    weights = {new + key.removeprefix(old) if key.startswith(old) else key: w for key, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@cache
def _reference(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def reference_greedy(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Returns the whole multimodal model's generate() for texts alone."""
    model = _reference(folder)
    found = []
    for prompt in prompts:
        with torch.inference_mode():
            output = model.generate(**padded_left([prompt]), max_new_tokens=max_tokens, do_sample=False)
        found.append(until_end(output[0, len(prompt) :].tolist(), {model.generation_config.eos_token_id}))
    return found
