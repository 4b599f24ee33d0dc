"""The input values of a tower: the value of each 8-bit pixel, and the order of patches."""

from __future__ import annotations

from typing import Any

import numpy as np

from pd_cluster.checkpoints.vision_config import VisionPart
from pd_cluster.media.image_rules import NUM_CHANNELS, ImageRules
from pd_cluster.media.kinds.qwen import GridRules
from pd_cluster.types import Image

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Pixels:
    """Converts the pixels of pictures to a tower's input values, with the rounding of transformers' processors."""

    def __init__(self, part: VisionPart) -> None:
        self.rules: ImageRules = part.rules
        scaled = (np.arange(256, dtype=np.float64) * part.rescale).astype(np.float32)
        mean, std = (np.array(each, dtype=np.float32)[:, None] for each in (part.mean, part.std))
        self._table: Floats = (scaled - mean) / std  # [channels, 256]

    def planes(self, image: Image) -> Floats:
        """Returns [num_copies, channels, height, width]; see ImageRules.shape."""
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(*self.rules.shape(image), NUM_CHANNELS)
        values = np.empty((len(pixels), NUM_CHANNELS, *pixels.shape[1:3]), np.float32)
        for channel in range(NUM_CHANNELS):
            values[:, channel] = self._table[channel, pixels[..., channel]]
        return values

    def patches(self, image: Image) -> Floats:
        """Returns [num_patches, channels * frames * patch_size²], for GridRules. Patches that will be merged follow
        each other.

        A picture with a single frame is repeated. Frames that do not share patches follow each other.
        """
        rules = self.rules
        assert isinstance(rules, GridRules)
        patch, merge = rules.patch_size, rules.merge_size
        tall, wide = image.num_rows // merge, image.num_columns // merge
        joined = min(image.num_frames, rules.num_frames)
        blocks = self.planes(image).reshape(-1, joined, NUM_CHANNELS, tall, merge, patch, wide, merge, patch)
        # [groups, tall, wide, merge, merge, channels, frames, patch, patch]
        blocks = blocks.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
        repeated = np.broadcast_to(blocks, (*blocks.shape[:6], rules.num_frames, patch, patch))
        return np.ascontiguousarray(repeated.reshape(len(blocks) * image.num_rows * image.num_columns, -1))
