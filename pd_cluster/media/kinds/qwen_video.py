"""Reads from a folder of Qwen2-VL, Qwen2.5-VL or Qwen3-VL how videos are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_cluster.errors import ModelError
from pd_cluster.media.given import Given, part
from pd_cluster.media.video import VideoRules

LEAST_TOKENS, MOST_TOKENS = 128, 768  # of a frame, or of all, where no file says so
ALIKE = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std", "rescale_factor")


def video_rules(given: Given, side: int, **more: Any) -> VideoRules:
    """`side`: pixels of a token in a config that names none. Raises ModelError."""
    file, found = given.video
    for name in ALIKE:
        own, of_pictures = found.get(name), given.preprocessor.get(name)
        if own is not None and of_pictures is not None and own != of_pictures:
            raise ModelError(
                f"{file}: {name} {own}: {given.file.name} has {of_pictures}; videos are read as images are"
            )
    if found.get("cap_pixels_per_frame"):
        raise ModelError(f"{file}: cap_pixels_per_frame true: not supported; leave it out")
    return VideoRules(
        token_id=given.token_id("video_token_id", default=151656),
        start_id=given.token_id("vision_start_token_id", default=151652),
        end_id=given.token_id("vision_end_token_id", default=151653),
        min_pixels=_area(file, found, "shortest_edge", "min_pixels", LEAST_TOKENS * side**2),
        max_pixels=_area(file, found, "longest_edge", "max_pixels", MOST_TOKENS * side**2),
        **more,
    )


def _area(file: Any, found: Mapping[str, Any], name: str, old_name: str, default: int) -> int:
    value = found.get(old_name)
    value = part(found, "size").get(name, default) if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{file}: {old_name} {value!r}: must be a whole number of pixels")
    return value
