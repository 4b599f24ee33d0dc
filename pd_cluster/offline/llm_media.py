"""Reads the images and videos that callers pass as objects. A RequestError names the refused object."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pd_cluster.errors import RequestError
from pd_cluster.media.media_fetch import VIDEO
from pd_cluster.media.video_inputs import DEFAULT_FPS, AskedVideo, VideoFrames
from pd_cluster.settings.media_settings import MAX_FRAMES

FORMS = (
    'must be bytes of a file, {"video": bytes, "max_frames": N}, frames as an array [frames, height, width, 3] of '
    "uint8 or a list of pictures, or (frames, metadata)"
)
IGNORED = ("duration", "video_backend", "do_sample_frames", "width", "height")  # fields of metadata without effect


def check_picture(item: object, place: str) -> None:
    """Raises RequestError unless the object is a Pillow image."""
    if not all(hasattr(item, name) for name in ("size", "mode", "convert", "getexif")):
        param = place.partition("[")[0].partition(".")[0]
        raise RequestError(f"{place}: {type(item).__name__}; must be a PIL.Image.Image", param=param)


def videos_of(given: Any, place: str) -> list[AskedVideo | VideoFrames]:
    """Returns one video or several. A list of frames is one video. Raises RequestError."""
    if isinstance(given, list) and not (given and _is_frame(given[0])):
        return [_video(each, f"{place}[{at}]") for at, each in enumerate(given)]
    return [_video(given, f"{place}[0]")]


def _video(given: Any, place: str) -> AskedVideo | VideoFrames:
    if isinstance(given, bytes | bytearray | memoryview):
        return AskedVideo(_url_of(bytes(given), place))
    if isinstance(given, Mapping):
        return _from_mapping(given, place)
    if isinstance(given, tuple):
        if len(given) != 2 or not isinstance(given[1], Mapping):
            raise _wrong(place, f"{type(given).__name__}; {FORMS}")
        return _frames(given[0], given[1], place)
    return _frames(given, {}, place)


def _from_mapping(given: Mapping[str, Any], place: str) -> AskedVideo:
    """Reads a video in FastDeploy's form."""
    for name in given:
        if name not in ("video", "max_frames"):
            raise _wrong(place, f"{name!r}: not known; known are video and max_frames")
    most, data = given.get("max_frames"), given.get("video")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MAX_FRAMES):
        raise _wrong(place, f"max_frames {most!r}: must be a whole number from 1 to {MAX_FRAMES}")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise _wrong(place, f"video: {type(data).__name__}; must be the bytes of a file")
    return AskedVideo(_url_of(bytes(data), place), most)


def _url_of(data: bytes, place: str) -> str:
    if len(data) > VIDEO.max_nbytes:
        raise _wrong(place, f"{len(data)} bytes: a video's file has at most {VIDEO.max_nbytes}; give a smaller one")
    return f"data:video/any;base64,{base64.b64encode(data).decode()}"


def _is_frame(given: Any) -> bool:
    return hasattr(given, "getexif") or getattr(given, "ndim", 0) == 3


def _frames(given: Any, metadata: Mapping[str, Any], place: str) -> VideoFrames:
    is_array = getattr(given, "ndim", 0) == 4
    if not is_array and not (isinstance(given, Sequence) and len(given) and all(map(_is_frame, given))):
        raise _wrong(place, f"{type(given).__name__}; {FORMS}")
    if not 1 <= len(given) <= MAX_FRAMES:
        raise _wrong(place, f"{len(given)} frames: at most {MAX_FRAMES} are read; give fewer")
    for name in metadata:
        if name not in ("fps", "frames_indices", "total_num_frames", *IGNORED):
            raise _wrong(place, f"metadata.{name}: not known; known are fps, frames_indices and total_num_frames")
    pictures = [_picture(each, place) for each in given]
    if len({each.size for each in pictures}) > 1:
        raise _wrong(place, "its frames differ in size; give frames of one size")
    fps = metadata.get("fps")
    fps = DEFAULT_FPS if fps is None else fps
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not math.isfinite(fps) or fps <= 0:
        raise _wrong(place, f"metadata.fps {fps!r}: must be a number above 0")
    given_indices = metadata.get("frames_indices")
    indices = [*range(len(pictures))] if given_indices is None else [int(each) for each in given_indices]
    total = metadata.get("total_num_frames")
    total = max(indices, default=0) + 1 if total is None else int(total)
    if len(indices) != len(pictures) or sorted(indices) != indices or not 0 <= indices[0] <= indices[-1] < total:
        raise _wrong(place, f"metadata.frames_indices: must ascend, one for each frame, below total_num_frames {total}")
    return VideoFrames(pictures, indices, total, float(fps))


def _picture(given: Any, place: str) -> Any:
    if hasattr(given, "getexif"):
        return given
    if str(given.dtype) != "uint8" or given.ndim != 3 or given.shape[-1] != 3:
        raise _wrong(place, f"frames of {given.dtype}, {tuple(given.shape)}: must be uint8, [height, width, 3]")
    from pd_cluster.media.image_files import of_array

    return of_array(given)


def _wrong(place: str, why: str) -> RequestError:
    return RequestError(f"{place}: {why}", param=place.partition("[")[0].partition(".")[0])
