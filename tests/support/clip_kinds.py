"""Videos for tiny models of GLM-4.1V and ERNIE 4.5 VL, and transformers' answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image as Pictures
from PIL import ImageFont

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.media.image_rules import PromptWithImages, place
from pd_cluster.media.kinds.qwen import GridRules
from pd_cluster.media.video_files import fitted
from pd_cluster.media.video_inputs import VideoFrames
from pd_cluster.media.video_rules import Video
from pd_cluster.types import RequestSpec, Sampling
from tests.support.checkpoints import EOS_ID, until_end
from tests.support.clips import MEAN, STD, _greedy, _processing, add_videos, encoded
from tests.support.picture_kinds import BEGIN, END, FIRST, LAST, NAMES, PICTURE, VIDEO, make_kind, reference_of
from tests.support.pictures import order_of

CLIP_KINDS = ("glm4v", "ernie4_5_vl_moe")
PATCH, SIDE = 4, 8
SIZES = {
    "glm4v": {"shortest_edge": 512, "longest_edge": 4096},  # pixels of all frames together
    "ernie4_5_vl_moe": {"shortest_edge": 128, "longest_edge": 384},  # pixels of each frame
}
FONT = "Drawn-Regular.ttf"
PLACEHOLDER = "".join(map(NAMES.__getitem__, (BEGIN, VIDEO, END)))
processing = {name: _processing(name) for name in CLIP_KINDS}


def make_filming(folder: Path, name: str, **fields: Any) -> Path:
    """Writes a model that also takes videos; ERNIE's folder gets a font."""
    make_kind(folder, name)
    given = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2, "size": SIZES[name], "font": FONT}
    add_videos(folder, PLACEHOLDER, {**given, **fields})
    font = cast("ImageFont.FreeTypeFont", ImageFont.load_default(8))
    (folder / FONT).write_bytes(font.font_bytes)
    return folder


class Filmed(NamedTuple):
    """A prompt: tokenized texts with videos between them."""

    texts: Sequence[list[int]]
    videos: list[VideoFrames]

    @property
    def token_ids(self) -> list[int]:
        first, *others = self.texts
        return [*first, *(token for text in others for token in (BEGIN, VIDEO, END, *text))]

    def prepared(self, folder: Path) -> list[Video]:
        vision = Checkpoint.open(str(folder)).vision
        assert vision is not None
        assert isinstance(vision.rules, GridRules)
        return [fitted(each, vision.rules) for each in self.videos]

    def placed(self, folder: Path) -> PromptWithImages:
        vision = Checkpoint.open(str(folder)).vision
        assert vision is not None
        return place(self.token_ids, [], vision.rules, "prompt", self.prepared(folder), encoded)

    def order(self, folder: Path, sampling: Sampling) -> RequestSpec:
        return order_of(self.placed(folder), sampling)


def reference_pixels(folder: Path, name: str, video: VideoFrames) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns an even number of frames, drawn and resized as by transformers: [num_frames, height, width, 3]."""
    module = processing[name]
    pictures, count = list(video.pictures), len(video.pictures)
    bounds = {"factor": SIDE, "min_pixels": SIZES[name]["shortest_edge"], "max_pixels": SIZES[name]["longest_edge"]}
    first = pictures[0]
    if name == "glm4v":
        height, width = module.smart_resize(max(2, count), first.height, first.width, **bounds)
    else:
        height, width = module.smart_resize(first.height, first.width, **bounds)
        kind = module.Ernie4_5_VLMoeVideoProcessor
        drawing = type("Drawing", (), {"font": str(folder / FONT)})()
        times = [kind._convert_timestamp(None, index / video.fps) for index in video.indices]
        pictures = [
            kind._render_image_with_timestamp(drawing, each.copy(), time)
            for each, time in zip(pictures, times, strict=True)
        ]
    resized = [np.asarray(each.resize((width, height), Pictures.Resampling.BICUBIC)) for each in pictures]
    return np.stack(resized + resized[-1:] * (count % 2))


def reference_answer(folder: Path, name: str, prompt: Filmed, max_tokens: int) -> list[int]:
    """Returns generate()'s tokens; prepares frames, tokens and, for ERNIE, positions itself.

    As in ERNIE's training, positions after a video continue from the video's largest position.
    """
    token_ids, positions = list(prompt.texts[0]), [(at,) * 3 for at in range(len(prompt.texts[0]))]
    patches, grids = [], []

    def text(ids: Sequence[int]) -> None:
        start = max(map(max, positions)) + 1 if positions else 0
        positions.extend((start + at,) * 3 for at in range(len(ids)))
        token_ids.extend(ids)

    for video, after in zip(prompt.videos, prompt.texts[1:], strict=True):
        found, grid = _patches(name, reference_pixels(folder, name, video))
        patches.append(found)
        grids.append(grid)
        time, tall, wide = grid[0], grid[1] // 2, grid[2] // 2
        text([BEGIN])
        start = max(map(max, positions)) + 1
        for pair in range(time if name == "glm4v" else time // 2):
            if name == "glm4v":
                text([FIRST])
                start = max(map(max, positions)) + 1
            moment = 0 if name == "glm4v" else pair
            positions.extend((start + moment, start + y, start + x) for y in range(tall) for x in range(wide))
            token_ids.extend([PICTURE if name == "glm4v" else VIDEO] * (tall * wide))
            if name == "glm4v":
                text([LAST, *encoded(str(int(video.indices[2 * pair] / video.fps)))])
        text([END, *after])
    ids = torch.tensor([token_ids])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
    inputs["mm_token_type_ids"] = (ids == (PICTURE if name == "glm4v" else VIDEO)).int() * 2
    model = reference_of(folder)
    if name == "glm4v":
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        return until_end(output[0, len(token_ids) :].tolist(), {EOS_ID})
    inputs["moe_mm_token_type_ids"] = torch.isin(ids, torch.tensor([VIDEO, BEGIN, END])).int() * 2
    return _greedy(model, inputs, torch.tensor(positions).T[:, None], max_tokens)


def _patches(name: str, pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Returns the vision tower's patches and their grid."""
    values = (pixels.astype(np.float32) / np.float32(255) - MEAN) / STD
    frames = torch.from_numpy(values).permute(0, 3, 1, 2)[None].contiguous()
    if name == "glm4v":
        found, time, tall, wide = processing[name].Glm4vVideoProcessor.patchify(None, frames, PATCH, 2, 2)
        return found[0], (time, tall, wide)
    _, time, channels, height, width = frames.shape
    tall, wide = height // PATCH, width // PATCH
    blocks = frames[0].reshape(time, channels, tall // 2, 2, PATCH, wide // 2, 2, PATCH)
    return blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(time * tall * wide, -1), (time, tall, wide)
