"""Files of pictures: what is read, what is refused and in which words."""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image as Pictures

from pd_cluster.errors import RequestError
from pd_cluster.media.fetch import Places, fetched
from pd_cluster.media.kinds.qwen import GridRules
from pd_cluster.media.pictures import FORMATS, decode, digest_of, fitted, in_color, prepared
from pd_cluster.types import Image
from tests.support.pictures import file_of, png_of_size

RULES = GridRules(4, 2, 256, 1024, token_id=7)


def noise(width: int = 16, height: int = 24, seed: int = 0) -> Pictures.Image:
    return Pictures.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8))


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind: str) -> None:
    image, digest = prepared(file_of(noise(), kind), RULES)
    assert (image.num_rows, image.num_columns, len(digest)) == (6, 4, 32)
    smallest, _ = prepared(file_of(noise(1, 1), kind), RULES)
    assert (smallest.num_rows, smallest.num_columns) == (4, 4)


def test_equal_pictures_in_other_files_have_one_digest() -> None:
    picture = noise()
    digests = {prepared(file_of(picture, kind), RULES)[1] for kind in ("PNG", "BMP")}
    digests.add(fitted(picture, RULES)[1])
    assert len(digests) == 1
    assert prepared(file_of(noise(seed=1)), RULES)[1] not in digests
    turned = Pictures.frombytes("RGB", (24, 16), picture.tobytes())  # the same bytes in another shape
    assert fitted(turned, RULES)[1] not in digests


def test_a_picture_is_turned_upright_before_it_is_counted() -> None:
    exif = Pictures.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    image, _ = prepared(file_of(noise(16, 24), exif=exif), RULES)
    assert (image.num_rows, image.num_columns) == (4, 6)
    upright, _ = fitted(noise(16, 24).transpose(Pictures.Transpose.ROTATE_270), RULES)
    assert image == upright


def test_modes_become_color() -> None:
    gray = Pictures.new("L", (16, 16), 200)
    for mode in ("1", "L", "P", "CMYK", "YCbCr", "RGBX", "HSV", "I", "I;16", "F"):
        picture = Pictures.fromarray(np.full((16, 16), 200 << 8, np.uint16)) if mode == "I;16" else gray.convert(mode)
        found = in_color(picture)
        assert found.mode == "RGB"
        assert abs(found.getpixel((3, 3))[0] - (255 if mode == "1" else 200)) < 3  # type: ignore[index]
    for mode in ("I", "F"):  # white is 255, which still fits 8 bits: the scale stays
        found = in_color(Pictures.new("L", (16, 16), 255).convert(mode))
        assert found.getpixel((3, 3)) == (255, 255, 255)
    for mode in ("RGBA", "LA", "PA"):
        clear = Pictures.new("RGBA", (16, 16), (0, 0, 0, 0)).convert(mode)
        assert in_color(clear).getpixel((0, 0)) == (255, 255, 255)


def png(bits: int, color: int, values: bytes, clear: tuple[int, ...]) -> bytes:
    """Returns a PNG of two pixels with a transparent color: `color` 0 is gray, 2 is RGB (PNG, section 11)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 2, 1, bits, color, 0, 0, 0)
    data = chunk(b"IHDR", head) + chunk(b"tRNS", struct.pack(f">{len(clear)}H", *clear))
    return b"\x89PNG\r\n\x1a\n" + data + chunk(b"IDAT", zlib.compress(b"\0" + values)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("bits", "color", "values", "clear", "second"),
    [
        (8, 2, bytes([10, 20, 30, 200, 100, 50]), (10, 20, 30), (200, 100, 50)),
        (16, 2, struct.pack(">6H", 2561, 5120, 7680, 51200, 25600, 12800), (2561, 5120, 7680), (200, 100, 50)),
        (16, 0, struct.pack(">2H", 60000, 51200), (60000,), (200, 200, 200)),
        (8, 0, bytes([7, 8]), (7,), (8, 8, 8)),
        (2, 0, bytes([0b01100000]), (1,), (170, 170, 170)),
        (1, 0, bytes([0]), (1,), (0, 0, 0)),
    ],
)
def test_the_transparent_color_of_a_png_is_white(
    bits: int, color: int, values: bytes, clear: tuple[int, ...], second: tuple[int, ...]
) -> None:
    """At every depth, for a file that is decoded here and for a picture that its caller has opened."""
    opened = Pictures.open(io.BytesIO(png(bits, color, values, clear)))
    decode(opened)
    decode(opened)  # a second time changes nothing
    first = (255, 255, 255) if bits > 1 else (0, 0, 0)
    assert [in_color(opened).getpixel((x, 0)) for x in (0, 1)] == [first, second]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no picture in"),
        *((file_of(noise(), kind), "no picture in") for kind in ("TIFF", "JPEG2000", "AVIF")),
        (file_of(noise())[:60], "the file is broken or cut short"),
        (file_of(noise(300, 300), "JPEG")[:3000], "the file is broken or cut short"),
        (png_of_size(60_000, 60_000), "a picture has at most 67108864 pixels"),
        (png_of_size(9000, 9000), "9000 x 9000 pixels: a picture has at most"),
        (png_of_size(1, 10_000), "1 x 10000 pixels: one side is more than 200 times the other"),
        (file_of(noise(10_000, 1)), "10000 x 1 pixels: one side is more than 200 times the other"),
    ],
)
def test_files_that_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said) as raised:
        prepared(data, RULES)
    assert "0x" not in str(raised.value)


def test_a_text_that_unpacks_to_a_gigabyte_is_not_unpacked() -> None:
    """Compressed texts and profiles beside a picture's pixels are as long as their sender likes."""
    whole, pack = file_of(noise()), zlib.compressobj(9)
    packed = b"".join(pack.compress(bytes(1 << 20)) for _ in range(100)) + pack.flush()
    tracemalloc.start()
    for name, data in ((b"zTXt", b"a\0\0" + packed), (b"iCCP", b"a\0\0" + packed), (b"iTXt", b"a\0\1\0\0\0" + packed)):
        chunk = struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        with contextlib.suppress(RequestError):  # an unread text is no reason to refuse the picture
            assert prepared(whole[:33] + chunk + whole[33:], RULES)[0].num_rows
    _, most_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_nbytes < 50 << 20


def test_an_animation_of_many_frames_is_its_first_one() -> None:
    first = noise(20, 20)
    frames = [Pictures.new("RGB", (20, 20), (at, 255 - at, at)) for at in range(200)]
    moving = file_of(first, "WEBP", save_all=True, append_images=frames, lossless=True)
    assert prepared(moving, RULES) == prepared(file_of(first), RULES)


def test_equal_bytes_in_another_shape_are_another_picture() -> None:
    shapes = [(4, 6, 1), (6, 4, 1), (4, 3, 2), (2, 12, 1)]
    found = {digest_of(Image(rows, columns, bytes(1152), frames)) for rows, columns, frames in shapes}
    assert len(found) == len(shapes)


def test_data_urls() -> None:
    data = file_of(noise())
    text = base64.b64encode(data).decode()
    for head in ("data:image/png;base64,", "data:;base64,", "data:image/jpeg;name=a;base64,"):
        assert fetched(head + text, Places()) == data
    for url, said in (
        ("data:text/plain;base64,AAAA", "a data: URL of text/plain: not a picture"),
        ("data:image/png,AAAA", "must be data:image/TYPE;base64,DATA"),
        *((f"data:image/png;base64,{wrong}", "are not base64") for wrong in ("AA!A", "AAA", "\u00e4AAA")),
        ("data:image/png;base64," + "A" * (33 << 20), "at most 25165824 bytes"),
        *((wrong, "images come as data: URLs; send it so") for wrong in ("ftp://host/a.png", "given:0", "")),
    ):
        with pytest.raises(RequestError, match=said):
            fetched(url, Places())
