"""Reads the video settings in folders of Qwen2-VL and similar models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pd_cluster.errors import ModelError
from pd_cluster.media.folder_fields import FolderFields, part
from pd_cluster.media.video_rules import VideoRules

LEAST_TOKENS, MOST_TOKENS = 128, 768  # the default limits, of one frame or of all frames together
ALIKE = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std", "rescale_factor")


class VideoDefaults(NamedTuple):
    """Defaults of a folder's files: token ids, by their names in config.json, and areas."""

    token_ids: tuple[tuple[str, int], tuple[str, int], tuple[str, int]]  # the placeholder, start and end
    min_pixels: int
    max_pixels: int
    alike: tuple[str, ...] = ALIKE  # fields that must have equal values for pictures and videos


def qwen_defaults(side: int) -> VideoDefaults:
    """`side`: the side of a token, in pixels."""
    ids = (("video_token_id", 151656), ("vision_start_token_id", 151652), ("vision_end_token_id", 151653))
    return VideoDefaults(ids, LEAST_TOKENS * side**2, MOST_TOKENS * side**2)


def video_rules(given: FolderFields, defaults: VideoDefaults, **more: Any) -> VideoRules:
    """`more`: further fields of the rules. Raises ModelError."""
    file, found = given.video
    for name in defaults.alike:
        own, of_pictures = found.get(name), given.preprocessor.get(name)
        if own is not None and of_pictures is not None and own != of_pictures:
            raise ModelError(
                f"{file}: {name} {own}: {given.file.name} has {of_pictures}; videos are read like images, so "
                f"give both files the same value"
            )
    if found.get("cap_pixels_per_frame"):
        raise ModelError(f"{file}: cap_pixels_per_frame true: not supported; leave it out")
    token_id, start_id, end_id = (given.token_id(name, default=default) for name, default in defaults.token_ids)
    more.setdefault("together", given.count("temporal_patch_size", 2, of_tower=True))
    return VideoRules(
        token_id=token_id,
        start_id=start_id,
        end_id=end_id,
        min_pixels=_area(file, found, "shortest_edge", "min_pixels", defaults.min_pixels),
        max_pixels=_area(file, found, "longest_edge", "max_pixels", defaults.max_pixels),
        **more,
    )


def _area(file: Any, found: Mapping[str, Any], name: str, old_name: str, default: int) -> int:
    value = found.get(old_name)
    value = part(found, "size").get(name, default) if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{file}: {old_name} {value!r}: must be a whole number of pixels")
    return value
