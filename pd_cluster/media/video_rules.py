"""A video in the form that a model reads: pictures of a few frames each, with times. Only numbers and bytes."""

from __future__ import annotations

import enum
import math
import struct

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.types import Image

MAX_ASPECT_RATIO = 200
MAX_PIXELS = 12 << 20  # maximum number of pixels of all resized frames of a video together


class Video(msgspec.Struct, frozen=True):
    """`images`: the pictures in order, each with its digest. The tower reads a picture's frames together.

    `times_s`: each picture's time in the video, as the model's stamps count it. `step_s`: the time between two
    pictures, from the sampling rate.
    """

    images: tuple[Image, ...]
    digests: tuple[bytes, ...]
    times_s: tuple[float, ...]
    step_s: float

    @property
    def num_bytes(self) -> int:
        return sum(len(image.pixels) for image in self.images)


class TimestampStyle(enum.Enum):
    """How a prompt states the time of each picture of a video."""

    NONE = "none"
    BEFORE = "before"  # before the picture: the time of the middle of its frames, in tenths of a second
    BEHIND = "behind"  # after the picture: the time of its first frame, in whole seconds


class VideoRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a model reads videos.

    With `stamps`, each picture is between `start_id` and `end_id`, next to its time in words. Otherwise pictures follow
    each other, and their positions in time differ by `tokens_per_second`, or by one if that is 0.
    """

    token_id: int  # a video's placeholder and tokens
    start_id: int
    end_id: int
    min_pixels: int  # the least area of a frame or, with `shares_area`, of all frames together
    max_pixels: int
    shares_area: bool = False
    stamps: TimestampStyle = TimestampStyle.NONE
    tokens_per_second: float = 0.0
    together: int = 2  # frames that the tower reads as one picture
    pad_id: int | None = None  # the token of a video's pictures, if it is not the placeholder
    font: str = ""  # the font file with which times are drawn into frames; "": no times are drawn

    @property
    def has_stamps(self) -> bool:
        return self.stamps is not TimestampStyle.NONE

    def resized(self, num_frames: int, height: int, width: int, side: int) -> tuple[int, int]:
        """Returns the height and width of each frame, both multiples of a token's `side`, in pixels. Raises
        RequestError.

        Computes as transformers' video processors do, except that all frames together have at most MAX_PIXELS.
        """
        if not height or not width or max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise RequestError(
                f"{width} x {height} pixels: one side is over {MAX_ASPECT_RATIO} times the other; crop it"
            )
        count, whole, most = 1, 1, min(self.max_pixels, max(side**2, MAX_PIXELS // num_frames))
        if self.shares_area:
            count, whole, most = num_frames, max(2, round(num_frames / 2) * 2), min(self.max_pixels, MAX_PIXELS)
            if height < side or width < side:
                scale = max(side / height, side / width)
                height, width = int(height * scale), int(width * scale)
        least = min(self.min_pixels, most)
        tall, wide = round(height / side) * side, round(width / side) * side
        if whole * tall * wide > most:
            factor = math.sqrt(count * height * width / most)
            tall, wide = (max(side, math.floor(each / factor / side) * side) for each in (height, width))
        elif whole * tall * wide < least:
            factor = math.sqrt(least / (count * height * width))
            tall, wide = (math.ceil(each * factor / side) * side for each in (height, width))
        if not tall or not wide:
            raise RequestError(f"{width} x {height} pixels: too narrow for this model; give at least {side} each way")
        return tall, wide

    @property
    def most_frame_pixels(self) -> int:
        """Returns a limit of a frame's area."""
        return min(self.max_pixels, MAX_PIXELS // 2)

    def steps(self, video: Video) -> list[int]:
        """Returns each picture's distance in time from the first picture, in positions."""
        if self.has_stamps:
            return [0] * len(video.images)
        interval = _single(self.tokens_per_second * video.step_s) if self.tokens_per_second else 1.0
        return [
            int(_single(at * interval)) for at in range(len(video.images))
        ]  # rounded to float32, as in transformers

    def stamp(self, time_s: float) -> str:
        return f"<{time_s:.1f} seconds>" if self.stamps is TimestampStyle.BEFORE else str(int(time_s))

    def time_of(self, first_s: float, last_s: float) -> float:
        """Returns the time in a picture's stamp, from the times of its first and last frame."""
        return first_s if self.stamps is TimestampStyle.BEHIND else (first_s + last_s) / 2


def _single(value: float) -> float:
    """Rounds to float32."""
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found
