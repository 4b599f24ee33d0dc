"""Decodes a picture's file, rotates it upright and resizes it. Needs Pillow; knows nothing of where files come from.

Each RequestError has a text of its own, because decoders' messages may reveal memory contents.
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
from pd_cluster.media.image_rules import ImageRules, ImageView
from pd_cluster.types import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64 << 20  # maximum number of pixels of a picture before it is resized
HAVE_ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")
WIDE = ("I", "I;16", "I;16L", "I;16B", "F")  # Pillow's modes for gray with more than 8 bits


def prepared(data: bytes, rules: ImageRules) -> tuple[Image, bytes]:
    """Returns a file's picture and its digest. Raises RequestError."""
    with with_field_names():
        picture = Pictures.open(io.BytesIO(data), formats=FORMATS)
        check_size(picture, rules)
        return fitted(picture, rules)


def of_array(pixels: Any) -> Pictures.Image:
    """Returns a picture of [height, width, 3] 8-bit numbers."""
    return Pictures.fromarray(pixels)


def check_size(picture: Pictures.Image, rules: ImageRules) -> None:
    """Checks the size in a file's header before the file is decoded. Raises RequestError."""
    width, height = picture.size
    if not width or not height:
        raise RequestError("it has no pixels; send another one")
    if width * height > MAX_PIXELS:
        raise RequestError(f"{width} x {height} pixels: a picture has at most {MAX_PIXELS}; send a smaller one")
    rules.sized(height, width)


def fitted(picture: Pictures.Image, rules: ImageRules) -> tuple[Image, bytes]:
    """Returns a decoded picture in the model's form, and its digest. Raises RequestError.

    Rotates the picture as its EXIF data say, puts it on white if it is transparent, and resizes it. Ignores further
    frames.
    """
    check_size(picture, rules)
    with with_field_names():
        decode(picture)
        upright = in_color(ImageOps.exif_transpose(picture))
        image, views = rules.sized(upright.height, upright.width)
        image = structs.replace(image, pixels=b"".join(_pixels(upright, view, rules.resample) for view in views))
    assert len(image.pixels) == rules.num_bytes(image)
    return image, digest_of(image)


def _pixels(picture: Pictures.Image, view: ImageView, resample: int) -> bytes:
    """Returns the pixels of one copy, tile by tile."""
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
    """Returns the digest of a picture's content; how pictures are read is part of the model's identity."""
    sides = b"".join(side.to_bytes(4, "big") for side in (image.num_rows, image.num_columns))
    kind = b"image" if image.num_frames == 1 else b"%d frames" % image.num_frames
    return hashlib.sha256(kind + sides + image.pixels).digest()


def decode(picture: Pictures.Image) -> None:
    """Decodes the picture, and scales its transparent color to 8 bits, because Pillow keeps the color in the file's bit
    depth.

    PNG, section 11.3.2.1: the color has the file's bit depth (1, 2, 4, 8 or 16).
    """
    key = picture.info.get("transparency")
    tile = getattr(picture, "tile", None)  # empty once it is decoded
    form = str(tile[0][3]) if tile else ""
    picture.load()
    if isinstance(key, int) and (factor := {"L;2": 85, "L;4": 17}.get(form)):
        picture.info["transparency"] = key * factor
    elif isinstance(key, tuple) and ("16" in form or max(key) > 255):
        picture.info["transparency"] = tuple(value >> 8 for value in key)


def in_color(picture: Pictures.Image) -> Pictures.Image:
    """Returns the decoded picture in RGB, on white."""
    is_wide, key = picture.mode.startswith("I;16") or picture.mode in WIDE, picture.info.get("transparency")
    if picture.mode in HAVE_ALPHA or (key is not None and not is_wide):
        picture = picture.convert("RGBA")
        white = Pictures.new("RGBA", picture.size, (255, 255, 255, 255))
        return Pictures.alpha_composite(white, picture).convert("RGB")
    if is_wide:
        return _gray(picture, key).convert("RGB")
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _gray(picture: Pictures.Image, key: object) -> Pictures.Image:
    """Reduces a picture with more than 8 bits of gray to 8 bits; values equal to `key` become white."""
    values = picture.convert("F")
    scale = 1 / 256 if picture.mode.startswith("I;16") or _is_wide(picture) else 1.0
    gray = values.point(lambda value: value * scale).convert("L")
    if not isinstance(key, int):
        return gray
    import numpy as np  # loaded only for such pictures

    is_clear = (np.asarray(values) == key).astype(np.uint8) * 255
    return Pictures.composite(Pictures.new("L", gray.size, 255), gray, Pictures.fromarray(is_clear))


def _is_wide(picture: Pictures.Image) -> bool:
    """Whether gray values need more than 8 bits."""
    extremes = picture.getextrema()
    return isinstance(extremes[1], int | float) and extremes[1] > 255


@contextmanager
def with_field_names() -> Iterator[None]:
    """Replaces a decoder's errors by RequestErrors without its messages."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large pictures, but `check_size` refuses them
            yield
    except RequestError:
        raise
    except Pictures.DecompressionBombError:
        raise RequestError(f"a picture has at most {MAX_PIXELS} pixels; send a smaller one") from None
    except UnidentifiedImageError:
        raise RequestError(f"no picture in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}; send one") from None
    except MemoryError:
        raise RequestError("decoding it takes too much memory; send a smaller one") from None
    except Exception:  # decoders raise many kinds of errors for broken files
        raise RequestError("the file is broken or cut short; send it anew") from None
