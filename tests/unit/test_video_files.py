"""Video files: sampled frames, refusals, and sizes as in transformers' processors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from pd_cluster.errors import ConfigError, RequestError
from pd_cluster.media import video_files, video_rules
from pd_cluster.media.frame_sampling import FrameSampling
from pd_cluster.media.media_fetch import listed_frames
from pd_cluster.media.video_files import frames_of, frames_of_pictures
from pd_cluster.media.video_rules import TimestampStyle, Video, VideoRules
from pd_cluster.settings.media_settings import VIDEO_IO, MediaSettings
from pd_cluster.types import Image
from tests.support.clips import avi_of_frames, data_url, file_of, qwen2, qwen3
from tests.support.pictures import file_of as picture_file
from tests.support.pictures import picture

GRAY = [np.full((48, 64, 3), 20 * at, np.uint8) for at in range(12)]
FILE = file_of(GRAY)


CONTAINERS = [("mp4", "libx264"), ("matroska", "mpeg4"), ("webm", "libvpx-vp9"), ("avi", "mjpeg")]


@pytest.mark.parametrize(("kind", "codec"), CONTAINERS)
def test_containers_and_codecs(kind: str, codec: str) -> None:
    found = frames_of(file_of(GRAY, kind, codec, fps=8), FrameSampling(5))
    assert (found.indices, found.num_frames, found.fps) == ([0, 2, 5, 8, 11], 12, 8.0)
    for each, at in zip(found.pictures, found.indices, strict=True):
        assert abs(np.asarray(each).mean() - 20 * at) < 4
    assert found.times_s[1] == 0.25
    assert found.sampled_fps == pytest.approx(8 * 5 / 12)


@pytest.mark.parametrize(("num_frames", "wanted"), [(1, 1), (2, 2), (7, 3), (100, 32), (5, 9), (33, 32)])
def test_frames_are_spread_evenly(num_frames: int, wanted: int) -> None:
    expected = np.linspace(0, num_frames - 1, min(num_frames, wanted), dtype=int).tolist()
    assert FrameSampling(wanted).indices(num_frames, 24.0) == expected


def test_frames_by_time_and_frames_as_pictures() -> None:
    assert len(FrameSampling(32, 2.0).indices(240, 24.0)) == 20
    assert len(FrameSampling(8, 2.0).indices(240, 24.0)) == 8
    assert FrameSampling(8, 0.1).indices(24, 24.0) == [0]
    assert len(FrameSampling(32).indices(240, 24.0, 4)) == 4
    files = [picture_file(picture(at), "JPEG") for at in range(5)]
    url = data_url(files[0], "jpeg")
    listed = listed_frames(",".join([url, *(data_url(each).partition(",")[2] for each in files[1:])]))
    assert listed == files
    assert listed_frames(data_url(FILE)) is None
    assert frames_of_pictures(files, FrameSampling(3)).indices == [0, 2, 4]
    for number, said in ((0, "0 frames: a video has 1 to"), (1, "no picture in JPEG"), (20_001, "20001 frames: a ")):
        with pytest.raises(RequestError, match=said):
            frames_of_pictures([b"x"] * number, FrameSampling())


def turned(data: bytes) -> bytes:
    """Returns an MP4 file whose track is marked as rotated by 90 degrees, as written by telephones."""
    at = data.index(b"tkhd") + 4 + 4 + 20 + 8 + 8
    one = (1 << 16).to_bytes(4, "big")
    minus, zero, whole = (-(1 << 16)).to_bytes(4, "big", signed=True), bytes(4), (1 << 30).to_bytes(4, "big")
    matrix = zero + one + zero + minus + zero + zero + zero + zero + whole
    return data[:at] + matrix + data[at + 36 :]


def test_a_turned_video_is_upright() -> None:
    half = np.zeros((48, 64, 3), np.uint8)
    half[:, 32:] = 255  # the right half is white; after a clockwise rotation the lower half
    (plain,) = frames_of(file_of([half]), FrameSampling()).pictures
    (found,) = frames_of(turned(file_of([half])), FrameSampling()).pictures
    assert (plain.size, found.size) == ((64, 48), (48, 64))
    assert np.asarray(found)[-1].mean() > 200 > 50 > np.asarray(found)[0].mean()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"hello", "no video in MP4"),
        (b"\0\0\0\x18ftypisom", "the file is broken or cut short"),
        (FILE[: len(FILE) // 2], "the file"),
        (picture_file(picture(1)), "no video in MP4"),
        (avi_of_frames(100_000), "100000 frames: a video has at most 20000; send a shorter one"),
        (avi_of_frames(50), "the file is cut short: it has 12 of 50 frames"),
        (file_of(GRAY, "avi", "mjpeg")[:-400], "the file is broken or cut short"),
        (file_of(GRAY, "matroska", "ffv1"), "its codec is not one of h264, "),
    ],
)
def test_files_that_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        frames_of(data, FrameSampling())


@pytest.mark.parametrize(
    ("name", "value", "data", "said"),
    [
        ("MAX_FRAME_PIXELS", 3000, FILE, "64 x 48 pixels: a frame has at most 3000"),
        ("MAX_FILE_FRAMES", 11, FILE, "12 frames: a video has at most 11"),
        ("MAX_FILE_FRAMES", 11, file_of(GRAY, "matroska"), "more than 11 frames"),  # its header has no number of frames
        ("MAX_SECONDS", 2.0, FILE, "3 s: a video has at most 2"),
        ("MAX_FPS", 3.0, FILE, "4 frames a second: a video has at most 3"),
    ],
)
def test_limits(monkeypatch: pytest.MonkeyPatch, name: str, value: float, data: bytes, said: str) -> None:
    monkeypatch.setattr(video_files, name, value)
    with pytest.raises(RequestError, match=said):
        frames_of(data, FrameSampling())


RULES = VideoRules(token_id=1, start_id=2, end_id=3, min_pixels=2 * 28**2, max_pixels=20 * 28**2)
SHARED = VideoRules(token_id=1, start_id=2, end_id=3, min_pixels=8 * 32**2, max_pixels=90 * 32**2, shares_area=True)


def test_sizes_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers a folder whose bounds would let sizes grow with the number of frames."""
    sides = (1, 27, 28, 33, 70, 133, 301, 640)
    for height, width in itertools.product(sides, sides):
        for count in (2, 5, 32):
            for rules, side, smart in ((RULES, 28, qwen2.smart_resize), (SHARED, 32, qwen3.smart_resize)):
                more: dict[str, Any] = {"num_frames": count} if rules.shares_area else {}
                bounds = {"min_pixels": rules.min_pixels, "max_pixels": rules.max_pixels}
                try:
                    expected = smart(height=height, width=width, factor=side, **bounds, **more)
                except (ValueError, ZeroDivisionError):
                    expected = (0, 0)
                if 0 in expected:
                    with pytest.raises(RequestError):
                        rules.resized(count, height, width, side)
                else:
                    assert rules.resized(count, height, width, side) == expected
    monkeypatch.setattr(video_rules, "MAX_PIXELS", 40 * 28**2)
    tall, wide = RULES.resized(8, 500, 500, 28)
    assert 8 * tall * wide <= 40 * 28**2
    assert RULES.resized(2, 500, 500, 28) == qwen2.smart_resize(500, 500, 28, 2 * 28**2, 20 * 28**2)


def test_steps_in_time() -> None:
    images = (Image(2, 2),) * 4
    found = Video(images, (b"",) * 4, (0.0,) * 4, 0.7)
    assert RULES.steps(found) == [0, 1, 2, 3]
    timed = VideoRules(token_id=1, start_id=2, end_id=3, min_pixels=1, max_pixels=1, tokens_per_second=4.0)
    assert timed.steps(found) == [0, 2, 5, 8]
    before, behind = (structs.replace(timed, stamps=each) for each in (TimestampStyle.BEFORE, TimestampStyle.BEHIND))
    assert (before.stamp(1.25), behind.stamp(1.99)) == ("<1.2 seconds>", "1")
    assert (before.time_of(1.0, 2.0), behind.time_of(1.0, 2.0)) == (1.5, 1.0)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"video": {"num_frames": 0}}', "num_frames 0: must be a number above 0"),
        ('{"video": {"colors": 1}}', "video.colors: not supported"),
        ('{"audio": {}}', "audio: unknown"),
    ],
)
def test_settings_that_are_refused(written: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        VIDEO_IO.read("media_io_kwargs", written)
    asked = MediaSettings(video_io={"num_frames": -1, "fps": 2.0})
    assert (asked.num_frames, asked.fps) == (768, 2.0)
