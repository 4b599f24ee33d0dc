"""Where pictures of prompts may come from, and how many a prompt has."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.setting import OBJECT, TEXTS, Form, Panel, Scope, Setting

MEDIA = partial(Setting, panel=Panel.REQUESTS, scope=Scope.TEXT)
IMAGES = "image"
OTHERS = ("video", "audio")
DEFAULT_IMAGES = 16


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
        if kind not in (IMAGES, *OTHERS):
            raise ConfigError(f"{called(name)}: {kind}: not known; give image=N")
        if kind in OTHERS and number:
            raise ConfigError(f"{called(name)}: {kind} {number}: only images are supported; give 0 or leave it out")
    return given


LIMITS = Form(str, _limits, lambda value: json.dumps(value) if value else "", takes_mappings=True)


class MediaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`limits`: the most items of a prompt by their kind; DEFAULT_IMAGES where it does not say."""

    limits: Annotated[
        dict[str, int],
        MEDIA(
            f"Most images of a prompt, as image=N or a JSON object; default: {DEFAULT_IMAGES}. Videos and audio: 0.",
            name="limit_mm_per_prompt",
            default="",
            form=LIMITS,
        ),
    ] = {}

    local_root: Annotated[
        str,
        MEDIA(
            "Folder of which file:// URLs of images may name files; by default none. Anybody who sends requests can "
            "learn what its images show.",
            name="allowed_local_media_path",
        ),
    ] = ""
    domains: Annotated[
        tuple[str, ...],
        MEDIA(
            "Hosts from which http(s) URLs of images are fetched; by default none.",
            name="allowed_media_domains",
            metavar="HOST",
            form=TEXTS,
            is_several=True,
        ),
    ] = ()

    @property
    def most_images(self) -> int:
        return self.limits.get(IMAGES, DEFAULT_IMAGES)
