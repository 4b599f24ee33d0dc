"""An encoder itself: images in, features out, and what it refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from pd_cluster import wire
from pd_cluster.engine.drain import CLOSES_AFTER_S
from pd_cluster.engine.encode.worker import MOST_WAITING, EncodeWorker
from pd_cluster.engine.handover.events import ConnClosed, ConnOpened, Event, Mail, StartDrain
from pd_cluster.transport.features import Sealed, fetch
from pd_cluster.types import Image
from tests.support.encoder_values import FEATURES, OPENING, PLACE, SHAPE, TERMS, UP, A, B
from tests.support.mail import RecordedMail


class Tower:
    """Counts what it computes."""

    def __init__(self) -> None:
        self.num_encoded = 0
        self.rules = SimpleNamespace(problem=lambda image: "" if image.num_rows == 2 else "too many rows")

    def encode(self, image: Image) -> torch.Tensor:
        self.num_encoded += 1
        return FEATURES + len(image.pixels)


class Encoder:
    def __init__(self, num_kept_tokens: int = 100) -> None:
        self.now_s = 0.0
        self.addresses: list[str] = []  # of the server that gives features
        self.num_loads = 0  # of the tower, after sleep
        self.post, self.tower, inbox = RecordedMail(), Tower(), queue.SimpleQueue[Event]()
        tower: Any = self.tower
        self.worker = EncodeWorker(tower, TERMS, self.post, inbox, num_kept_tokens, 30.0, self.load, lambda: self.now_s)

    def load(self) -> Any:
        self.num_loads += 1
        return self.tower


def mail(body: wire.Body, conn: str = "p") -> Mail:
    return Mail(conn, "prefill-0@1", body)


OPEN = mail(OPENING)


def step(encoder: Encoder, *events: Event) -> None:
    """As many rounds of the loop as it takes until nothing is queued."""
    for event in events:
        encoder.worker.inbox.put(event)
    encoder.worker.turn(wait_s=0.0)
    while encoder.worker.load.num_running:
        encoder.worker.turn(wait_s=0.0)


@pytest.fixture
def encoder() -> Any:
    made = Encoder()
    yield made
    made.worker.close()


@pytest.fixture
def small() -> Any:
    made = Encoder(num_kept_tokens=SHAPE[1])
    yield made
    made.worker.close()


def test_an_image_is_computed_once_and_offered_each_time(encoder: Encoder) -> None:
    ask = wire.Encode(1, A, Image(2, 2, b"pp"), 10.0)
    step(encoder, OPEN, mail(ask), mail(replace(ask, item=2)))
    (answer,) = encoder.post.take(wire.EncoderAnswer)
    one, other = encoder.post.take(wire.EncodeDone)
    assert (one.item, other.item, one.checksum) == (1, 2, other.checksum)
    for done in (one, other):
        found = fetch(answer.address, done.token, SHAPE, torch.float32, PLACE.checksum, done.checksum, 5)
        assert torch.equal(found, FEATURES + 2)
    step(encoder)
    assert encoder.tower.num_encoded == 1
    load = encoder.worker.load
    assert (load.num_encoded_images, load.num_encoded_hits) == (1, 1)
    assert load.links == {"prefill-0@1": UP}


def test_what_is_refused(encoder: Encoder) -> None:
    ask = wire.Encode(1, A, Image(2, 2, b"pp"), 10.0)
    step(encoder, mail(ask))
    assert encoder.post.sent == [], "nobody who has not opened is answered"
    step(encoder, OPEN, mail(replace(ask, image=Image(3, 2, b"pp"))), mail(replace(ask, image=Image(2, 2))))
    assert [each.reason for each in encoder.post.take(wire.EncodeFailed)] == ["too many rows", "it came without pixels"]
    put(encoder, *(mail(replace(ask, item=at)) for at in range(MOST_WAITING + 1)))
    step(encoder, ConnClosed("p", "prefill-0@1", "gone"))
    (full,) = encoder.post.take(wire.EncodeFailed)
    assert full == wire.EncodeFailed(MOST_WAITING, f"{MOST_WAITING} images wait at the encoder")
    assert encoder.tower.num_encoded == 0
    other = mail(replace(OPENING, model_identity="another"), "q")
    step(encoder, other)
    assert "another model" in encoder.post.take(wire.EncoderAnswer)[-1].problem


def test_offers_end(encoder: Encoder) -> None:
    """By their lease, an abort, and the end of the connection."""
    step(encoder, OPEN)
    for at, end in enumerate[Callable[[], object]](
        (
            lambda: setattr(encoder, "now_s", encoder.now_s + 31.0),
            lambda: put(encoder, mail(wire.EncodeAbort([1]))),
            lambda: put(encoder, ConnClosed("p", "prefill-0@1", "gone")),
        )
    ):
        kept = num_files()
        step(encoder, mail(wire.Encode(at, bytes([at]) * 32, Image(2, 2, b"pp"), 10.0)))
        assert len(encoder.post.take(wire.EncodeDone)) == 1
        assert num_files() == kept + 2, "one that is kept, and one that is offered"
        end()
        step(encoder)
        assert num_files() == kept + 1


def num_files() -> int:
    """Counts the open files of features."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the listing itself
            found += "pd-cluster-features" in os.readlink(each)
    return found


def test_the_store_is_bounded(encoder: Encoder) -> None:
    small = Encoder(num_kept_tokens=2 * SHAPE[1])
    try:
        before = num_files()
        step(small, OPEN)
        for at in (1, 2, 3, 2, 1):
            step(small, mail(wire.Encode(at, bytes([at]) * 32, Image(2, 2, b"pp"), 10.0)))
        assert small.tower.num_encoded == 4, "2 was kept, 1 was not"
        step(small, ConnClosed("p", "prefill-0@1", "gone"))
        assert num_files() == before + 2
    finally:
        small.worker.close()
    assert num_files() == before, "every file is closed"


def test_an_image_larger_than_the_store_leaves_it_alone(small: Encoder) -> None:
    encoder = small
    large = torch.zeros(SHAPE[0], SHAPE[1] + 1, SHAPE[2])
    step(encoder, OPEN, mail(wire.Encode(1, A, Image(2, 2, b"pp"), 10.0)))
    encoder.tower.encode = lambda image: large  # type: ignore[method-assign]
    step(encoder, mail(wire.Encode(2, B, Image(2, 2, b"pp"), 10.0)))
    assert [each.item for each in encoder.post.take(wire.EncodeDone)] == [1, 2]
    step(encoder, mail(wire.Encode(3, A, Image(2, 2, b"pp"), 10.0)))
    assert encoder.worker.load.num_encoded_hits == 1


def test_an_image_that_cannot_be_computed_or_given_ends_no_encoder(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception) -> Any:
        raise error

    step(encoder, OPEN, mail(wire.Encode(1, A, Image(2, 2, b"pp"), 10.0)))
    before = num_files()
    full = OSError(errno.EMFILE, "Too many open files")
    with monkeypatch.context() as patch:
        patch.setattr(Sealed, "twin", lambda sealed: fail(full))
        step(encoder, *(mail(wire.Encode(2 + at, key, Image(2, 2, b"pp"), 10.0)) for at, key in enumerate((A, B))))
        patch.setattr(encoder.tower, "encode", lambda image: fail(torch.OutOfMemoryError("no memory")))
        step(encoder, mail(wire.Encode(4, B, Image(2, 2, b"pp"), 10.0)))
        patch.setattr(encoder.tower, "encode", lambda image: fail(torch.AcceleratorError("the device is lost")))
        with pytest.raises(torch.AcceleratorError):
            step(encoder, mail(wire.Encode(5, B, Image(2, 2, b"pp"), 10.0)))
    assert num_files() == before
    assert encoder.post.take(wire.EncodeFailed) == [
        wire.EncodeFailed(2, "the encoder has no room: Too many open files"),
        wire.EncodeFailed(3, "the encoder has no room: Too many open files"),
        wire.EncodeFailed(4, "the encoder cannot compute it: no memory"),
    ]
    step(encoder, mail(wire.Encode(6, A, Image(2, 2, b"pp"), 10.0)))
    assert [each.item for each in encoder.post.take(wire.EncodeDone)] == [1, 6]


def test_sleep_adapters_and_an_empty_store(encoder: Encoder) -> None:
    step(encoder, ConnOpened("s", "scheduler@1", "scheduler"), OPEN)
    adapters = wire.WantedAdapters([wire.AdapterPlace("l" * 64, "/a")])
    step(encoder, mail(wire.Encode(1, A, Image(2, 2, b"pp"), 10.0)))
    step(encoder, mail(adapters, "s"), mail(wire.ResetCache(), "s"))
    assert encoder.post.take(wire.AdapterStates) == [wire.AdapterStates(["l" * 64])]
    step(encoder, mail(wire.Sleep(2), "s"))
    step(encoder, mail(wire.Encode(2, A, Image(2, 2, b"pp"), 10.0)))
    assert encoder.post.take(wire.EncodeFailed)[0].reason == "the encoder sleeps"
    step(encoder, mail(wire.Sleep(0), "s"))
    step(encoder, mail(wire.Encode(3, A, Image(2, 2, b"pp"), 10.0)))
    assert [each.item for each in encoder.post.take(wire.EncodeDone)] == [1, 3]
    assert (encoder.worker.load.num_cache_resets, encoder.worker.load.num_encoded_hits) == (1, 0)
    assert encoder.num_loads == 1, "level 2 has dropped the tower"


# ---- the end

SCHEDULER = ConnOpened("s", "scheduler@1", "scheduler")


def ask_for(item: int) -> Mail:
    return mail(wire.Encode(item, bytes([item]) * 32, Image(2, 2, b"pp"), 10.0))


def put(encoder: Encoder, *events: Event) -> None:
    for event in events:
        encoder.worker.inbox.put(event)


def receive(encoder: Encoder) -> list[int]:
    """Takes the features that are offered, as a prefill instance does. Returns their items."""
    done = encoder.post.take(wire.EncodeDone)
    encoder.addresses += [each.address for each in encoder.post.take(wire.EncoderAnswer)]
    for each in done:
        fetch(encoder.addresses[-1], each.token, SHAPE, torch.float32, PLACE.checksum, each.checksum, 5)
    return [each.item for each in done]


def test_an_image_that_crosses_the_word_of_a_drain_is_computed(encoder: Encoder) -> None:
    """Prefill asked before its scheduler heard; what comes later is refused, and the encoder ends."""
    rounds, received = iter(range(100)), list[int]()
    put(encoder, SCHEDULER, OPEN, StartDrain())

    def came_round() -> None:
        match next(rounds):
            case 0:
                assert (encoder.worker.load.is_draining, encoder.post.num_beats_at_once) == (True, 1)
            case 1:
                encoder.now_s += CLOSES_AFTER_S / 2
                put(encoder, ask_for(1))
            case 3:
                encoder.now_s += CLOSES_AFTER_S / 2
                put(encoder, ask_for(2))
            case 5:
                received.extend(receive(encoder))  # nothing is left
                put(encoder, ask_for(3))

    encoder.worker.run(came_round)
    assert (received, encoder.tower.num_encoded) == ([1], 1)
    assert encoder.post.take(wire.EncodeFailed) == [wire.EncodeFailed(item, "the encoder stops") for item in (2, 3)]


def test_what_comes_during_the_last_image_before_an_encoder_closes_is_answered(encoder: Encoder) -> None:
    """The image takes longer than others are taken; the encoder says before it that it drains."""
    said, encode = list[tuple[bool, int]](), encoder.tower.encode

    def compute(image: Image) -> torch.Tensor:
        said.append((encoder.worker.load.is_draining, encoder.post.num_beats_at_once))
        encoder.now_s += CLOSES_AFTER_S
        put(encoder, ask_for(2))
        return encode(image)

    encoder.tower.encode = compute  # type: ignore[method-assign]
    put(encoder, SCHEDULER, OPEN, ask_for(1), StartDrain())
    left, received = iter(range(100)), list[int]()

    def came_round() -> None:
        next(left)
        received.extend(receive(encoder))

    encoder.worker.run(came_round)
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
    """Also if they go while it drains; and one that sleeps is not woken."""
    drains = [StartDrain(), Mail("s", "scheduler@1", wire.Sleep(0))]
    rounds = iter([*([last], drains)[:: 1 if is_first else -1], [], []])
    put(encoder, SCHEDULER, OPEN)
    encoder.worker.run(lambda: put(encoder, *next(rounds)))
    assert encoder.now_s == 0
    assert encoder.worker.load.sleep_level == (2 if is_first and isinstance(last, Mail) else 0)


def test_a_scheduler_that_connects_to_an_encoder_that_drains_hears_so_at_once(encoder: Encoder) -> None:
    step(encoder, SCHEDULER, OPEN, StartDrain())
    before = encoder.post.num_beats_at_once
    step(encoder, ConnOpened("t", "scheduler-1@1", "scheduler"))
    assert encoder.post.num_beats_at_once == before + 1
