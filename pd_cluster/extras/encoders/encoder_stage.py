"""Holds a prefill instance's legs while encoders compute their images. Tables in docs/protocol/handover.md.

A leg is held until the encoder has delivered the features of each image or has failed. Then the leg begins, and its
step computes the features that are missing. Runs on the engine's thread. Knows nothing of how features are transferred.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import Event
from pd_cluster.engine.handover.links.link_ends import Post
from pd_cluster.engine.legs.held_legs import HeldLeg, with_rest
from pd_cluster.engine.legs.legs import request_of
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.stages.stage import Released, Stage, outstanding_with
from pd_cluster.engine.step.engine_limits import EngineLimits
from pd_cluster.errors import told
from pd_cluster.extras.encoders.encoder_links import EncoderLinks, EncoderTerms
from pd_cluster.extras.encoders.feature_events import EncoderReached, EncoderUnreached, FeatureEvent, FeaturesRead
from pd_cluster.extras.encoders.feature_files import Shape
from pd_cluster.model.inputs.image_rows import feature_key
from pd_cluster.model.vision.vision_tower import Tower
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import Image, LinkState, Request

log = logging.getLogger(__name__)
MAX_WAIT_FACTOR = 6  # an image whose encoder is busy with others may take this many times --encode-timeout
MAX_REQUESTED_TOKENS = 32_768  # the most tokens of images that are requested, or have landed and are not used yet


@dataclass(slots=True)
class _Ask:
    """An image that an encoder computes. `legs`: keys of legs that need it. `is_read`: its features are being read."""

    item: int
    conn: str
    image: Image
    num_tokens: int
    asked_s: float
    legs: set[str] = field(default_factory=set)
    is_read: bool = False


@dataclass(frozen=True, slots=True)
class _WaitingLeg:
    leg: HeldLeg
    key: str  # Request.leg_key
    images: set[bytes]  # keys of the images that the leg waits for


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of a worker that this stage needs. `legs`: keys of legs that have begun and not ended."""

    tower: Callable[[], Tower | None]
    scheduler: StepScheduler
    limits: EngineLimits
    legs: Container[str]


class Encoders(Stage):
    def __init__(
        self,
        engine: Engine,
        terms: EncoderTerms,
        post: Post,
        report: Callable[[FeatureEvent], None],
        clock: Callable[[], float],
        timeouts: Timeouts,
    ) -> None:
        self._engine, self._post, self._clock, self._timeouts = engine, post, clock, timeouts
        self._links = EncoderLinks(terms, post, report, self._lost, clock, timeouts)
        self._asks: dict[bytes, _Ask] = {}  # by ImagePart.key
        self._held: list[_WaitingLeg] = []
        self._released: list[Released] = []
        self._landed_for: dict[bytes, set[str]] = {}  # image keys in `Tower.landed` -> keys of the legs that need them
        self._items = itertools.count(1)
        self._num_landed = self._num_fallbacks = self._landed_nbytes = 0
        self._waited_s = 0.0

    @property
    def num_held(self) -> int:
        return len(self._held)

    def links(self) -> Mapping[str, LinkState]:
        return self._links.states()

    def counted(self, load: wire.Load, schedulers: Mapping[str, str]) -> wire.Load:
        return msgspec.structs.replace(
            load,
            num_waiting=load.num_waiting + len(self._held),
            outstanding=outstanding_with(load, [held.leg for held in self._held], schedulers),
            num_landed_images=self._num_landed,
            num_encoder_fallbacks=self._num_fallbacks,
            encoder_wait_s=self._waited_s,
            feature_nbytes=self._landed_nbytes,
        )

    # ---- legs

    def admits(self, conn: str, submit: wire.Submit) -> bool:
        tower, images = self._engine.tower(), submit.order.images
        if tower is None or submit.leg == "decode" or not images or len(submit.encoders) != len(images):
            return True
        now_s = self._clock()
        request = request_of(submit, conn, now_s)
        if self._engine.limits.problem(request, submit.resumed) is not None:  # the leg will be refused
            return True
        waits = self._ask_for(request, submit.encoders, tower)
        if not waits:
            return True
        expires_s = now_s + submit.deadline_s if submit.deadline_s else math.inf
        self._held.append(_WaitingLeg(HeldLeg(conn, submit, expires_s), request.leg_key, waits))
        return False

    def _ask_for(self, request: Request, encoders: Sequence[str], tower: Tower) -> set[bytes]:
        """Requests from encoders the features that this instance lacks. Returns the keys of the images to wait for."""
        order, leg = request.order, request.leg_key
        num_cached = self._num_cached(request)
        waits: set[bytes] = set()
        for image, span, encoder in zip(order.images, order.spans, encoders, strict=True):
            key = feature_key(span, order)
            if span.stop <= num_cached or key in tower.kept:
                continue
            if key in tower.landed:
                self._landed_for.setdefault(key, set()).add(leg)
                continue
            if key not in self._asks:
                conn, num_tokens = self._links.conn_to(encoder), span.stop - span.start
                if not conn or not self._has_capacity_for(num_tokens, tower):
                    continue
                ask = _Ask(next(self._items), conn, image, num_tokens, self._clock())
                self._asks[key] = ask
                self._post.send(
                    conn, wire.Encode(ask.item, key, image, MAX_WAIT_FACTOR * self._timeouts.encode_timeout_s)
                )
            self._asks[key].legs.add(leg)
            waits.add(key)
        return waits

    def _num_cached(self, request: Request) -> int:
        """Counts the prompt's leading tokens whose KV is cached here."""
        scheduler = self._engine.scheduler
        blocks, num = scheduler.blocks, 0
        for each in scheduler.prompt_hashes(request):
            if each not in blocks and (blocks.tier is None or each not in blocks.tier):
                break
            num += 1
        return num * scheduler.block_size

    def _has_capacity_for(self, num_tokens: int, tower: Tower) -> bool:
        asked = sum(ask.num_tokens for ask in self._asks.values())
        asked += sum(features.shape[1] for features in tower.landed.values())
        return not asked or asked + num_tokens <= MAX_REQUESTED_TOKENS

    def abort(self, conn: str, abort: wire.Abort) -> None:
        key, is_whole = (conn, abort.request_id, abort.attempt), abort.index == -1
        self._forget(lambda held: held.leg.key == key and (is_whole or held.leg.submit.order.sampling.n == 1))

    def opened(self, conn: str, is_scheduler: bool) -> None:
        if not is_scheduler:
            self._links.on_opened(conn)

    def closed(self, conn: str, reason: str, was_scheduler: bool) -> None:
        if was_scheduler:
            self._forget(lambda held: held.leg.conn == conn)
        self._links.on_closed(conn, reason)

    def meet(self, conn: str, value: wire.LinkValue) -> None:
        self._links.meet(conn, value)

    def _forget(self, wanted: Callable[[_WaitingLeg], bool]) -> None:
        self._take(wanted)
        unwanted: dict[str, list[int]] = {}
        waited_for = {key for held in self._held for key in held.images}
        for key in [key for key in self._asks if key not in waited_for]:
            ask = self._asks.pop(key)
            unwanted.setdefault(ask.conn, []).append(ask.item)
        for conn, items in unwanted.items():
            self._post.send(conn, wire.EncodeAbort(items))

    def release_all(self) -> None:
        self._release(lambda held: True)

    def _release(self, wanted: Callable[[_WaitingLeg], bool]) -> None:
        for held in self._take(wanted):
            leg = with_rest(held.leg, self._clock())
            self._released.append(Released(leg.conn, leg.submit))

    def released(self) -> list[Released]:
        released, self._released = self._released, []
        return released

    def _take(self, wanted: Callable[[_WaitingLeg], bool]) -> list[_WaitingLeg]:
        taken = [held for held in self._held if wanted(held)]
        self._held = [held for held in self._held if not wanted(held)]
        return taken

    # ---- images

    def _end(self, key: bytes, reason: str = "") -> None:
        """Handles an image that has landed, or has failed for `reason`. Legs that wait for no other image begin."""
        del self._asks[key]
        if reason:
            self._num_fallbacks += 1
            log.info("an image is computed here: %s", told(reason))
        for held in self._held:
            held.images.discard(key)
        self._release(lambda held: not held.images)

    def _lost(self, conn: str, reason: str) -> None:
        for key in [key for key, ask in self._asks.items() if ask.conn == conn]:
            self._end(key, reason)

    def _find(self, item: int, conn: str = "") -> tuple[bytes, _Ask] | None:
        found = ((key, ask) for key, ask in self._asks.items() if ask.item == item and conn in ("", ask.conn))
        return next(found, None)

    def _read(self, event: FeaturesRead) -> None:
        found, tower = self._find(event.item), self._engine.tower()
        if found is None:
            return
        key, ask = found
        if event.features is None or tower is None:
            self._end(key, event.reason or "this instance is asleep")
            return
        tower.landed[key] = event.features
        self._landed_for[key] = set(ask.legs)
        self._num_landed += 1
        self._waited_s += self._clock() - ask.asked_s
        self._landed_nbytes += event.features.nbytes
        self._end(key)

    def _is_late(self, ask: _Ask, now_s: float) -> bool:
        """Whether the encoder has made no progress for too long, or the image has waited too long in its queue."""
        limit_s = self._timeouts.encode_timeout_s
        still_s = now_s - max(ask.asked_s, self._links.progress_s(ask.conn))
        return still_s > limit_s or now_s - ask.asked_s > MAX_WAIT_FACTOR * limit_s

    # ---- events and time

    def set_peers(self, peers: list[wire.PeerInfo], is_prefill: bool) -> None:
        """Sets the list of encoders, which is empty while this instance does not prefill."""
        self._links.set_peers([each for each in peers if each.role == "encode"] if is_prefill else [])

    def read(self, conn: str, body: wire.Body, is_scheduler: bool) -> bool:
        match body:
            case wire.Heartbeat(load) if load is not None and self._links.knows(conn):
                self._links.heard(conn, load.num_steps)
            case wire.EncoderAnswer():
                self._links.on_answer(conn, body)
            case wire.EncodeDone():
                found, tower = self._find(body.item, conn), self._engine.tower()
                shape = None
                if found is not None and tower is not None and not found[1].is_read:
                    found[1].is_read = True
                    shape = Shape(tower.shape_of(found[1].image), tower.dtype)
                self._links.fetch(conn, body, shape)
            case wire.EncodeFailed():
                if (found := self._find(body.item, conn)) is not None:
                    self._end(found[0], body.reason)
            case _:
                return False
        return True

    def handle(self, event: Event) -> bool:
        match event:
            case FeaturesRead():
                self._read(event)
            case EncoderReached() | EncoderUnreached():
                self._links.handle(event)
            case _:
                return False
        return True

    def tick(self) -> None:
        """Applies the deadlines, and drops features that no leg will use."""
        self._links.tick()
        now_s = self._clock()
        for key, ask in [(key, ask) for key, ask in self._asks.items() if self._is_late(ask, now_s)]:
            self._post.send(ask.conn, wire.EncodeAbort([ask.item]))
            self._end(key, f"no features after {now_s - ask.asked_s:.1f} s")
        self._release(lambda held: held.leg.expires_s < now_s)
        tower, here = self._engine.tower(), {held.key for held in self._held}
        for key, legs in list(self._landed_for.items()):
            if tower is None or key not in tower.landed:
                del self._landed_for[key]
            elif not any(leg in here or leg in self._engine.legs for leg in legs):
                del tower.landed[key], self._landed_for[key]
