"""The transformers classes that compute pictures, by the whole model's model_type, and how to call them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from pd_cluster.checkpoints.vision_config import VisionPart
from pd_cluster.devices.device import Device
from pd_cluster.media.kinds.pixtral import RowRules
from pd_cluster.model.inputs.forward_batch import on_device
from pd_cluster.model.vision.pixel_values import Pixels
from pd_cluster.types import Image

Layers = list[torch.Tensor]  # each [num_features, hidden]: the features, then the features of DeepStack
Encode = Callable[[Any, Pixels, Image, Device], Layers]


class VisionClasses(NamedTuple):
    """Names in the transformers module of a model type.

    `encode` is called with an object of the class `tower`, whose weights' names start with `visual.`. If `tower` is "",
    the tower is part of the whole model; then `encode` is called with the whole model without its text model.
    """

    encode: Encode
    tower: str = ""
    rotary: str = ""  # the text model's rotary embedding, if pictures have positions of several dimensions
    pairs_neighbours: bool = False  # tables of `rotary` have each angle twice in a row; otherwise all, then all again


def by_grid(module: Any, pixels: Pixels, image: Image, device: Device) -> Layers:
    grid = np.array([[1, image.num_rows, image.num_columns]], dtype=np.int64)
    given = on_device({"patches": pixels.patches(image), "grid": grid}, device)
    found = module(given["patches"], grid_thw=given["grid"])
    return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]


def by_tiles(module: Any, pixels: Pixels, image: Image, device: Device) -> Layers:
    given = on_device({"planes": pixels.planes(image)}, device)
    found = module.get_image_features(given["planes"]).pooler_output
    return [torch.cat(list(found))]


def by_size(module: Any, pixels: Pixels, image: Image, device: Device) -> Layers:
    given = on_device({"planes": pixels.planes(image)}, device)
    (found,) = module.get_image_features(given["planes"], image_sizes=[given["planes"].shape[2:]]).pooler_output
    return [found]


def by_size_if_rows(module: Any, pixels: Pixels, image: Image, device: Device) -> Layers:
    """Encodes by size or by tiles, because LLaVA models have towers of both types."""
    return (by_size if isinstance(pixels.rules, RowRules) else by_tiles)(module, pixels, image, device)


def by_grid_in_whole(module: Any, pixels: Pixels, image: Image, device: Device) -> Layers:
    patches = pixels.patches(image)
    num_groups = len(patches) // (image.num_rows * image.num_columns)
    grid = np.array([[num_groups, image.num_rows, image.num_columns]], dtype=np.int64)
    given = on_device({"patches": patches, "grid": grid}, device)
    if num_groups > 1:
        (found,) = module.get_video_features(given["patches"], video_grid_thw=given["grid"]).pooler_output
    else:
        (found,) = module.get_image_features(given["patches"], image_grid_thw=given["grid"]).pooler_output
    return [found]


CLASSES = {
    "qwen2_vl": VisionClasses(by_grid, "Qwen2VisionTransformerPretrainedModel", "Qwen2VLRotaryEmbedding"),
    "qwen2_5_vl": VisionClasses(by_grid, "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLRotaryEmbedding"),
    "qwen3_vl": VisionClasses(by_grid, "Qwen3VLVisionModel", "Qwen3VLTextRotaryEmbedding"),
    "qwen3_vl_moe": VisionClasses(by_grid, "Qwen3VLMoeVisionModel", "Qwen3VLMoeTextRotaryEmbedding"),
    "llava": VisionClasses(by_size_if_rows),
    "internvl": VisionClasses(by_tiles),
    "mistral3": VisionClasses(by_size),
    "gemma3": VisionClasses(by_tiles),
    "ernie4_5_vl_moe": VisionClasses(
        by_grid_in_whole, rotary="Ernie4_5_VLMoeTextRotaryEmbedding", pairs_neighbours=True
    ),
    "glm4v": VisionClasses(by_grid_in_whole, rotary="Glm4vTextRotaryEmbedding", pairs_neighbours=True),
}


def class_of(part: VisionPart, name: str) -> Any:
    module = importlib.import_module(f"transformers.models.{part.model_type}.modeling_{part.model_type}")
    return getattr(module, name)
