"""The classes of transformers that compute pictures, by the model_type of the whole model, and how they are called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from pd_cluster.checkpoints.vision import VisionPart
from pd_cluster.devices.device import Device
from pd_cluster.model.batch import on_device
from pd_cluster.model.vision.pixels import Pixels
from pd_cluster.types import Image

Layers = list[torch.Tensor]  # [num_features, hidden] each: the features, and those of DeepStack
Encode = Callable[[Any, Pixels, Image, Device], Layers]


class Classes(NamedTuple):
    """Names in transformers' module of a model type.

    `tower`: that of a tower whose weights' names begin with `visual.`; "": the tower is a part of the whole model. With
    the first, the module that `encode` is called with is the tower; without, it is the whole model less its text model.
    `rotary`: the text model's rotary embedding, if pictures have positions of several dimensions.
    """

    encode: Encode
    tower: str = ""
    rotary: str = ""


def by_grid(module: Any, pixels: Pixels, image: Image, device: Device) -> Layers:
    grid = np.array([[1, image.num_rows, image.num_columns]], dtype=np.int64)
    given = on_device({"patches": pixels.patches(image), "grid": grid}, device)
    found = module(given["patches"], grid_thw=given["grid"])
    return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]


CLASSES = {
    "qwen2_vl": Classes(by_grid, "Qwen2VisionTransformerPretrainedModel", "Qwen2VLRotaryEmbedding"),
    "qwen2_5_vl": Classes(by_grid, "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLRotaryEmbedding"),
    "qwen3_vl": Classes(by_grid, "Qwen3VLVisionModel", "Qwen3VLTextRotaryEmbedding"),
    "qwen3_vl_moe": Classes(by_grid, "Qwen3VLMoeVisionModel", "Qwen3VLMoeTextRotaryEmbedding"),
}


def class_of(part: VisionPart, name: str) -> Any:
    module = importlib.import_module(f"transformers.models.{part.model_type}.modeling_{part.model_type}")
    return getattr(module, name)
