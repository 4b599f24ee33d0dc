"""transformers' classes of the parts of models that take pictures."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from pd_cluster.checkpoints.vision import VisionPart


class Classes(NamedTuple):
    """Names in transformers' module of a model type."""

    tower: str
    rotary: str


CLASSES = {
    "qwen2_vl": Classes("Qwen2VisionTransformerPretrainedModel", "Qwen2VLRotaryEmbedding"),
    "qwen2_5_vl": Classes("Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLRotaryEmbedding"),
    "qwen3_vl": Classes("Qwen3VLVisionModel", "Qwen3VLTextRotaryEmbedding"),
    "qwen3_vl_moe": Classes("Qwen3VLMoeVisionModel", "Qwen3VLMoeTextRotaryEmbedding"),
}


def tower_of(part: VisionPart) -> Any:
    return getattr(_module(part), CLASSES[part.model_type].tower)


def rotary_of(part: VisionPart) -> Any:
    return getattr(_module(part), CLASSES[part.model_type].rotary)


def _module(part: VisionPart) -> Any:
    return importlib.import_module(f"transformers.models.{part.model_type}.modeling_{part.model_type}")
