"""Reads `mm_processor_kwargs`, a request's options for its media, by vLLM's and FastDeploy's names.

The model's folder limits them. Pure arithmetic; knows nothing of files or pixels.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import structs

from pd_cluster.errors import RequestError
from pd_cluster.media.frame_sampling import FrameSampling
from pd_cluster.media.image_rules import ImageRules
from pd_cluster.media.kinds.qwen import GridRules

MOST_FRAMES = 768
MOST_FPS = 1000.0
MOST_PIXELS = 2**31  # the largest area that is read, more than any folder allows
# A request's names -> fields of ReadOptions
KEYS: Mapping[str, tuple[str, ...]] = {
    "min_pixels": ("min_pixels", "video_min_pixels"),
    "max_pixels": ("max_pixels", "video_max_pixels"),
    "image_min_pixels": ("min_pixels",),
    "image_max_pixels": ("max_pixels",),
    "video_min_pixels": ("video_min_pixels",),
    "video_max_pixels": ("video_max_pixels",),
    "fps": ("fps",),
    "video_fps": ("fps",),
    "num_frames": ("num_frames",),
    "video_max_frames": ("num_frames",),
}
EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}  # names in `size` -> the fields that they set


class ReadOptions(msgspec.Struct, frozen=True):
    """A request's options for its media. None: the folder's or the server's setting applies."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], name: str) -> ReadOptions:
        """Reads the options. `name`: the field in errors. Raises RequestError."""
        fields: dict[str, Any] = {}
        for key, value in _without_size(given, name).items():
            if key not in KEYS:
                near = difflib.get_close_matches(str(key), [*KEYS, "size"], n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are size, {', '.join(KEYS)}"
                raise _wrong(name, f"{reprlib.repr(str(key))[1:-1]}: not known; {hint}")
            _check(name, key, value)
            for field in KEYS[key]:
                if fields.setdefault(field, value) != value:
                    raise _wrong(name, f"{key} {value!r}: {fields[field]!r} is given by another name; give one of them")
        return cls(**fields)

    def over(self, others: ReadOptions) -> ReadOptions:
        """Returns these options, with `others` in place of those that are None."""
        own = {name: value for name, value in structs.asdict(self).items() if value is not None}
        return structs.replace(others, **own)

    def rules(self, rules: ImageRules, name: str) -> ImageRules:
        """Returns a model's rules with these options as limits. Raises RequestError for unsupported options."""
        areas = (self.min_pixels, self.max_pixels, self.video_min_pixels, self.video_max_pixels)
        if not any(each is not None for each in areas):
            return rules
        if not isinstance(rules, GridRules):
            raise _wrong(
                name, "min_pixels and max_pixels: this model does not limit a picture's area; leave the two out"
            )
        video = rules.video
        if video is not None:
            least, most = _area(name, self.video_min_pixels, self.video_max_pixels, video.min_pixels, video.max_pixels)
            video = structs.replace(video, min_pixels=least, max_pixels=most)
        least, most = _area(name, self.min_pixels, self.max_pixels, rules.min_pixels, rules.max_pixels)
        return structs.replace(rules, min_pixels=least, max_pixels=most, video=video)

    def sampling(self, sampling: FrameSampling) -> FrameSampling:
        return structs.replace(
            sampling,
            num_frames=sampling.num_frames if self.num_frames is None else self.num_frames,
            fps=sampling.fps if self.fps is None else self.fps,
        )


def _without_size(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Replaces `size` by the areas that it means."""
    found = dict(given)
    if "size" not in found:
        return found
    size = found.pop("size")
    if not isinstance(size, Mapping) or not set(size) <= set(EDGES):
        raise _wrong(name, f"size {reprlib.repr(size)}: must be an object with {' and '.join(EDGES)}, areas in pixels")
    for edge, value in size.items():
        if found.setdefault(EDGES[edge], value) != value:
            raise _wrong(name, f"size.{edge} {value!r}: {EDGES[edge]} says {found[EDGES[edge]]!r}; give one of them")
    return found


def _check(name: str, key: str, value: Any) -> None:
    is_rate = key.endswith("fps")
    most = MOST_FPS if is_rate else MOST_FRAMES if key.endswith("frames") else MOST_PIXELS
    is_number = isinstance(value, int | float if is_rate else int) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most:
        kind = "number above 0" if is_rate else "whole number of at least 1"
        limit = f", and at most {most:.10g}"
        raise _wrong(name, f"{key} {reprlib.repr(value)}: must be a {kind}{limit}")


def _area(name: str, least: int | None, most: int | None, folders_least: int, folders_most: int) -> tuple[int, int]:
    """Returns a lower and an upper limit. Raises RequestError."""
    for key, value in (("min_pixels", least), ("max_pixels", most)):
        if value is not None and value > folders_most:
            raise _wrong(name, f"{key} {value}: this model's folder has max_pixels {folders_most}; give at most that")
    found = folders_least if least is None else least, folders_most if most is None else most
    if found[0] > found[1]:
        raise _wrong(name, f"max_pixels {found[1]}: less than min_pixels {found[0]}; give both")
    return found


def _wrong(name: str, why: str) -> RequestError:
    return RequestError(f"{name}: {why}", param=name.rpartition(".")[2])
