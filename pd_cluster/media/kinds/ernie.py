"""Pictures of ERNIE 4.5 VL are like Qwen2-VL's with one frame per patch; separate experts compute pictures and marks.

In a video, the tower joins pairs of frames, and times are drawn into the frames.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from pd_cluster.errors import ModelError
from pd_cluster.media.folder_fields import FolderFields
from pd_cluster.media.kinds.qwen import GridDefaults, GridRules, grid_rules
from pd_cluster.media.kinds.qwen_video import ALIKE, VideoDefaults, video_rules

SIZES = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 6177}
VIDEO = VideoDefaults(
    (("video_token_id", 103367), ("video_start_token_id", 101306), ("video_end_token_id", 101307)),
    299 * 28 * 28,
    1196 * 28 * 28,
    tuple(name for name in ALIKE if name != "temporal_patch_size"),
)
FONT = "Roboto-Regular.ttf"


def ernie(given: FolderFields) -> GridRules:
    """Returns the rules of a folder. Raises ModelError."""
    marks = (
        given.token_id("image_start_token_id", default=101304),
        given.token_id("image_end_token_id", default=101305),
    )
    rules = grid_rules(given, GridDefaults(14, 100295, SIZES, num_frames=1), marks=marks)
    file, found = given.video
    font = given.folder / Path(str(found.get("font") or FONT)).name
    draws = found.get("draw_on_frames", True) is not False
    if draws and not font.is_file():
        why = f"{file.name}: draw_on_frames: times are drawn into frames with {font.name}, which the folder lacks"
        return structs.replace(rules, no_videos=f"{why}; add that font, or set draw_on_frames to false")
    together = given.count("temporal_merge_size", 2, of_tower=True)
    if together != 2:
        raise ModelError(f"{given.folder}/config.json: vision_config.temporal_merge_size {together}: must be 2")
    video = video_rules(given, VIDEO, together=together, font=str(font) if draws else "")
    return structs.replace(rules, video=video)
