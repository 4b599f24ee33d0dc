"""Pictures for `benchmarks hog`, as files of PNG in data URLs."""

from __future__ import annotations

import base64
import io
import random

from PIL import Image

SIDE = 448  # pixels of a picture's side
NUM_SHADES = 16


def url_of(seed: int, side: int = SIDE) -> str:
    """Returns a picture of stripes of noise, which no two seeds have in common."""
    rng = random.Random(seed)
    rows = [rng.randbytes(side * 3) for _ in range(NUM_SHADES)]
    pixels = b"".join(rows[at * NUM_SHADES // side] for at in range(side))
    Image.frombytes("RGB", (side, side), pixels).save(file := io.BytesIO(), "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
