"""Videos that callers of this process give: a file with a limit of its own, or frames. Imports no decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

DEFAULT_FPS = 24.0  # of frames that come without a rate, as in transformers


class MediaWithOptions(NamedTuple):
    """A picture or video of a prompt that says how it is read, by the names of `mm_processor_kwargs`."""

    medium: Any
    options: Mapping[str, Any]


class AskedVideo(NamedTuple):
    """`max_frames` None: as many as the server's settings say."""

    url: str
    max_frames: int | None = None


class VideoFrames(NamedTuple):
    """Frames of a video, each with its index among the `num_frames` of it, of which there are `fps` in a second."""

    pictures: list[Any]  # of Pillow
    indices: list[int]
    num_frames: int
    fps: float

    @property
    def times_s(self) -> list[float]:
        return [at / self.fps for at in self.indices]

    @property
    def sampled_fps(self) -> float:
        return len(self.indices) / self.num_frames * self.fps
