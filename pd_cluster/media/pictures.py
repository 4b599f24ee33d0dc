"""Decodes a file of a picture, turns it upright and resizes it. Needs Pillow; knows nothing of where files are from.

Every refusal is a RequestError in words of its own: a decoder's messages may show memory, and are never passed on.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import structs
from PIL import Image as Pictures
from PIL import ImageOps, UnidentifiedImageError

from pd_cluster.errors import RequestError
from pd_cluster.media.rules import ImageRules, View
from pd_cluster.types import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64 << 20  # of a file, before it is resized
HAVE_ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")
WIDE = ("I", "I;16", "I;16L", "I;16B", "F")  # gray with more than 8 bits


def prepared(data: bytes, rules: ImageRules) -> tuple[Image, bytes]:
    """Returns the picture in a file and its digest. Raises RequestError."""
    with in_own_words():
        picture = Pictures.open(io.BytesIO(data), formats=FORMATS)
        check_size(picture, rules)
        picture.load()
        return fitted(picture, rules)


def of_array(pixels: Any) -> Pictures.Image:
    """Returns a picture of [height, width, 3] 8-bit numbers."""
    return Pictures.fromarray(pixels)


def check_size(picture: Pictures.Image, rules: ImageRules) -> None:
    """Checks what a file's header says, before anything is decoded. Raises RequestError."""
    width, height = picture.size
    if not width or not height:
        raise RequestError("it has no pixels; send another one")
    if width * height > MAX_PIXELS:
        raise RequestError(f"{width} x {height} pixels: a picture has at most {MAX_PIXELS}; send a smaller one")
    rules.sized(height, width)


def fitted(picture: Pictures.Image, rules: ImageRules) -> tuple[Image, bytes]:
    """Returns a decoded picture as its model reads it, and its digest. Raises RequestError.

    It is turned as its EXIF says, put on white where it is transparent, and resized. Further frames are ignored.
    """
    check_size(picture, rules)
    with in_own_words():
        upright = in_color(ImageOps.exif_transpose(picture))
        image, views = rules.sized(upright.height, upright.width)
        image = structs.replace(image, pixels=b"".join(_pixels(upright, view, rules.resample) for view in views))
    assert len(image.pixels) == rules.num_bytes(image)
    return image, digest_of(image)


def _pixels(picture: Pictures.Image, view: View, resample: int) -> bytes:
    """Returns the pixels of a copy of the picture, tile by tile."""
    for height, width in (view.via, view.size) if view.via is not None else (view.size,):
        if picture.size != (width, height):
            picture = picture.resize((width, height), Pictures.Resampling(resample))
    if view.canvas is not None:
        height, width = view.canvas
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        picture = picture.crop((left, top, left + width, top + height))
    if view.tile is None:
        return picture.tobytes()
    height, width = view.tile
    corners = ((top, left) for top in range(0, picture.height, height) for left in range(0, picture.width, width))
    return b"".join(picture.crop((left, top, left + width, top + height)).tobytes() for top, left in corners)


def digest_of(image: Image) -> bytes:
    """Names a picture by its content; how a model reads it is part of the model's identity."""
    sides = b"".join(side.to_bytes(4, "big") for side in (image.num_rows, image.num_columns))
    kind = b"image" if image.num_frames == 1 else b"%d frames" % image.num_frames
    return hashlib.sha256(kind + sides + image.pixels).digest()


def in_color(picture: Pictures.Image) -> Pictures.Image:
    """Returns the picture in RGB."""
    if picture.mode == "RGB":
        return picture
    if picture.mode in HAVE_ALPHA or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Pictures.new("RGBA", picture.size, (255, 255, 255, 255))
        return Pictures.alpha_composite(white, picture).convert("RGB")
    if picture.mode.startswith("I;16") or picture.mode in WIDE:
        scale = 1 / 256 if picture.mode.startswith("I;16") or _is_wide(picture) else 1.0
        picture = picture.convert("F").point(lambda value: value * scale).convert("L")
    return picture.convert("RGB")


def _is_wide(picture: Pictures.Image) -> bool:
    """Whether gray values need more than 8 bits."""
    extremes = picture.getextrema()
    return isinstance(extremes[1], int | float) and extremes[1] > 255


@contextmanager
def in_own_words() -> Iterator[None]:
    """Turns a decoder's errors into RequestErrors without its words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own limit of pixels is ours
            yield
    except RequestError:
        raise
    except Pictures.DecompressionBombError:
        raise RequestError(f"a picture has at most {MAX_PIXELS} pixels; send a smaller one") from None
    except UnidentifiedImageError:
        raise RequestError(f"no picture in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}; send one") from None
    except MemoryError:
        raise RequestError("decoding it takes too much memory; send a smaller one") from None
    except Exception:  # decoders raise errors of many kinds for broken files
        raise RequestError("the file is broken or cut short; send it anew") from None
