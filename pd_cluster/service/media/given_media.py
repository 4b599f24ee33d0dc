"""Makes sources, for media_preparation.py, of images and videos that a caller in this process passes with a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pd_cluster.media.processor_options import ReadOptions
from pd_cluster.media.video_inputs import AskedVideo, MediaWithOptions, VideoFrames
from pd_cluster.service.media.media_preparation import GIVEN, Source
from pd_cluster.settings.media_settings import IMAGES, VIDEOS


def given_sources(
    pictures: Sequence[Any], options: Callable[[Mapping[str, Any], str], ReadOptions]
) -> tuple[list[Source], list[Any]]:
    """Returns the sources of objects or URLs, and the objects. `options`: the result of `MediaPreparation.options`.

    Raises RequestError.
    """
    counts = dict.fromkeys((IMAGES, VIDEOS), 0)
    sources = []
    given = [each.medium if isinstance(each, MediaWithOptions) else each for each in pictures]
    for number, medium in enumerate(given):
        asked = medium if isinstance(medium, AskedVideo) else None
        kind = VIDEOS if asked is not None or isinstance(medium, VideoFrames) else IMAGES
        url = asked.url if asked is not None else medium if isinstance(medium, str) else f"{GIVEN}{number}"
        place = f"multi_modal_data.{kind}[{counts[kind]}]"
        chosen = pictures[number].options if isinstance(pictures[number], MediaWithOptions) else {}
        most = asked.max_frames if asked is not None else None
        read = options(chosen, "mm_processor_kwargs")
        sources.append(Source(place, url, kind, max_frames=most, options=read))
        counts[kind] += 1
    return sources, given
