"""Pictures of prompts on their way in: child processes, limits, and the memory that they are kept in."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pd_cluster.checkpoints.vision import VisionPart
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.errors import ConfigError, RequestError, Unavailable
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.media.download import ANY_HOST
from pd_cluster.media.kinds.qwen import GridRules
from pd_cluster.media.options import ReadOptions
from pd_cluster.service import pixels
from pd_cluster.service.helpers import job_child
from pd_cluster.service.pixels import PixelBudget
from pd_cluster.service.prompts import pictures
from pd_cluster.service.prompts.pictures import GIVEN, PictureIntake, Source
from pd_cluster.settings.media import MediaSettings
from pd_cluster.types import Image, Order, Request, Sampling, Span
from tests.support.pictures import data_url, file_of, picture

RULES = GridRules(4, 2, 256, 1024, token_id=7)
PART = VisionPart("qwen2_vl", RULES, (0.5,) * 3, (0.5,) * 3, 1 / 255, ())


@asynccontextmanager
async def intake_of(counts: Any = None, **settings: Any) -> AsyncIterator[PictureIntake]:
    more = {} if counts is None else {"counts": counts}
    intake = PictureIntake(PART, MediaSettings(**settings), lambda: ["8.8.4.4"], **more)
    try:
        yield intake
    finally:
        await intake.close()


def sources(*urls: str) -> list[Source]:
    return [Source(f"messages[0].content[{at}].image_url", url) for at, url in enumerate(urls)]


async def test_pictures_take_the_places_of_their_placeholders(tmp_path: Path) -> None:
    """A bad one is named, and the child that decodes them goes on."""
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
    """Nor is any address inside of a network, also where every host is allowed."""
    async with intake_of(domains=(ANY_HOST,)) as intake:
        for address in ("8.8.4.4", "127.0.0.1", "169.254.169.254"):
            with pytest.raises(RequestError, match=f"{address}: its address is not a public one"):
                await intake.place([7], sources(f"http://{address}/a.png"), "prompt")


async def test_too_many_and_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    async with intake_of(limits={"image": 2}) as intake:
        with pytest.raises(RequestError, match=r"content\[2\].*: 3 images; this server takes 2 in a prompt"):
            intake.check(sources("a", "b", "c"))
        monkeypatch.setattr(pictures, "MAX_NBYTES", 2000)
        with pytest.raises(RequestError, match=r"content\[1\].*the images of a prompt have at most 2000 bytes"):
            await intake.place([7, 7], sources(*[data_url(picture(1))] * 2), "prompt")
        monkeypatch.setattr(pictures, "MAX_NUMBERS_NBYTES", 200)
        with pytest.raises(RequestError, match="prompt: a prompt with images has at most 10 tokens; send a shorter"):
            await intake.place([*range(6), 7], sources(data_url(picture(1))), "prompt")


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "takes too long"])
async def test_a_decoder_that_fails_takes_no_other_picture_with_it(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Where it takes too long it is killed; the next picture gets another one."""
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
    """Until there is no more room: the least recently used goes."""
    counts, urls = Counts(), [data_url(picture(seed)) for seed in range(2)]
    async with intake_of(counts, cache_gb=2.5 * RULES.num_bytes(Image(4, 6)) / (1 << 30)) as intake:
        read, kept = [False, "read", ("image", True)], [True, ("image", True)]
        for url, salt, expected in (
            *((urls[0], "a", read), (urls[0], "a", kept), (urls[0], "b", read), (urls[0], "a", kept)),
            *((urls[1], "a", read), (urls[0], "a", kept), (urls[0], "b", read)),  # urls[1] in the place of b's
        ):
            counts.found.clear()
            shown = await intake.place([7], sources(url), "prompt", (), salt)
            assert shown.prompt.images[0].pixels
            assert counts.found == expected


async def test_a_request_says_how_its_pictures_are_read() -> None:
    """Another size is another content; what was kept for one setting never serves another."""
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
            ({"fps": 1, "video_fps": 2}, "video_fps 2: another name of it says 1"),
            ({"size": {"height": 3}}, "shortest_edge and longest_edge"),
            ({"max_pixels": 300, "size": {"longest_edge": 301}}, "size.longest_edge 301: max_pixels says 300"),
        ]
        for given, said in wrong:
            with pytest.raises(RequestError, match=r"^mm_processor_kwargs: ") as raised:
                intake.options(given, "mm_processor_kwargs")
            assert said in str(raised.value)
            assert raised.value.param == "mm_processor_kwargs"
    async with intake_of(processor={"max_pixels": 512}) as intake:  # the server's own hold where a request says nothing
        assert [intake.options(given, "x").max_pixels for given in ({}, {"max_pixels": 300})] == [512, 300]
    with pytest.raises(ConfigError, match="--mm-processor-kwargs: max_pixels 2048: this model's folder has"):
        PictureIntake(PART, MediaSettings(processor={"max_pixels": 2048}))


async def test_a_senders_name_of_a_picture() -> None:
    """It stands for what its tenant sent last by it, and never for what is sent beside it."""
    async with intake_of() as intake:
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


def test_pixels_are_counted_until_they_are_released() -> None:
    budget = PixelBudget(100)
    held = budget.take(60)
    with pytest.raises(Unavailable, match="60 bytes of pictures are waiting for their answers, 60 of them yours"):
        budget.take(41)
    other = budget.take(40)
    held.release()
    held.release()
    assert budget.in_memory.taken_nbytes == 40
    del other  # a prompt that was never sent
    gc.collect()
    assert budget.in_memory.taken_nbytes == 0


async def test_pixels_beyond_memory_are_in_a_file_without_a_name(tmp_path: Path) -> None:
    """They are the same, travel as they are, and are counted within a limit of their own."""
    nbytes = RULES.num_bytes(Image(4, 6))
    limits = {"memory_gb": 1.5 * nbytes / (1 << 30), "spill_path": str(tmp_path), "spill_gb": 2.5 * nbytes / (1 << 30)}
    async with intake_of(**limits) as intake:
        urls = [data_url(picture(seed)) for seed in range(4)]
        shown = [await intake.place([7], sources(url), "prompt") for url in urls[:3]]
        kinds = [type(each.prompt.images[0].pixels) for each in shown]
        assert kinds == [bytes, memoryview, memoryview]
        assert not list(tmp_path.iterdir())
        budget = intake._budget
        assert (budget.in_memory.taken_nbytes, budget.in_files.taken_nbytes) == (nbytes, 2 * nbytes)
        for each, url in zip(shown, urls, strict=False):
            (image,) = each.prompt.images
            async with intake_of() as other:
                (plain,) = (await other.place([7], sources(url), "prompt")).prompt.images
            assert bytes(image.pixels) == plain.pixels
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(image), type=Image) == plain
        with pytest.raises(Unavailable, match=r"bytes of pictures are waiting for their answers, \d+ of them yours"):
            await intake.place([7], sources(urls[3]), "prompt")
        hold = shown[1].hold
        assert hold is not None
        hold.release()
        assert budget.in_files.taken_nbytes == nbytes
        again = await intake.place([7], sources(urls[3]), "prompt")
        assert isinstance(again.prompt.images[0].pixels, memoryview)
    descriptor = pixels._nameless(str(tmp_path))
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    assert os.fstat(descriptor).st_nlink == 0
    os.close(descriptor)
    with pytest.raises(ConfigError, match=r"--media-spill-path /no/such: no file can be made there: No such file"):
        PixelBudget(1, "/no/such", 1)


def test_a_decode_leg_that_would_compute_a_picture_without_pixels() -> None:
    """It is finished and named; one whose cached prefix covers its pictures runs."""
    scheduler = StepScheduler(BlockPool(16), 4, 8, 64)
    fields = {"spans": (Span(1, 5, b"d"),), "images": (Image(4, 4),)}
    order = Order([1, 7, 7, 7, 7, 2, 3], Sampling(max_tokens=20), **fields)  # type: ignore[arg-type]
    text = Request("text", Order([1, 2], Sampling()), leg="decode")
    request = Request("r", order, leg="decode", output_token_ids=[5])
    for each in (request, text):
        scheduler.add(each)
    plan = scheduler.plan()
    assert (plan.lacking, [chunk[0] for chunk in plan.chunks]) == ([request], [text])
    scheduler.check()
    assert list(scheduler.requests) == [text.key]
    whole = Request("r", order, leg="decode", output_token_ids=[5], num_computed_tokens=5)
    assert not whole.lacks_pixels
