"""An encoder's worker: images in, features out, and refusals."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import ConnClosed, ConnOpened, Event, Mail, StartDrain
from pd_cluster.engine.lifecycle.worker_drain import CLOSES_AFTER_S, WorkerDrain
from pd_cluster.engine.worker.worker_loop import Loop
from pd_cluster.extras.encoders.encode_worker import MAX_WAITING, EncodeWorker, TowerSource
from pd_cluster.extras.encoders.feature_files import SealedFile, Shape, fetch
from pd_cluster.types import Image
from tests.support.encoder_values import FEATURES, OPENING, PLACE, SHAPE, TERMS, UP, A, B
from tests.support.mail import RecordedMail


class Tower:
    """A fake vision tower that counts the computed images."""

    def __init__(self) -> None:
        self.num_encoded = 0
        self.rules = SimpleNamespace(problem=lambda image: "" if image.num_rows == 2 else "too many rows")

    def encode(self, image: Image) -> torch.Tensor:
        self.num_encoded += 1
        return FEATURES + len(image.pixels)


class Encoder:
    def __init__(self, num_kept_tokens: int = 100) -> None:
        self.now_s = 0.0
        self.addresses: list[str] = []  # addresses of the feature server
        self.num_loads = 0  # loads of the tower after sleep
        self.post, self.tower, inbox = RecordedMail(), Tower(), queue.SimpleQueue[Event]()
        tower: Any = self.tower
        drain = WorkerDrain(30.0, lambda: self.now_s)
        self.worker = EncodeWorker(TowerSource(tower, self.load), TERMS, self.post, inbox.put, num_kept_tokens, drain)
        self.loop = Loop(inbox, self.worker)

    def load(self) -> Any:
        self.num_loads += 1
        return self.tower

    def close(self) -> None:
        self.worker.close()


def mail(body: wire.Body, conn: str = "p") -> Mail:
    return Mail(conn, "prefill-0@1", body)


OPEN = mail(OPENING)


def step(encoder: Encoder, *events: Event) -> None:
    """Queues events and runs rounds of the loop until nothing is queued."""
    for event in events:
        encoder.loop.inbox.put(event)
    encoder.loop.turn(wait_s=0.0)
    while encoder.worker.load.num_running:
        encoder.loop.turn(wait_s=0.0)


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    with contextlib.closing(Encoder()) as made:
        yield made


IMAGE = Image(2, 2, b"pp")


def image_of(item: int, key: bytes | None = None, image: Image = IMAGE) -> Mail:
    return mail(wire.Encode(item, key or bytes([item]) * 32, image, 10.0))


def failed(encoder: Encoder) -> list[tuple[int, str]]:
    return [(each.item, each.reason) for each in encoder.post.take(wire.EncodeFailed)]


def done(encoder: Encoder) -> list[int]:
    return [each.item for each in encoder.post.take(wire.EncodeDone)]


def test_an_image_is_computed_once_and_offered_each_time(encoder: Encoder) -> None:
    step(encoder, OPEN, image_of(1, A), image_of(2, A))
    (answer,) = encoder.post.take(wire.EncoderAnswer)
    one, other = encoder.post.take(wire.EncodeDone)
    assert (one.item, other.item, one.checksum) == (1, 2, other.checksum)
    for each in (one, other):
        found = fetch(answer.address, each.token, Shape(SHAPE, torch.float32), PLACE.checksum, each.checksum, 5)
        assert torch.equal(found, FEATURES + 2)
    assert encoder.tower.num_encoded == 1
    load = encoder.worker.load
    assert (load.num_encoded_images, load.num_encoded_hits) == (1, 1)
    assert load.links == {"prefill-0@1": UP}


def test_what_is_refused(encoder: Encoder) -> None:
    step(encoder, image_of(1))
    assert encoder.post.sent == [], "a peer without an open connection gets no answer"
    step(encoder, OPEN, image_of(1, image=Image(3, 2, b"pp")), image_of(1, image=Image(2, 2)))
    assert failed(encoder) == [(1, "too many rows"), (1, "the image came without pixels")]
    put(encoder, *(image_of(at, A) for at in range(MAX_WAITING + 1)))
    step(encoder, ConnClosed("p", "prefill-0@1", "gone"))
    assert failed(encoder) == [(MAX_WAITING, f"{MAX_WAITING} images already wait at the encoder")]
    assert encoder.tower.num_encoded == 0
    step(encoder, mail(replace(OPENING, model_identity="another"), "q"))
    assert "another model" in encoder.post.take(wire.EncoderAnswer)[-1].problem


def test_offers_end(encoder: Encoder) -> None:
    """Offers end by their lease, an abort, or the end of the connection."""
    step(encoder, OPEN)
    for at, end in enumerate[Callable[[], object]](
        (
            lambda: setattr(encoder, "now_s", encoder.now_s + 31.0),
            lambda: put(encoder, mail(wire.EncodeAbort([1]))),
            lambda: put(encoder, ConnClosed("p", "prefill-0@1", "gone")),
        )
    ):
        kept = num_files()
        step(encoder, image_of(at))
        assert done(encoder) == [at]
        assert num_files() == kept + 2, "expected one cached and one offered image"
        end()
        step(encoder)
        assert num_files() == kept + 1


def num_files() -> int:
    """Counts this process's open feature files."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own descriptor
            found += "pd-cluster-features" in os.readlink(each)
    return found


def test_the_store_is_bounded_and_large_images_leave_it_alone() -> None:
    with contextlib.closing(Encoder(num_kept_tokens=2 * SHAPE[1])) as small:
        before = num_files()
        step(small, OPEN)
        for at in (1, 2, 3, 2, 1):
            step(small, image_of(at))
        assert small.tower.num_encoded == 4, "image 2 must be cached, image 1 not"
        step(small, ConnClosed("p", "prefill-0@1", "gone"))
        assert num_files() == before + 2
    assert num_files() == before, "every file must be closed"
    with contextlib.closing(Encoder(num_kept_tokens=SHAPE[1])) as encoder:
        step(encoder, OPEN, image_of(1, A))
        large = torch.zeros(SHAPE[0], SHAPE[1] + 1, SHAPE[2])
        encoder.tower.encode = lambda image: large  # type: ignore[method-assign]
        step(encoder, image_of(2, B), image_of(3, A))
        assert sorted(done(encoder)) == [1, 2, 3]
        assert encoder.worker.load.num_encoded_hits == 1


def test_an_image_that_cannot_be_computed_or_given_ends_no_encoder(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception) -> Any:
        raise error

    step(encoder, OPEN, image_of(1, A))
    before = num_files()
    full = OSError(errno.EMFILE, "Too many open files")
    with monkeypatch.context() as patch:
        patch.setattr(SealedFile, "duplicate", lambda sealed: fail(full))
        step(encoder, image_of(2, A), image_of(3, B))
        patch.setattr(encoder.tower, "encode", lambda image: fail(torch.OutOfMemoryError("no memory")))
        step(encoder, image_of(4, B))
        patch.setattr(encoder.tower, "encode", lambda image: fail(torch.AcceleratorError("the device is lost")))
        with pytest.raises(torch.AcceleratorError):
            step(encoder, image_of(5, B))
    assert num_files() == before
    no_room = "no space for the features: Too many open files"
    assert failed(encoder) == [(2, no_room), (3, no_room), (4, "the encoder cannot compute it: no memory")]
    step(encoder, image_of(6, A))
    assert done(encoder) == [1, 6]


def test_sleep_adapters_and_an_empty_store(encoder: Encoder) -> None:
    adapters = wire.WantedAdapters([wire.AdapterLocation("l" * 64, "/a")])
    step(encoder, SCHEDULER, OPEN, image_of(1, A))
    step(encoder, mail(adapters, "s"), mail(wire.ResetCache(), "s"))
    assert encoder.post.take(wire.AdapterStates) == [wire.AdapterStates(["l" * 64])]
    step(encoder, mail(wire.Sleep(2), "s"))
    step(encoder, image_of(2, A))
    assert failed(encoder) == [(2, "the encoder is asleep")]
    step(encoder, mail(wire.Sleep(0), "s"))
    step(encoder, image_of(3, A))
    assert done(encoder) == [1, 3]
    assert (encoder.worker.load.num_cache_resets, encoder.worker.load.num_encoded_hits) == (1, 0)
    assert encoder.num_loads == 1, "sleep level 2 must drop the tower"


# ---- the end

SCHEDULER = ConnOpened("s", "scheduler@1", "scheduler")


def put(encoder: Encoder, *events: Event) -> None:
    for event in events:
        encoder.loop.inbox.put(event)


def receive(encoder: Encoder) -> list[int]:
    """Accepts all offered features, as a prefill instance does; returns their items."""
    done = encoder.post.take(wire.EncodeDone)
    encoder.addresses += [each.address for each in encoder.post.take(wire.EncoderAnswer)]
    for each in done:
        fetch(encoder.addresses[-1], each.token, Shape(SHAPE, torch.float32), PLACE.checksum, each.checksum, 5)
    return [each.item for each in done]


def test_an_image_that_crosses_the_word_of_a_drain_is_computed(encoder: Encoder) -> None:
    """An image requested before prefill heard of the drain is computed; later ones are refused; the encoder ends."""
    rounds, received = iter(range(100)), list[int]()
    put(encoder, SCHEDULER, OPEN, StartDrain())

    def on_round() -> None:
        match next(rounds):
            case 0:
                assert (encoder.worker.load.is_draining, encoder.post.num_beats_at_once) == (True, 1)
            case 1:
                encoder.now_s += CLOSES_AFTER_S / 2
                put(encoder, image_of(1))
            case 3:
                encoder.now_s += CLOSES_AFTER_S / 2
                put(encoder, image_of(2))
            case 5:
                received.extend(receive(encoder))  # until nothing is left
                put(encoder, image_of(3))

    encoder.loop.run(on_round)
    assert (received, encoder.tower.num_encoded) == ([1], 1)
    assert encoder.post.take(wire.EncodeFailed) == [wire.EncodeFailed(at, "the encoder is stopping") for at in (2, 3)]


def test_what_comes_during_the_last_image_before_an_encoder_closes_is_answered(encoder: Encoder) -> None:
    """A draining encoder says so before its last image; images that arrive during that long one are refused."""
    said, encode = list[tuple[bool, int]](), encoder.tower.encode

    def compute(image: Image) -> torch.Tensor:
        said.append((encoder.worker.load.is_draining, encoder.post.num_beats_at_once))
        encoder.now_s += CLOSES_AFTER_S
        put(encoder, image_of(2))
        return encode(image)

    encoder.tower.encode = compute  # type: ignore[method-assign]
    put(encoder, SCHEDULER, OPEN, image_of(1), StartDrain())
    left, received = iter(range(100)), list[int]()

    def on_round() -> None:
        next(left)
        received.extend(receive(encoder))

    encoder.loop.run(on_round)
    assert (received, said) == ([1], [(True, 1)])
    assert [each.item for each in encoder.post.take(wire.EncodeFailed)] == [2]


@pytest.mark.parametrize(
    "last",
    [
        ConnClosed("s", "scheduler@1", "gone"),
        ConnClosed("p", "prefill-0@1", "gone"),
        Mail("s", "scheduler@1", wire.Sleep(2)),
    ],
    ids=["no scheduler", "no prefill instance", "asleep"],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_an_encoder_that_nobody_can_ask_closes_at_once(encoder: Encoder, last: Event, is_first: bool) -> None:
    """A draining encoder closes at once if it has no scheduler or no prefill instance, or sleeps; it is not woken."""
    drains = [StartDrain(), Mail("s", "scheduler@1", wire.Sleep(0))]
    rounds = iter([*([last], drains)[:: 1 if is_first else -1], [], []])
    put(encoder, SCHEDULER, OPEN)
    encoder.loop.run(lambda: put(encoder, *next(rounds)))
    assert encoder.now_s == 0
    assert encoder.worker.load.sleep_level == (2 if is_first and isinstance(last, Mail) else 0)


def test_a_scheduler_that_connects_to_an_encoder_that_drains_hears_so_at_once(encoder: Encoder) -> None:
    step(encoder, SCHEDULER, OPEN, StartDrain())
    before = encoder.post.num_beats_at_once
    step(encoder, ConnOpened("t", "scheduler-1@1", "scheduler"))
    assert encoder.post.num_beats_at_once == before + 1
