"""A checkpoint's vision tower: transformers' own module, in float32, one picture a call.

A picture's features then depend on nothing but its pixels. The most recently used are kept. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import structs
from transformers.models.auto.configuration_auto import AutoConfig

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.vision import VisionPart
from pd_cluster.checkpoints.weight_files import PLAIN_DTYPES, quantized, stored_dtypes, weight_files
from pd_cluster.devices.device import Device
from pd_cluster.errors import ModelError
from pd_cluster.media.rules import NUM_CHANNELS, ImageRules
from pd_cluster.model.batch import on_device
from pd_cluster.model.image_rows import ImagePart, ImageRows
from pd_cluster.model.parallel.shard import read_named
from pd_cluster.model.vision.classes import tower_of
from pd_cluster.types import Image

log = logging.getLogger(__name__)

WEIGHTS = re.compile(r"(?:model\.)?visual\.(?P<name>.+)")


class Tower:
    """Computes pictures, and keeps the features of up to `num_kept_tokens` tokens, least recently used out first."""

    def __init__(self, module: Any, part: VisionPart, device: Device, dtype: torch.dtype, num_kept_tokens: int) -> None:
        """`dtype`: that in which features are kept, the activations' own."""
        self.rules: ImageRules = part.rules
        self.num_encoded = 0  # pictures computed since the start
        self._module, self._part, self._device, self._dtype = module, part, device, dtype
        self._table = _values(part)
        self._kept: OrderedDict[bytes, torch.Tensor] = (
            OrderedDict()
        )  # by ImagePart.key: [1 + num_deep, num_tokens, hidden]
        self.num_kept_tokens = num_kept_tokens

    def sparing_pixels(self, parts: Sequence[ImagePart]) -> list[ImagePart]:
        """Returns the parts, without pixels where all ranks keep the features: they compute the same steps."""
        return [
            part._replace(image=structs.replace(part.image, pixels=b"")) if part.key in self._kept else part
            for part in parts
        ]

    def rows(self, parts: Sequence[ImagePart]) -> ImageRows:
        """Returns the features of a step's rows; pictures that are not kept are computed, from their pixels.

        Features that are kept before the step serve all of it, whatever gives way in it.
        """
        found = {part.key: self._kept.get(part.key) for part in parts}
        taken = []
        for part in parts:
            features = found[part.key]
            if features is None:
                features = found[part.key] = self.encode(part.image)
            taken.append(features[:, part.start : part.start + part.num_tokens])
        self._keep(found)
        rows = np.concatenate([np.arange(part.row, part.row + part.num_tokens) for part in parts])
        at = on_device({"rows": rows}, self._device)["rows"]
        return ImageRows(at, taken[0] if len(taken) == 1 else torch.cat(taken, dim=1))

    def _keep(self, features: Mapping[bytes, torch.Tensor | None]) -> None:
        """Keeps a step's features as the most recently used, as many as there is room for.

        The last picture is kept however large it is: chunks of its prompt follow.
        """
        for key, each in features.items():
            if each is not None:
                self._kept[key] = each
                self._kept.move_to_end(key)
        num_tokens = sum(each.shape[1] for each in self._kept.values())
        least = 1 if self.num_kept_tokens else 0
        while num_tokens > self.num_kept_tokens and len(self._kept) > least:
            _, dropped = self._kept.popitem(last=False)
            num_tokens -= dropped.shape[1]

    @torch.inference_mode()
    def encode(self, image: Image) -> torch.Tensor:
        """Computes a picture's features, [1 + num_deep, num_tokens, hidden_size]."""
        assert image.pixels, "a picture that is to be computed came without pixels"
        grid = np.array([[1, image.num_rows, image.num_columns]], dtype=np.int64)
        given = on_device({"patches": self.patches(image), "grid": grid}, self._device)
        found = self._module(given["patches"], grid_thw=given["grid"])
        layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        self.num_encoded += 1
        return torch.stack(layers).to(self._dtype)

    def patches(self, image: Image) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Returns the tower's input, [num_patches, channels * frames * patch_size²], in the order of merged patches."""
        patch, merge = self.rules.patch_size, self.rules.merge_size
        tall, wide = image.num_rows // merge, image.num_columns // merge
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(-1, NUM_CHANNELS)
        values = np.empty(pixels.shape, np.float32)
        for channel in range(NUM_CHANNELS):
            values[:, channel] = self._table[channel, pixels[:, channel]]
        blocks = values.reshape(tall, merge, patch, wide, merge, patch, NUM_CHANNELS)
        blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # [tall, wide, merge, merge, channels, patch, patch]
        shape = (*blocks.shape[:5], self._part.num_frames, patch, patch)
        repeated = np.broadcast_to(blocks[:, :, :, :, :, None], shape)
        return np.ascontiguousarray(repeated.reshape(image.num_rows * image.num_columns, -1))


def _values(part: VisionPart) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the tower's value of each 8-bit number, [channels, 256], rounded as by transformers' processor."""
    scaled = (np.arange(256, dtype=np.float64) * part.rescale).astype(np.float32)
    mean, std = (np.array(each, dtype=np.float32)[:, None] for each in (part.mean, part.std))
    table: np.ndarray[Any, np.dtype[np.float32]] = (scaled - mean) / std
    return table


def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: Device, num_kept_tokens: int) -> Tower:
    """Builds a folder's tower and reads its weights. Raises ModelError for weights that do not fit."""
    part = checkpoint.vision
    assert part is not None
    _check_stored(checkpoint)
    whole: Any = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
    config = whole.vision_config
    num_deep = len(getattr(config, "deepstack_visual_indexes", None) or ())
    if num_deep >= (num_layers := int(checkpoint.config["num_hidden_layers"])):
        raise ModelError(
            f"{checkpoint.path / 'config.json'}: deepstack_visual_indexes: {num_deep} for {num_layers} layers; the "
            f"last layer takes none"
        )
    kind = tower_of(part)
    try:
        module, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=read_named(checkpoint.path, _tower_name),
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{checkpoint.path}: cannot load the vision tower: {error}") from error
    for kind_of_fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if wrong := sorted(str(key[0] if isinstance(key, tuple) else key) for key in info[kind_of_fault]):
            fault = kind_of_fault.partition("_")[0]
            raise ModelError(f"{checkpoint.path}: visual.{wrong[0]}: {fault} among the weights of the vision tower")
    module.requires_grad_(False)
    log.info("images: %s in float32, %d weights", kind.__name__, sum(p.numel() for p in module.parameters()))
    return Tower(module.eval().to(device.torch_name), part, device, dtype, num_kept_tokens)


def _tower_name(key: str) -> str:
    found = WEIGHTS.fullmatch(key)
    return found["name"] if found is not None else ""


def _check_stored(checkpoint: Checkpoint) -> None:
    for file in weight_files(checkpoint.path):
        for key, dtype in stored_dtypes(file).items():
            if _tower_name(key) and dtype not in PLAIN_DTYPES:
                raise quantized(f"{file}: {key} ({dtype})")
