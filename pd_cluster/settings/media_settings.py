"""Settings of images and videos in prompts: their allowed sources, their number and their memory."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

import msgspec

from pd_cluster.errors import ConfigError, RequestError, called
from pd_cluster.media.processor_options import ReadOptions
from pd_cluster.settings.setting import OBJECT, TEXTS, Form, Panel, Scope, Setting, at_least

MEDIA = partial(Setting, panel=Panel.REQUESTS, scope=Scope.TEXT)
IMAGES, VIDEOS = "image", "video"
DEFAULTS = {IMAGES: 16, VIDEOS: 4}
OTHERS = ("audio",)
DEFAULT_FRAMES = 32
MAX_FRAMES = 768


def _limits(name: str, written: str) -> dict[str, int]:
    """Reads `image=N`, or a JSON object. Raises ConfigError."""
    if not written.lstrip().startswith("{"):
        pairs = [each.partition("=") for each in written.split(",") if each.strip()]
        given: dict[str, Any] = {kind.strip(): int(n) if n.strip().isdecimal() else n for kind, _, n in pairs}
    else:
        given = OBJECT.read(name, written)
    for kind, number in given.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ConfigError(f"{called(name)}: {kind} {number!r}: must be a whole number, as in image=4")
        if kind not in (*DEFAULTS, *OTHERS):
            raise ConfigError(f"{called(name)}: {kind}: unknown; give image=N or video=N")
        if kind in OTHERS and number:
            raise ConfigError(
                f"{called(name)}: {kind} {number}: only images and videos are supported; give 0 or leave it out"
            )
    return given


def _video_io(name: str, written: str) -> dict[str, float]:
    """Reads `{"video": {"num_frames": N, "fps": F}}`. Raises ConfigError."""
    given = OBJECT.read(name, written) if written else {}
    for kind, options in given.items():
        if kind not in DEFAULTS or not isinstance(options, dict):
            raise ConfigError(f'{called(name)}: {kind}: unknown; give {{"video": {{"num_frames": {DEFAULT_FRAMES}}}}}')
        for option, value in options.items():
            if (kind, option) not in ((VIDEOS, "num_frames"), (VIDEOS, "fps")):
                raise ConfigError(
                    f"{called(name)}: {kind}.{option}: not supported; known are num_frames and fps of video"
                )
            is_number = isinstance(value, int | float if option == "fps" else int) and not isinstance(value, bool)
            if not is_number or not (value == -1 or 0 < value <= MAX_FRAMES):
                raise ConfigError(
                    f"{called(name)}: video.{option} {value!r}: must be a number above 0 and at most {MAX_FRAMES}, or "
                    f"-1 for no limit"
                )
    found: dict[str, float] = given.get(VIDEOS, {})
    return found


def _processor(name: str, written: str) -> dict[str, Any]:
    """Reads options for decoding media. Raises ConfigError."""
    given = OBJECT.read(name, written) if written else {}
    try:
        ReadOptions.of(given, called(name))
    except RequestError as error:
        raise ConfigError(str(error)) from None
    return dict(given)


LIMITS = Form(str, _limits, lambda value: json.dumps(value) if value else "", takes_mappings=True)
VIDEO_IO = Form(str, _video_io, lambda value: json.dumps({VIDEOS: value}) if value else "", takes_mappings=True)


PROCESSOR = Form(str, _processor, lambda value: json.dumps(value) if value else "", takes_mappings=True)


class MediaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of images and videos. `limits`: kind -> maximum per prompt; other kinds have the limits of
    DEFAULTS.
    """

    limits: Annotated[
        dict[str, int],
        MEDIA(
            f"Maximum number of images and videos in a prompt: image=N,video=N or JSON; default: {DEFAULTS[IMAGES]} "
            f"and {DEFAULTS[VIDEOS]}.",
            name="limit_mm_per_prompt",
            default="",
            form=LIMITS,
        ),
    ] = {}

    local_root: Annotated[
        str,
        MEDIA(
            "Folder of files that clients may name by file:// URLs, as images and videos; default: none.",
            name="allowed_local_media_path",
        ),
    ] = ""
    domains: Annotated[
        tuple[str, ...],
        MEDIA(
            "Hosts that clients may name in http(s) URLs of images and videos; *: all public hosts; default: none.",
            name="allowed_media_domains",
            metavar="HOST",
            form=TEXTS,
            is_several=True,
        ),
    ] = ()

    video_io: Annotated[
        dict[str, float],
        MEDIA(
            f'Maximum number of frames read from a video, in all and per second: {{"video": {{"num_frames": N, "fps": '
            f"F}}}}; default: {DEFAULT_FRAMES}, and no limit per second.",
            name="media_io_kwargs",
            default="",
            form=VIDEO_IO,
        ),
    ] = {}

    processor: Annotated[
        dict[str, Any],
        MEDIA(
            "Defaults for decoding images and videos: JSON with min_pixels, max_pixels, fps, num_frames.",
            name="mm_processor_kwargs",
            default="",
            form=PROCESSOR,
        ),
    ] = {}

    cache_gb: Annotated[
        float,
        MEDIA(
            "GiB of decoded images and videos that each API process caches. 0: none.",
            name="mm_processor_cache_gb",
            checks=(at_least(0),),
        ),
    ] = 0.5

    memory_gb: Annotated[
        float,
        MEDIA(
            "GiB of unanswered requests' images that each API process holds for replays; beyond it, images go to "
            "--media-spill-path, or the request gets a 503.",
            name="media_memory_gb",
            checks=(at_least(0),),
        ),
    ] = 2.0
    spill_path: Annotated[
        str,
        MEDIA(
            "Folder for images beyond --media-memory-gb, in unnamed files of mode 0600; default: none.",
            name="media_spill_path",
        ),
    ] = ""
    spill_gb: Annotated[
        float,
        MEDIA("Maximum size of the files of --media-spill-path, in GiB.", name="media_spill_gb", checks=(at_least(0),)),
    ] = 8.0

    def most(self, kind: str) -> int:
        """Returns the maximum number of items of a kind in a prompt."""
        return self.limits.get(kind, DEFAULTS[kind])

    @property
    def num_frames(self) -> int:
        """Returns the maximum number of frames that are read from a video."""
        given = int(self.video_io.get("num_frames", DEFAULT_FRAMES))
        return MAX_FRAMES if given == -1 else given

    @property
    def fps(self) -> float:
        """Returns the maximum number of frames that are read per second; 0: all."""
        return max(0.0, self.video_io.get("fps", 0.0))
