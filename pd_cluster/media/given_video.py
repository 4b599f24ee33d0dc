"""Videos that callers of this process give: a file with a limit of its own, or frames. Imports no decoder."""

from __future__ import annotations

from typing import Any, NamedTuple

DEFAULT_FPS = 24.0  # of frames that come without a rate, as in transformers


class AskedVideo(NamedTuple):
    """`max_frames` None: as many as the server's settings say."""

    url: str
    max_frames: int | None = None


class Frames(NamedTuple):
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
