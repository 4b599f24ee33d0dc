"""Videos that callers in this process give: a file with a limit of frames, or frames. Imports no decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

DEFAULT_FPS = 24.0  # the rate of frames that are given without one, as in transformers


class MediaWithOptions(NamedTuple):
    """A picture or video of a prompt, with options under the names of `mm_processor_kwargs`."""

    medium: Any
    options: Mapping[str, Any]


class AskedVideo(NamedTuple):
    """`max_frames` None: the server's setting."""

    url: str
    max_frames: int | None = None


class VideoFrames(NamedTuple):
    """Frames of a video, with their indices among its `num_frames` frames at `fps` per second."""

    pictures: list[Any]  # Pillow images
    indices: list[int]
    num_frames: int
    fps: float

    @property
    def times_s(self) -> list[float]:
        return [at / self.fps for at in self.indices]

    @property
    def sampled_fps(self) -> float:
        return len(self.indices) / self.num_frames * self.fps
