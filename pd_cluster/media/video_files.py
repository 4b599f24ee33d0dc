"""Decodes a video's file, chooses frames and resizes them. Needs PyAV; knows nothing of where files come from.

Each RequestError has a text of its own. The number of frames in the header is checked; frames after the last chosen one
are not decoded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image as Pictures
from PIL import ImageDraw, ImageFont

from pd_cluster.errors import RequestError
from pd_cluster.media.frame_sampling import FrameSampling
from pd_cluster.media.image_files import FORMATS, MAX_PIXELS, digest_of, in_color, with_field_names
from pd_cluster.media.kinds.qwen import GridRules
from pd_cluster.media.video_inputs import DEFAULT_FPS, VideoFrames
from pd_cluster.media.video_rules import Video
from pd_cluster.types import Image

MAX_FILE_FRAMES = 20_000
MAX_SECONDS = 3600.0
MAX_FRAME_PIXELS = 36 << 20  # maximum number of pixels of a frame before it is resized: 8192 x 4608
MAX_FPS = 1000.0
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg")
# First bytes of files and their offset -> FFmpeg's name of the container
CONTAINERS = {(4, b"ftyp"): "mov", (0, b"\x1a\x45\xdf\xa3"): "matroska", (8, b"AVI "): "avi"}
JPEG_FRAMES = b"\xff\xd8\xff"  # the first bytes of each frame in `data:video/jpeg`
MISSING = "reading videos needs PyAV on the server: pip install 'pd-cluster[video]'"


def frames_of(data: bytes, sampling: FrameSampling, most: int | None = None) -> VideoFrames:
    """Returns the chosen frames of a file. Raises RequestError."""
    container = next((name for (at, head), name in CONTAINERS.items() if data[at : at + len(head)] == head), None)
    if container is None:
        raise RequestError("no video in MP4, WebM, Matroska or AVI; send one")
    try:
        import av
    except ImportError:
        raise RequestError(MISSING) from None
    with _in_own_words(av):
        num_frames, fps = _measured(av, data, container)
        indices = sampling.indices(num_frames, fps, most)
        pictures = list(_decoded(av, data, container, indices))
    if len(pictures) < len(indices):
        raise RequestError("the file is broken or cut short; send it anew")
    return VideoFrames(pictures, indices, num_frames, fps)


def frames_of_pictures(files: Sequence[bytes], sampling: FrameSampling, most: int | None = None) -> VideoFrames:
    """Returns the chosen frames of a video of JPEG files. Raises RequestError."""
    if not 1 <= len(files) <= MAX_FILE_FRAMES:
        raise RequestError(f"{len(files)} frames: a video has 1 to {MAX_FILE_FRAMES}; send fewer")
    indices = sampling.indices(len(files), DEFAULT_FPS, most)
    pictures = []
    for at in indices:
        with with_field_names():
            picture = Pictures.open(io.BytesIO(files[at]), formats=FORMATS)
            if picture.width * picture.height > MAX_PIXELS:
                raise RequestError(f"a frame has at most {MAX_PIXELS} pixels; send a smaller one")
            pictures.append(picture.convert("RGB"))
    return VideoFrames(pictures, indices, len(files), DEFAULT_FPS)


def _opened(av: Any, data: bytes, container: str) -> Any:
    return av.open(io.BytesIO(data), mode="r", format=container)


def _stream(opened: Any) -> Any:
    """Returns a file's video. Raises RequestError for unsupported ones."""
    if not opened.streams.video:
        raise RequestError("the file has no video in it; send another one")
    stream = opened.streams.video[0]
    if stream.codec_context.codec.canonical_name not in CODECS:
        raise RequestError(f"its codec is not one of {', '.join(CODECS)}; convert it")
    _check_size(stream.codec_context.width, stream.codec_context.height)
    stream.codec_context.thread_count = 1
    return stream


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_FRAME_PIXELS:
        raise RequestError(f"{width} x {height} pixels: a frame has at most {MAX_FRAME_PIXELS}; send a smaller one")


def _measured(av: Any, data: bytes, container: str) -> tuple[int, float]:
    """Returns the number of frames, without decoding, and the frame rate. Raises RequestError."""
    with _opened(av, data, container) as opened:
        stream = _stream(opened)
        announced, rate = stream.frames, stream.average_rate or stream.guessed_rate
        if announced > MAX_FILE_FRAMES:
            raise RequestError(f"{announced} frames: a video has at most {MAX_FILE_FRAMES}; send a shorter one")
        found = 0
        for packet in opened.demux(stream):
            if packet.is_corrupt:
                raise RequestError("the file is broken or cut short; send it anew")
            found += packet.size > 0
            if found > MAX_FILE_FRAMES:
                raise RequestError(f"more than {MAX_FILE_FRAMES} frames; send a shorter video")
    if not found or found < announced:
        raise RequestError(f"the file is cut short: it has {found} of {announced} frames; send it anew")
    fps = float(rate) if rate else DEFAULT_FPS
    if not 0 < fps <= MAX_FPS:
        raise RequestError(f"{fps:g} frames a second: a video has at most {MAX_FPS:g}; convert it")
    if found / fps > MAX_SECONDS:
        raise RequestError(f"{found / fps:.0f} s: a video has at most {MAX_SECONDS:g}; send a shorter one")
    return found, fps


def _decoded(av: Any, data: bytes, container: str, indices: Sequence[int]) -> Iterator[Pictures.Image]:
    """Yields the frames of these ascending indices."""
    wanted = iter(indices)
    next_index = next(wanted)
    with _opened(av, data, container) as opened:
        for at, frame in enumerate(opened.decode(_stream(opened))):
            if at < next_index:
                continue
            if frame.is_corrupt:
                raise RequestError("the file is broken or cut short; send it anew")
            _check_size(frame.width, frame.height)
            picture = frame.to_image()
            if turn := round(frame.rotation / 90) % 4:
                picture = picture.transpose(Pictures.Transpose(Pictures.Transpose.ROTATE_90 + turn - 1))
            while at == next_index:
                yield picture
                if (following := next(wanted, None)) is None:
                    return
                next_index = following


@contextmanager
def _in_own_words(av: Any) -> Iterator[None]:
    """Replaces a decoder's errors by RequestErrors without its messages."""
    try:
        yield
    except RequestError:
        raise
    except MemoryError:
        raise RequestError("decoding it takes too much memory; send a smaller one") from None
    except Exception:  # FFmpeg raises many kinds of errors
        raise RequestError("the file is broken or cut short; send it anew") from None


def fitted(frames: VideoFrames, rules: GridRules) -> Video:
    """Returns a video in the model's form; repeats the last frame to fill the last picture. Raises RequestError."""
    assert rules.video is not None
    together, first = rules.video.together, frames.pictures[0]
    height, width = rules.video.resized(max(together, len(frames.pictures)), first.height, first.width, rules.side)
    with with_field_names():
        pixels = [
            _pixels(each, height, width, rules.video.font, time_s)
            for each, time_s in zip(frames.pictures, frames.times_s, strict=True)
        ]
    times = frames.times_s
    missing = -len(pixels) % together
    pixels += pixels[-1:] * missing
    times += times[-1:] * missing
    images, said = [], []
    for at in range(0, len(pixels), together):
        grid = (height // rules.patch_size, width // rules.patch_size)
        images.append(Image(*grid, b"".join(pixels[at : at + together]), together))
        said.append(rules.video.time_of(times[at], times[at + together - 1]))
    digests = tuple(map(digest_of, images))
    return Video(tuple(images), digests, tuple(said), together / frames.sampled_fps)


def _pixels(picture: Pictures.Image, height: int, width: int, font: str, time_s: float) -> bytes:
    picture = in_color(picture)
    if font:
        picture = _stamped(picture, font, time_s)
    if picture.size != (width, height):
        picture = picture.resize((width, height), Pictures.Resampling.BICUBIC)
    return picture.tobytes()


def _stamped(picture: Pictures.Image, font: str, time_s: float) -> Pictures.Image:
    """Returns a copy with its time in the corner, in black with a white outline, as ERNIE's processor draws it."""
    size = max(1, int(min(picture.size) * 0.1))
    (hours, seconds), picture = divmod(time_s, 3600), picture.copy()
    text = f"time: {int(hours):02d}:{int(seconds // 60):02d}:{seconds % 60:05.02f}"
    ImageDraw.Draw(picture).text(
        (0, 0), text, font=_font(font, size), fill=(0, 0, 0), stroke_width=int(size * 0.1), stroke_fill=(255, 255, 255)
    )
    return picture


@cache
def _font(file: str, size: int) -> ImageFont.FreeTypeFont:
    try:
        return ImageFont.truetype(file, size)
    except OSError:
        raise RequestError(f"times cannot be drawn: {Path(file).name} of the model's folder is not a font") from None
