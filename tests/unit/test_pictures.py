"""Picture files: what is decoded, and the messages for what is refused."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import io
import os
import struct
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image as Pictures

from pd_cluster.checkpoints.vision_config import VisionPart
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.errors import ConfigError, RequestError, Unavailable
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.media.image_files import FORMATS, decode, digest_of, fitted, in_color, prepared
from pd_cluster.media.kinds.qwen import GridRules
from pd_cluster.media.media_download import ANY_HOST
from pd_cluster.media.media_fetch import Places, fetched
from pd_cluster.media.processor_options import ReadOptions
from pd_cluster.service.concurrency import job_child
from pd_cluster.service.media import media_preparation, pixel_budget
from pd_cluster.service.media.media_preparation import GIVEN, MediaPreparation, Source
from pd_cluster.service.media.pixel_budget import PixelBudget
from pd_cluster.settings.media_settings import MediaSettings
from pd_cluster.types import Image, Request, RequestSpec, Sampling, Span
from tests.support.pictures import data_url, file_of, picture, png_of_size

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
    turned = Pictures.frombytes("RGB", (24, 16), picture.tobytes())  # the same bytes with other dimensions
    assert fitted(turned, RULES)[1] not in digests


def test_a_picture_is_turned_upright_before_it_is_counted() -> None:
    exif = Pictures.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
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
    for mode in ("I", "F"):  # white is 255, as with 8 bits, so values are not rescaled
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
    """Covers every depth, for files and for pictures that the caller has opened."""
    opened = Pictures.open(io.BytesIO(png(bits, color, values, clear)))
    decode(opened)
    decode(opened)  # decoding again changes nothing
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
    """Compressed texts and profiles in a picture file may expand to any size, so they are not decompressed."""
    whole, pack = file_of(noise()), zlib.compressobj(9)
    packed = b"".join(pack.compress(bytes(1 << 20)) for _ in range(100)) + pack.flush()
    tracemalloc.start()
    for name, data in ((b"zTXt", b"a\0\0" + packed), (b"iCCP", b"a\0\0" + packed), (b"iTXt", b"a\0\1\0\0\0" + packed)):
        chunk = struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        with contextlib.suppress(RequestError):  # refusing the picture is allowed, too
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
        *((wrong, "images come as data: URLs; send one of these") for wrong in ("ftp://host/a.png", "given:0", "")),
    ):
        with pytest.raises(RequestError, match=said):
            fetched(url, Places())


# ---- intake of prompts' pictures: child processes, limits, and memory


PART = VisionPart("qwen2_vl", RULES, (0.5,) * 3, (0.5,) * 3, 1 / 255, ())


@asynccontextmanager
async def intake_of(counts: Any = None, **settings: Any) -> AsyncIterator[MediaPreparation]:
    more = {} if counts is None else {"counts": counts}
    intake = MediaPreparation(PART, MediaSettings(**settings), lambda: ["8.8.4.4"], **more)
    try:
        yield intake
    finally:
        await intake.close()


def sources(*urls: str) -> list[Source]:
    return [Source(f"messages[0].content[{at}].image_url", url) for at, url in enumerate(urls)]


async def test_pictures_take_the_places_of_their_placeholders(tmp_path: Path) -> None:
    """An error names the bad picture, and the decoding child continues."""
    (tmp_path / "a.png").write_bytes(file_of(picture(1)))
    async with intake_of(domains=("pictures.example",), local_root=str(tmp_path)) as intake:
        one = data_url(picture(1))
        asked = sources(one, f"{GIVEN}0", f"file://{tmp_path}/a.png")
        shown = await intake.place([1, 7, 7, 7, 2], asked, "prompt", [picture(2)])
        assert shown.prompt.token_ids == [1, *[7] * 18, 2]
        assert [(span.start, span.stop) for span in shown.prompt.spans] == [(1, 7), (7, 13), (13, 19)]
        digests = [span.digest for span in shown.prompt.spans]
        assert digests[0] == digests[2] != digests[1]
        assert all(len(image.pixels) == RULES.num_bytes(image) for image in shown.prompt.images)
        assert shown.hold is not None
        with pytest.raises(RequestError, match=r"^messages\[0\]\.content\[1\]\.image_url: no picture in") as raised:
            await intake.place([7, 7], sources(one, data_url(b"hello")), "prompt")
        assert raised.value.param == "messages"
        for url in ("file:///a", "http://other.example/a"):
            with pytest.raises(RequestError, match=r"content\[0\].*"):
                await intake.place([7], sources(url), "prompt")
        assert (await intake.place([7], sources(one), "prompt")).prompt.images
        assert intake.children["image", "given"].num_killed == 0


async def test_addresses_of_the_cluster_are_never_fetched_from() -> None:
    """Neither the cluster's nor any private address is fetched from, even if all hosts are allowed."""
    async with intake_of(domains=(ANY_HOST,)) as intake:
        for address in ("8.8.4.4", "127.0.0.1", "169.254.169.254"):
            with pytest.raises(RequestError, match=f"{address}: its address is not public"):
                await intake.place([7], sources(f"http://{address}/a.png"), "prompt")


async def test_too_many_and_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    async with intake_of(limits={"image": 2}) as intake:
        with pytest.raises(RequestError, match=r"content\[2\].*: 3 images; this server takes 2 in a prompt"):
            intake.check(sources("a", "b", "c"))
        monkeypatch.setattr(media_preparation, "MAX_NBYTES", 2000)
        with pytest.raises(RequestError, match=r"content\[1\].*the images of a prompt have at most 2000 bytes"):
            await intake.place([7, 7], sources(*[data_url(picture(1))] * 2), "prompt")
        monkeypatch.setattr(media_preparation, "MAX_NUMBERS_NBYTES", 200)
        with pytest.raises(RequestError, match="prompt: a prompt with images has at most 10 tokens; send a shorter"):
            await intake.place([*range(6), 7], sources(data_url(picture(1))), "prompt")


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "takes too long"])
async def test_a_decoder_that_fails_takes_no_other_picture_with_it(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """If a decoder ends or takes too long, the next picture gets a new one."""
    async with intake_of(cache_gb=0.0) as intake:
        exchange, url = job_child.JobChild.exchange, data_url(picture(1))
        await intake.place([7], sources(url), "prompt")

        async def fails(child: Any, line: bytes) -> bytes:
            if not ends:
                await asyncio.Event().wait()
            if url.encode() in line:
                child.process.kill()
            return await exchange(child, line)

        with monkeypatch.context() as patch:
            patch.setattr(job_child.JobChild, "exchange", fails)
            if not ends:
                patch.setattr(intake.children["image", "given"], "timeout_s", 0.05)
            said = "decoding it failed; send another one" if ends else "not ready after"
            with pytest.raises(RequestError, match=rf"content\[0\].*{said}"):
                await intake.place([7], sources(url), "prompt")
        assert ends or intake.children["image", "given"].num_killed == 1
        assert (await intake.place([7], sources(url), "prompt")).prompt.images


class Counts:
    def __init__(self) -> None:
        self.found: list[Any] = []

    def medium(self, kind: str, is_read: bool) -> None:
        self.found.append((kind, is_read))

    def kept_medium(self, is_found: bool) -> None:
        self.found.append(is_found)

    def read_medium(self, fetch_s: float, decode_s: float) -> None:
        assert fetch_s >= 0
        assert decode_s > 0
        self.found.append("read")


async def test_what_was_read_is_kept_for_its_tenant() -> None:
    """Decoded pictures are kept per tenant; when memory is full, the least recently used is dropped."""
    counts, urls = Counts(), [data_url(picture(seed)) for seed in range(2)]
    async with intake_of(counts, cache_gb=2.5 * RULES.num_bytes(Image(4, 6)) / (1 << 30)) as intake:
        read, kept = [False, "read", ("image", True)], [True, ("image", True)]
        for url, salt, expected in (
            *((urls[0], "a", read), (urls[0], "a", kept), (urls[0], "b", read), (urls[0], "a", kept)),
            *((urls[1], "a", read), (urls[0], "a", kept), (urls[0], "b", read)),  # urls[1] replaced b's picture
        ):
            counts.found.clear()
            shown = await intake.place([7], sources(url), "prompt", (), salt)
            assert shown.prompt.images[0].pixels
            assert counts.found == expected


async def test_a_request_says_how_its_pictures_are_read_and_a_sender_names_them() -> None:
    """Pictures kept for one size setting never serve another; a uuid names the last picture that its tenant sent."""
    async with intake_of() as intake:
        url = data_url(picture(1))

        async def shown(**options: Any) -> Any:
            found = intake.options(options, "mm_processor_kwargs")
            (one,) = [each._replace(options=found) for each in sources(url)]
            (image,) = (await intake.place([7], [one], "prompt")).prompt.images
            return image

        plain = await shown()
        small, again = await shown(max_pixels=256), await shown(size={"longest_edge": 256})
        assert (plain.num_rows, plain.num_columns) == (4, 6)
        assert (small.num_rows * small.num_columns, again.pixels) == (8, small.pixels)
        assert (await shown()).pixels == plain.pixels
        large = await shown(min_pixels=600)
        assert large.num_rows * large.num_columns == 48
        with pytest.raises(RequestError, match="its min_pixels are too close to the folder's max_pixels"):
            await shown(min_pixels=1024)
        # a name refers to the picture that its tenant last sent under it, except for one sent with the name
        one, two = (data_url(picture(seed)) for seed in (1, 2))

        async def digest(url: str, salt: str = "a", **more: Any) -> bytes:
            (source,) = sources(url)
            shown = await intake.place([7], [source._replace(uuid="cat", **more)], "prompt", (), salt)
            return shown.prompt.spans[0].digest

        first = await digest(one)
        assert await digest("") == first
        assert (second := await digest(two)) != first
        assert await digest("") == second
        for more in ({"salt": "b"}, {"options": ReadOptions(max_pixels=256)}, {"kind": "video"}):
            with pytest.raises(RequestError, match=r"no (image|video) of this uuid is kept; send it with its URL"):
                await digest("", **more)
        with pytest.raises(RequestError, match="a uuid has at most 256 characters"):
            intake.check([sources(one)[0]._replace(uuid="x" * 257)])


async def test_options_that_cannot_be_had() -> None:
    async with intake_of() as intake:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"min_pixel": 3}, "min_pixel: not known; did you mean min_pixels?"),
            ({"max_pixels": 2048}, "max_pixels 2048: this model's folder has max_pixels 1024"),
            ({"max_pixels": 64}, "max_pixels 64: less than min_pixels 256"),
            ({"max_pixels": True}, "max_pixels True: "),
            ({"min_pixels": 10**400}, "at most 2147483648"),
            ({"fps": 0}, "fps 0: "),
            ({"num_frames": 769}, "num_frames 769: "),
            ({"fps": 1, "video_fps": 2}, "video_fps 2: 1 is given by another name"),
            ({"size": {"height": 3}}, "shortest_edge and longest_edge"),
            ({"max_pixels": 300, "size": {"longest_edge": 301}}, "size.longest_edge 301: max_pixels says 300"),
        ]
        for given, said in wrong:
            with pytest.raises(RequestError, match=r"^mm_processor_kwargs: ") as raised:
                intake.options(given, "mm_processor_kwargs")
            assert said in str(raised.value)
            assert raised.value.param == "mm_processor_kwargs"
    async with intake_of(processor={"max_pixels": 512}) as intake:  # the server's settings apply by default
        assert [intake.options(given, "x").max_pixels for given in ({}, {"max_pixels": 300})] == [512, 300]
    with pytest.raises(ConfigError, match="--mm-processor-kwargs: max_pixels 2048: this model's folder has"):
        MediaPreparation(PART, MediaSettings(processor={"max_pixels": 2048}))


def test_pixels_are_counted_until_they_are_released() -> None:
    budget = PixelBudget(100)
    held = budget.take(60)
    with pytest.raises(Unavailable, match="60 bytes of pictures belong to unfinished requests, 60 of them yours"):
        budget.take(41)
    other = budget.take(40)
    held.release()
    held.release()
    assert budget.in_memory.taken_nbytes == 40
    del other  # its prompt was never sent
    gc.collect()
    assert budget.in_memory.taken_nbytes == 0


async def test_pixels_beyond_memory_are_in_a_file_without_a_name(tmp_path: Path) -> None:
    """Pixels beyond the memory limit are in an unnamed file, unchanged, can be sent, and count against a limit."""
    nbytes = RULES.num_bytes(Image(4, 6))
    limits = {"memory_gb": 1.5 * nbytes / (1 << 30), "spill_path": str(tmp_path), "spill_gb": 2.5 * nbytes / (1 << 30)}
    async with intake_of(**limits) as intake, intake_of() as other:
        urls = [data_url(picture(seed)) for seed in range(4)]
        shown = [await intake.place([7], sources(url), "prompt") for url in urls[:3]]
        kinds = [type(each.prompt.images[0].pixels) for each in shown]
        assert kinds == [bytes, memoryview, memoryview]
        assert not list(tmp_path.iterdir())
        budget = intake._budget
        assert (budget.in_memory.taken_nbytes, budget.in_files.taken_nbytes) == (nbytes, 2 * nbytes)
        for each, url in zip(shown, urls, strict=False):
            (image,) = each.prompt.images
            (plain,) = (await other.place([7], sources(url), "prompt")).prompt.images
            assert bytes(image.pixels) == plain.pixels
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(image), type=Image) == plain
        with pytest.raises(Unavailable, match=r"bytes of pictures belong to unfinished requests, \d+ of them yours"):
            await intake.place([7], sources(urls[3]), "prompt")
        hold = shown[1].hold
        assert hold is not None
        hold.release()
        assert budget.in_files.taken_nbytes == nbytes
        again = await intake.place([7], sources(urls[3]), "prompt")
        assert isinstance(again.prompt.images[0].pixels, memoryview)
    descriptor = pixel_budget._nameless(str(tmp_path))
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    assert os.fstat(descriptor).st_nlink == 0
    os.close(descriptor)
    with pytest.raises(ConfigError, match=r"--media-spill-path /no/such: no file can be made there: No such file"):
        PixelBudget(1, "/no/such", 1)


def test_a_decode_leg_that_would_compute_a_picture_without_pixels() -> None:
    """Such a leg ends with an error; one whose cached prefix covers its pictures runs."""
    scheduler = StepScheduler([LayerGroup(BlockPool(16))], StepSizes(4, 8, 64))
    fields = {"spans": (Span(1, 5, b"d"),), "images": (Image(4, 4),)}
    order = RequestSpec([1, 7, 7, 7, 7, 2, 3], Sampling(max_tokens=20), **fields)  # type: ignore[arg-type]
    text = Request("text", RequestSpec([1, 2], Sampling()), leg="decode")
    request = Request("r", order, leg="decode", output_token_ids=[5])
    for each in (request, text):
        scheduler.add(each)
    plan = scheduler.plan()
    assert (plan.lacking, [chunk[0] for chunk in plan.chunks]) == ([request], [text])
    scheduler.check()
    assert list(scheduler.requests) == [text.key]
    whole = Request("r", order, leg="decode", output_token_ids=[5], num_computed_tokens=5)
    assert not whole.lacks_pixels
