"""Videos for tiny models: files written by PyAV, frames, and transformers' answers."""

from __future__ import annotations

import base64
import importlib
import io
import json
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from PIL import Image as Pictures

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.media.image_rules import PromptWithImages, place
from pd_cluster.media.kinds.qwen import GridRules
from pd_cluster.media.video_files import fitted
from pd_cluster.media.video_inputs import VideoFrames
from pd_cluster.types import RequestSpec, Sampling
from tests.support.checkpoints import EOS_ID, make_tokenizer, until_end
from tests.support.pictures import PATCH, make_vision, order_of, reference_of

SIDE = 2 * PATCH
SIZES = {"shortest_edge": 2 * SIDE**2, "longest_edge": 6 * SIDE**2}  # 2 to 6 tokens per frame, or for all frames
TOKENS_PER_SECOND = 4
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)
VIDEO, START, END = 301, 302, 303
PLACEHOLDER = "<|vision_start|><|video_pad|><|vision_end|>"


def _processing(name: str) -> Any:
    """Imports a module that imports torchvision for functions that are not called here."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    names += ["torchvision.transforms.functional", "torchvision.transforms.v2.functional"]
    absent: dict[str, Any] = {each: types.ModuleType(each) for each in names}
    for conversion in ("pil_to_tensor", "to_pil_image"):  # returns pictures unchanged
        setattr(absent["torchvision.transforms.functional"], conversion, lambda picture: picture)
    with mock.patch.dict(sys.modules, absent):
        return importlib.import_module(f"transformers.models.{name}.video_processing_{name}")


qwen2, qwen3 = _processing("qwen2_vl"), _processing("qwen3_vl")
Frame = np.ndarray[Any, np.dtype[np.uint8]]


def make_seer(folder: Path, name: str, **changes: Any) -> Path:
    """Writes a model that also takes videos, with size limits for them."""
    make_vision(folder, name, **changes)
    shares = name.startswith("qwen3")
    sizes = {edge: area * (4 if shares else 1) for edge, area in SIZES.items()}
    fields = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2, "size": sizes}
    add_videos(folder, PLACEHOLDER, fields)
    return folder


def add_videos(folder: Path, placeholder: str, fields: dict[str, Any]) -> None:
    """Adds support for videos to a model's folder. `fields`: the settings of their preparation."""
    (folder / "video_preprocessor_config.json").write_text(json.dumps(fields))
    template = folder / "chat_template.jinja"
    with_videos = f"{{% elif part.type == 'video' %}}{placeholder}{{% else %}}{{{{ part.text }}}}"
    template.write_text(template.read_text().replace("{% else %}{{ part.text }}", with_videos))


def clip(seed: int, num_frames: int = 5, width: int = 24, height: int = 16) -> list[Frame]:
    """Returns frames of noise, each in a different color."""
    rng = np.random.default_rng(seed)
    noise = [rng.integers(0, 256, (height, width, 3)) // 2 + rng.integers(0, 128, 3) for _ in range(num_frames)]
    return [each.astype(np.uint8) for each in noise]


def file_of(frames: list[Frame], kind: str = "mp4", codec: str = "mpeg4", fps: int = 4, **options: str) -> bytes:
    """Returns a video file; lossy compression changes the frames."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind, options=options) as opened:
        stream = opened.add_stream(codec, rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for frame in frames:
            opened.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        opened.mux(stream.encode())
    return file.getvalue()


def avi_of_frames(num_frames: int) -> bytes:
    """Returns a file whose header announces `num_frames` frames."""
    data = bytearray(file_of(clip(1, 12), "avi", "mjpeg"))
    for mark, offset in ((b"avih", 8 + 16), (b"strh", 8 + 32)):
        at = data.index(mark) + offset
        data[at : at + 4] = num_frames.to_bytes(4, "little")
    return bytes(data)


def data_url(data: bytes, kind: str = "mp4") -> str:
    return f"data:video/{kind};base64,{base64.b64encode(data).decode()}"


def frames_in(frames: list[Frame], fps: float = 4.0) -> VideoFrames:
    return VideoFrames([Pictures.fromarray(each) for each in frames], [*range(len(frames))], len(frames), fps)


class Filmed(NamedTuple):
    """A prompt with a placeholder (START, VIDEO, END) for each of its videos."""

    token_ids: list[int]
    videos: list[VideoFrames]

    def placed(self, folder: Path) -> PromptWithImages:
        vision = Checkpoint.open(str(folder)).vision
        assert vision is not None
        assert isinstance(vision.rules, GridRules)
        videos = [fitted(each, vision.rules) for each in self.videos]
        return place(self.token_ids, [], vision.rules, "prompt", videos, encoded)

    def order(self, folder: Path, sampling: Sampling) -> RequestSpec:
        return order_of(self.placed(folder), sampling)


def encoded(text: str) -> list[int]:
    found: list[int] = make_tokenizer().encode(text, add_special_tokens=False).ids
    return found


def filmed(seed: int, num_texts: list[int], videos: list[VideoFrames]) -> Filmed:
    """Makes a prompt of random texts of these lengths with the videos between them."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 256, length).tolist() for length in num_texts]
    token_ids = list(texts[0])
    for text in texts[1:]:
        token_ids += [START, VIDEO, END, *text]
    return Filmed(token_ids, videos)


def reference_answer(folder: Path, prompt: Filmed, max_tokens: int) -> list[int]:
    """Returns generate()'s tokens; prepares frames, tokens and positions as transformers' processors do.

    As in training, positions after a video continue from its largest position; transformers 5.3 and later begin
    earlier.
    """
    model_type = Checkpoint.open(str(folder)).part_of
    is_third = model_type.startswith("qwen3")
    token_ids: list[int] = []
    patches, grids, videos = [], [], iter(prompt.videos)
    positions: list[tuple[int, int, int]] = []

    def text(ids: list[int]) -> None:
        start = max(map(max, positions)) + 1 if positions else 0
        positions.extend((start + at,) * 3 for at in range(len(ids)))
        token_ids.extend(ids)

    for at, token_id in enumerate(prompt.token_ids):
        around = prompt.token_ids[at - 1 : at] == [VIDEO] or prompt.token_ids[at + 1 : at + 2] == [VIDEO]
        if token_id != VIDEO:
            if not (is_third and around and token_id in (START, END)):
                text([token_id])
            continue
        video = next(videos)
        values, (time, tall, wide) = _prepared(video, is_third)
        patches.append(values)
        grids.append((time, 2 * tall, 2 * wide))
        moments = [index / video.fps for index in video.indices]
        moments += moments[-1:] * (-len(moments) % 2)
        step = float(np.float32(TOKENS_PER_SECOND * 2 / video.sampled_fps)) if model_type == "qwen2_5_vl" else 1.0
        start = max(map(max, positions)) + 1 if positions else 0
        for moment in range(time):
            if is_third:
                text([*encoded(f"<{(moments[2 * moment] + moments[2 * moment + 1]) / 2:.1f} seconds>"), START])
                start = max(map(max, positions)) + 1
            later = 0 if is_third else int(np.float32(moment) * np.float32(step))
            positions.extend((start + later, start + y, start + x) for y in range(tall) for x in range(wide))
            token_ids.extend([VIDEO] * (tall * wide))
            if is_third:
                text([END])
    model = reference_of(folder)
    ids = torch.tensor([token_ids])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["pixel_values_videos"] = torch.cat(patches)
    inputs["video_grid_thw"] = torch.tensor(grids)
    inputs["mm_token_type_ids"] = (ids == VIDEO).int() * 2
    return _greedy(model, inputs, torch.tensor(positions).T[:, None], max_tokens)


def _greedy(model: Any, inputs: dict[str, Any], positions: torch.Tensor, max_tokens: int) -> list[int]:
    """Replaces generate()'s rule for positions, because it takes none as an argument."""
    delta = int(positions.max()) + 1 - positions.shape[-1]
    kind, found = type(model.model), (positions, torch.tensor([[delta]]))
    rule = kind.get_rope_index
    kind.get_rope_index = lambda *_, **__: found
    try:
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    finally:
        kind.get_rope_index = rule
    return until_end(output[0, positions.shape[-1] :].tolist(), {EOS_ID})


def _prepared(video: VideoFrames, is_third: bool) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Returns the vision tower's patches and the grid in merged patches."""
    first, count = video.pictures[0], len(video.pictures)
    bounds = {"factor": SIDE, "min_pixels": SIZES["shortest_edge"], "max_pixels": SIZES["longest_edge"]}
    if is_third:
        bounds |= {"min_pixels": 4 * SIZES["shortest_edge"], "max_pixels": 4 * SIZES["longest_edge"]}
        height, width = qwen3.smart_resize(max(2, count), first.height, first.width, **bounds)
    else:
        height, width = qwen2.smart_resize(first.height, first.width, **bounds)
    resized = [np.asarray(each.resize((width, height), Pictures.Resampling.BICUBIC)) for each in video.pictures]
    values = (np.stack(resized).astype(np.float32) / np.float32(255) - MEAN) / STD
    frames = torch.from_numpy(values).permute(0, 3, 1, 2)[None].contiguous()
    found, time, tall, wide = qwen2.Qwen2VLVideoProcessor.patchify(None, frames, PATCH, 2, 2)
    return found[0], (time, tall // 2, wide // 2)
