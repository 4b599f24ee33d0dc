"""Encoders seen from a prefill instance: which images it requests, and when a leg begins without them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import Event
from pd_cluster.extras.encoders.encoder_stage import MAX_REQUESTED_TOKENS, Encoders, Engine
from pd_cluster.extras.encoders.feature_events import EncoderReached, FeaturesRead
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import RequestSpec
from tests.support.encoder_values import FEATURES, OPENING, SHAPE, TERMS, A, B, C, order_of
from tests.support.mail import RecordedMail


class Blocks(set[bytes]):
    """The hashes of cached blocks."""

    tier = None

    def __init__(self, hashes: set[bytes]) -> None:
        super().__init__()
        self._hashes = hashes

    def __contains__(self, each: object) -> bool:
        return each in self._hashes


def peer(name: str) -> wire.PeerInfo:
    return wire.PeerInfo(name=name, epoch=1, role="encode", host="h", control_port=1, public_key=b"")


class Prefill:
    """P's table of images, with minimal fakes of the vision tower and the scheduler."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.post, self.begun, self.here = RecordedMail(), list[str](), set[str]()
        self.tower = SimpleNamespace(kept={}, landed={}, dtype=torch.float32, shape_of=lambda image: SHAPE)
        self.cached: set[bytes] = set()
        hashes = [b"one", b"two"]
        scheduler: Any = SimpleNamespace(block_size=4, prompt_hashes=lambda request: hashes, blocks=Blocks(self.cached))
        limits: Any = SimpleNamespace(problem=lambda request, resumed: None)
        tower: Any = self.tower
        engine = Engine(lambda: tower, scheduler, limits, self.here)
        self.encoders = Encoders(engine, TERMS, self.post, lambda event: None, lambda: self.now_s, Timeouts())

    def pass_on(self) -> None:
        """Begins legs that the encoders have released, as a worker does after each event."""
        for leg in self.encoders.released():
            self.begun.append(leg.submit.request_id)
            self.here.add(f"{leg.submit.request_id}#{leg.submit.attempt}")

    def handle(self, event: Event) -> None:
        self.encoders.handle(event)
        self.pass_on()

    def read(self, conn: str, body: wire.Body) -> bool:
        is_known = self.encoders.read(conn, body, is_scheduler=False)
        self.pass_on()
        return is_known

    def close(self, conn: str, was_scheduler: bool) -> None:
        self.encoders.closed(conn, "silence", was_scheduler)
        self.pass_on()

    def link(self, *names: str) -> None:
        """Brings links up, without real sockets."""
        self.encoders.set_peers([peer(name) for name in names], is_prefill=True)
        for name in names:
            self.encoders.opened(f"to-{name}", is_scheduler=False)
            self.read(f"to-{name}", wire.EncoderAnswer("", "no-such-socket"))
            self.handle(EncoderReached(f"to-{name}", "shm"))

    def submit(self, request_id: str, order: RequestSpec, *encoders: str, deadline_s: float = 0.0) -> bool:
        keys = [f"{each}@1" if each else "" for each in encoders]
        given = wire.Submit(request_id, 0, "t", "prefill", "decode-0@1", order, deadline_s, [], 1, False, keys)
        return self.encoders.admits("s", given)

    def asked(self) -> list[wire.Encode]:
        return self.post.take(wire.Encode)

    def tick(self, passed_s: float = 0.0) -> None:
        self.now_s += passed_s
        self.encoders.tick()
        self.pass_on()


@pytest.fixture
def prefill() -> Prefill:
    made = Prefill()
    made.link("encode-0", "encode-1")
    return made


def test_a_leg_begins_when_all_its_images_are_here(prefill: Prefill) -> None:
    assert not prefill.submit("r", order_of(A, B), "encode-0", "encode-1")
    one, other = prefill.asked()
    assert (one.key, other.key) == (A, B)
    prefill.handle(FeaturesRead(one.item, FEATURES))
    assert prefill.begun == []
    prefill.handle(FeaturesRead(other.item, FEATURES))
    assert prefill.begun == ["r"]
    assert prefill.tower.landed.keys() == {A, B}
    load = prefill.encoders.counted(wire.Load(), {})
    assert (load.num_landed_images, load.num_encoder_fallbacks, load.feature_nbytes) == (2, 0, 2 * FEATURES.nbytes)
    prefill.tick()
    assert prefill.tower.landed, "the leg waits and will use the features"
    prefill.here.clear()
    prefill.tick()
    assert not prefill.tower.landed, "no leg will use the features"


def test_what_is_here_or_on_its_way_is_not_asked_for_again(prefill: Prefill) -> None:
    prefill.tower.kept[A] = FEATURES
    assert prefill.submit("kept", order_of(A), "encode-0")
    assert not prefill.submit("first", order_of(B), "encode-0")
    assert not prefill.submit("second", order_of(B), "encode-1")
    assert not prefill.submit("another tenant", order_of(B, salt="x"), "encode-0")
    one, others = prefill.asked()
    assert (one.key, others.key) == (B, B + b"x")
    prefill.handle(FeaturesRead(one.item, FEATURES))
    assert prefill.begun == ["first", "second"]
    assert prefill.submit("third", order_of(B), "encode-0"), "the features have landed and wait for a step"


def test_an_image_in_the_prefix_cache_is_not_asked_for(prefill: Prefill) -> None:
    prefill.cached |= {b"one"}
    assert not prefill.submit("r", order_of(A, B), "encode-0", "encode-0")
    assert [ask.key for ask in prefill.asked()] == [B]
    prefill.cached |= {b"two"}
    assert prefill.submit("q", order_of(A, C), "encode-0", "encode-0")


def test_a_failure_of_any_kind_lets_the_leg_begin(prefill: Prefill) -> None:
    for at, fail in enumerate[Callable[[wire.Encode], object]](
        (
            lambda ask: prefill.read("to-encode-0", wire.EncodeFailed(ask.item, "full")),
            lambda ask: prefill.handle(FeaturesRead(ask.item, None, "torn")),
            lambda ask: prefill.tick(Timeouts().encode_timeout_s + 0.1),
            lambda ask: prefill.close("to-encode-0", was_scheduler=False),
        )
    ):
        assert not prefill.submit(f"r{at}", order_of(A), "encode-0")
        (ask,) = prefill.asked()
        prefill.read("to-encode-1", wire.EncodeFailed(ask.item, "not mine"))
        assert len(prefill.begun) == at, "an answer over another link must be ignored"
        fail(ask)
        assert prefill.begun[-1] == f"r{at}"
        assert not prefill.tower.landed
        prefill.handle(FeaturesRead(ask.item, FEATURES))
        assert not prefill.tower.landed, "late features must be dropped"
        assert prefill.encoders.counted(wire.Load(), {}).num_encoder_fallbacks == at + 1
    assert len(prefill.post.take(wire.EncodeAbort)) == 1, "expected the late request"
    assert prefill.submit("down", order_of(A), "encode-0"), "the encoder's link is down"
    assert prefill.encoders.links()["encode-0@1"].phase == "waiting"


def test_a_busy_encoder_has_more_time_than_one_that_stands_still(prefill: Prefill) -> None:
    limit_s = Timeouts().encode_timeout_s
    assert not prefill.submit("r", order_of(A), "encode-0")
    assert not prefill.submit("q", order_of(B), "encode-1")
    for at in range(1, 8):
        prefill.read("to-encode-0", wire.Heartbeat(wire.Load(num_steps=at)))
        prefill.read("to-encode-1", wire.Heartbeat(wire.Load(num_steps=5)))
        prefill.tick(0.9 * limit_s)
        assert ("q" in prefill.begun) == (at > 1)
        assert ("r" in prefill.begun) == (at > 6)


def test_an_aborted_leg_is_forgotten_and_its_images_are_too(prefill: Prefill) -> None:
    assert not prefill.submit("r", order_of(A, B), "encode-0", "encode-0")
    assert not prefill.submit("q", order_of(B), "encode-0")
    one, _ = prefill.asked()
    prefill.encoders.abort("s", wire.Abort("r", 0))
    assert prefill.post.take(wire.EncodeAbort) == [wire.EncodeAbort([one.item])]
    prefill.close("s", was_scheduler=True)
    assert prefill.encoders.num_held == 0
    assert prefill.begun == []


def test_a_legs_own_deadline_and_a_drain_end_its_wait(prefill: Prefill) -> None:
    assert not prefill.submit("r", order_of(A), "encode-0", deadline_s=1.0)
    prefill.tick(1.1)
    assert prefill.begun == ["r"]
    assert not prefill.submit("q", order_of(B), "encode-0")
    prefill.encoders.release_all()
    prefill.pass_on()
    assert prefill.begun == ["r", "q"]


@pytest.mark.parametrize(
    ("num_tokens", "asked"), [(MAX_REQUESTED_TOKENS // 2, [A, B]), (2 * MAX_REQUESTED_TOKENS, [A])]
)
def test_only_so_many_tokens_are_asked_for_at_a_time(prefill: Prefill, num_tokens: int, asked: list[bytes]) -> None:
    assert not prefill.submit("r", order_of(A, B, C, num_tokens=num_tokens), *["encode-0"] * 3)
    assert [ask.key for ask in prefill.asked()] == asked


def test_a_refused_encoder_is_asked_for_nothing() -> None:
    prefill = Prefill()
    prefill.encoders.set_peers([peer("encode-0")], is_prefill=True)
    prefill.encoders.opened("to-encode-0", is_scheduler=False)
    (opening,) = prefill.post.take(wire.EncoderOpen)
    assert (opening.model_identity, opening.transports) == (OPENING.model_identity, ["shm", "dist", "curve"])
    prefill.read("to-encode-0", wire.EncoderAnswer("the encoder serves another model"))
    state = prefill.encoders.links()["encode-0@1"]
    assert (state.phase, state.reason) == ("refused", "the encoder serves another model")
    assert prefill.post.closed == ["to-encode-0"]
    assert prefill.submit("r", order_of(A), "encode-0")
    prefill.encoders.set_peers([], is_prefill=True)
    assert prefill.encoders.links() == {}
