"""Makes pictures for `benchmarks hog`, as data: URLs of PNG files."""

from __future__ import annotations

import base64
import io
import random

from PIL import Image

SIDE = 448  # side of a picture in pixels
NUM_SHADES = 16


def url_of(seed: int, side: int = SIDE) -> str:
    """Returns a picture of noise stripes, which differs for each seed."""
    rng = random.Random(seed)
    rows = [rng.randbytes(side * 3) for _ in range(NUM_SHADES)]
    pixels = b"".join(rows[at * NUM_SHADES // side] for at in range(side))
    Image.frombytes("RGB", (side, side), pixels).save(file := io.BytesIO(), "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
