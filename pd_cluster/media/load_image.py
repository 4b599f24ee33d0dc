"""LMDeploy's `load_image` for users' programs: loads a picture from any source.

A picture that cannot be read raises an error; it is never replaced by another one.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from PIL import Image as Pictures

from pd_cluster.errors import RequestError
from pd_cluster.media.image_files import FORMATS, MAX_PIXELS, decode, with_field_names
from pd_cluster.media.media_download import ANY_HOST, Downloads, downloaded
from pd_cluster.media.media_fetch import MAX_FILE_NBYTES, Places, fetched


def load_image(image_url: str | os.PathLike[str] | Pictures.Image, **_: Any) -> Pictures.Image:
    """Returns a picture, given by URL (http, https, data), by path or directly. Raises RequestError.

    Connects only to public addresses, so that programs may pass on clients' URLs.
    """
    if isinstance(image_url, Pictures.Image):
        return image_url
    data = _bytes_of(os.fspath(image_url))
    with with_field_names():
        picture = Pictures.open(io.BytesIO(data), formats=FORMATS)
        if picture.width * picture.height > MAX_PIXELS:
            raise RequestError(f"a picture has at most {MAX_PIXELS} pixels; give a smaller one")
        decode(picture)
        return picture


def _bytes_of(place: str) -> bytes:
    scheme = place[:10].partition(":")[0].lower()
    if scheme in ("http", "https"):
        return downloaded(place, Downloads((ANY_HOST,), (), MAX_FILE_NBYTES))
    if scheme == "data":
        return fetched(place, Places())
    try:
        with Path(place.removeprefix("file://")).open("rb") as file:
            data = file.read(MAX_FILE_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise RequestError(f"{place[:200]}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if len(data) > MAX_FILE_NBYTES:
        raise RequestError(f"{place[:200]}: a picture's file has at most {MAX_FILE_NBYTES} bytes; give a smaller one")
    return data
