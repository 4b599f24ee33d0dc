"""Where pictures and videos of prompts may come from, and how many a prompt has."""

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
            raise ConfigError(f"{called(name)}: {kind}: not known; give image=N or video=N")
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
            raise ConfigError(
                f'{called(name)}: {kind}: not known; give {{"video": {{"num_frames": {DEFAULT_FRAMES}}}}}'
            )
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
    """Reads options of how media are read. Raises ConfigError."""
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
    """`limits`: the most items of a prompt by their kind; those of DEFAULTS where it does not say."""

    limits: Annotated[
        dict[str, int],
        MEDIA(
            f"Most images and videos of a prompt: image=N,video=N or JSON; default: {DEFAULTS[IMAGES]} and "
            f"{DEFAULTS[VIDEOS]}.",
            name="limit_mm_per_prompt",
            default="",
            form=LIMITS,
        ),
    ] = {}

    local_root: Annotated[
        str,
        MEDIA(
            "Folder for file:// URLs of images and videos, readable by all clients; default: none.",
            name="allowed_local_media_path",
        ),
    ] = ""
    domains: Annotated[
        tuple[str, ...],
        MEDIA(
            "Hosts for http(s) URLs of images and videos, or * for all public ones; default: none.",
            name="allowed_media_domains",
            metavar="HOST",
            form=TEXTS,
            is_several=True,
        ),
    ] = ()

    video_io: Annotated[
        dict[str, float],
        MEDIA(
            f'Most frames of a video, and of its seconds: {{"video": {{"num_frames": N, "fps": F}}}}; default: '
            f"{DEFAULT_FRAMES}, any.",
            name="media_io_kwargs",
            default="",
            form=VIDEO_IO,
        ),
    ] = {}

    processor: Annotated[
        dict[str, Any],
        MEDIA(
            "Defaults for reading images and videos: JSON with min_pixels, max_pixels, fps, num_frames.",
            name="mm_processor_kwargs",
            default="",
            form=PROCESSOR,
        ),
    ] = {}

    cache_gb: Annotated[
        float,
        MEDIA(
            "GiB of decoded images and videos that each API process keeps. 0: none.",
            name="mm_processor_cache_gb",
            checks=(at_least(0),),
        ),
    ] = 0.5

    memory_gb: Annotated[
        float,
        MEDIA(
            "GiB of unanswered requests' images that each API process holds for replays; more go to "
            "--media-spill-path, or get a 503.",
            name="media_memory_gb",
            checks=(at_least(0),),
        ),
    ] = 2.0
    spill_path: Annotated[
        str,
        MEDIA(
            "Folder for files (mode 0600, unnamed) beyond --media-memory-gb; default: none.",
            name="media_spill_path",
        ),
    ] = ""
    spill_gb: Annotated[
        float,
        MEDIA("Most GiB in these files.", name="media_spill_gb", checks=(at_least(0),)),
    ] = 8.0

    def most(self, kind: str) -> int:
        """Returns how many items of a kind a prompt may have."""
        return self.limits.get(kind, DEFAULTS[kind])

    @property
    def num_frames(self) -> int:
        """Returns the most frames that are read of a video."""
        given = int(self.video_io.get("num_frames", DEFAULT_FRAMES))
        return MAX_FRAMES if given == -1 else given

    @property
    def fps(self) -> float:
        """Returns the most frames of a second that are read; 0: as many as there are."""
        return max(0.0, self.video_io.get("fps", 0.0))
