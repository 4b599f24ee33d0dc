"""Pictures for `benchmarks multimodal`, as bytes of pixels and as PNG files. Needs the standard library only."""

from __future__ import annotations

import base64
import random
import struct
import zlib

SIDE = 448  # pixels of a picture's side
NUM_SHADES = 16


def pixels_of(seed: int, side: int = SIDE) -> bytes:
    """Returns RGB pixels, [side, side, 3]: stripes of noise, which no two seeds have in common."""
    rng = random.Random(seed)
    rows = [rng.randbytes(side * 3) for _ in range(NUM_SHADES)]
    return b"".join(rows[at * NUM_SHADES // side] for at in range(side))


def png_of(seed: int, side: int = SIDE) -> bytes:
    """Returns a PNG file of the same pixels."""
    pixels, width = pixels_of(seed, side), side * 3
    lines = b"".join(b"\0" + pixels[at * width : (at + 1) * width] for at in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 1)), (b"IEND", b""))
    parts = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def url_of(seed: int, side: int = SIDE) -> str:
    return f"data:image/png;base64,{base64.b64encode(png_of(seed, side)).decode()}"
