"""Pictures of GLM-4.1V are like Qwen2-VL's, but area limits count both frames of a patch, and narrow pictures are
enlarged.

In a video, each pair of frames is a picture with a picture's tokens, followed by its time in whole seconds.
"""

from __future__ import annotations

import math

from msgspec import structs

from pd_cluster.errors import RequestError
from pd_cluster.media.folder_fields import FolderFields
from pd_cluster.media.kinds.qwen import MAX_ASPECT_RATIO, GridDefaults, GridRules, grid_rules
from pd_cluster.media.kinds.qwen_video import VideoDefaults, video_rules
from pd_cluster.media.video_rules import TimestampStyle

SIZES = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}


class FrameRules(GridRules, frozen=True):
    """Area limits apply to all frames together."""

    def resized(self, height: int, width: int) -> tuple[int, int]:
        side, num_frames = self.side, self.num_frames
        if min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise RequestError(
                f"{width} x {height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other; crop it"
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


VIDEO = VideoDefaults(
    (("video_token_id", 151344), ("image_start_token_id", 151339), ("image_end_token_id", 151340)),
    112 * 112,
    28 * 28 * 2 * 30000,
)


def glm4v(given: FolderFields) -> GridRules:
    """Returns the rules of a folder. Raises ModelError."""
    rules = grid_rules(given, GridDefaults(14, 151343, SIZES), FrameRules)
    video = video_rules(given, VIDEO, stamps=TimestampStyle.BEHIND, shares_area=True, pad_id=rules.token_id)
    return structs.replace(rules, video=video)
