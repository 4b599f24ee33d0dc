"""Pictures of GLM-4.1V: as Qwen2-VL's, but the area counts the two frames of a patch, and narrow pictures grow."""

from __future__ import annotations

import math

from pd_cluster.errors import RequestError
from pd_cluster.media.given import Given
from pd_cluster.media.kinds.qwen import MAX_ASPECT_RATIO, GridRules, grid_rules

SIZES = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}


class FrameRules(GridRules, frozen=True):
    """Bounds of the area are those of all frames together."""

    def resized(self, height: int, width: int) -> tuple[int, int]:
        side, num_frames = self.side, self.num_frames
        if min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise RequestError(
                f"{width} x {height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other; cut it"
            )
        tall, wide = round(height / side) * side, round(width / side) * side
        if num_frames * tall * wide > self.max_pixels:
            factor = math.sqrt(num_frames * height * width / self.max_pixels)
            return max(side, math.floor(height / factor / side) * side), max(
                side, math.floor(width / factor / side) * side
            )
        if num_frames * tall * wide < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (num_frames * height * width))
            return math.ceil(height * factor / side) * side, math.ceil(width * factor / side) * side
        return tall, wide


def glm4v(given: Given) -> GridRules:
    return grid_rules(given, 14, 151343, SIZES, FrameRules)
