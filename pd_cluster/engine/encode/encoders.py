"""Images of a prefill instance's legs that encoders compute. State × event tables in docs/protocol.md.

A leg is held until each of its images is here, or has failed; then it begins, and the step computes what has failed.
Runs on the engine's thread. Knows nothing of how features travel.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from pd_cluster import wire
from pd_cluster.engine.encode.encoder_links import EncoderLinks, EncoderTerms
from pd_cluster.engine.handover.links import Post
from pd_cluster.engine.held_legs import HeldLeg, with_rest
from pd_cluster.engine.legs import request_of
from pd_cluster.engine.step.limits import EngineLimits
from pd_cluster.engine.step.scheduler import StepScheduler
from pd_cluster.errors import told
from pd_cluster.model.image_rows import feature_key
from pd_cluster.model.vision.tower import Tower
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.events import EncoderReached, EncoderUnreached, FeatureEvent, FeaturesRead
from pd_cluster.transport.feature_reader import Shape
from pd_cluster.types import Image, Request

log = logging.getLogger(__name__)
MOST_WAIT = 6  # times --encode-timeout, for an image whose encoder is busy with others
MOST_ASKED_TOKENS = 32_768  # of images that are asked for, or here and not used yet


@dataclass(slots=True)
class _Ask:
    """An image that an encoder computes. `legs`: keys of those that asked; `is_read`: its features are on the way."""

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
    images: set[bytes]  # keys of those that it waits for


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of a worker that this needs. `begin` begins a leg; `is_here(leg_key)`: it has begun and not ended."""

    tower: Callable[[], Tower | None]
    scheduler: StepScheduler
    limits: EngineLimits
    begin: Callable[[str, wire.Submit], None]
    is_here: Callable[[str], bool]


class Encoders:
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
        self.links = EncoderLinks(terms, post, report, self._lost, clock, timeouts)
        self._asks: dict[bytes, _Ask] = {}  # by ImagePart.key
        self._held: list[_WaitingLeg] = []
        self._landed_for: dict[bytes, set[str]] = {}  # keys of legs, by those of images in `Tower.landed`
        self._items = itertools.count(1)
        self._num_landed = self._num_fallbacks = self._landed_nbytes = 0
        self._waited_s = 0.0

    def __len__(self) -> int:
        """Counts legs that are held."""
        return len(self._held)

    def counted(self, load: wire.Load, schedulers: Mapping[str, str]) -> wire.Load:
        """Returns the load with the legs that are held here, and what encoders did. `schedulers`: by connection."""
        outstanding = dict(load.outstanding)
        for held in self._held:
            if (name := schedulers.get(held.leg.conn, "")) in outstanding:
                outstanding[name] += held.leg.submit.weight
        return msgspec.structs.replace(
            load,
            num_waiting=load.num_waiting + len(self._held),
            outstanding=outstanding,
            links={**load.links, **self.links.states()},
            num_landed_images=self._num_landed,
            num_encoder_fallbacks=self._num_fallbacks,
            encoder_wait_s=self._waited_s,
            feature_nbytes=self._landed_nbytes,
        )

    # ---- legs

    def admits(self, conn: str, submit: wire.Submit) -> bool:
        """Whether a leg may begin; otherwise it is held, and `begin` follows."""
        tower, images = self._engine.tower(), submit.order.images
        if tower is None or submit.leg == "decode" or not images or len(submit.encoders) != len(images):
            return True
        now_s = self._clock()
        request = request_of(submit, conn, now_s)
        if self._engine.limits.problem(request, submit.resumed) is not None:  # it will be refused
            return True
        waits = self._ask_for(request, submit.encoders, tower)
        if not waits:
            return True
        expires_s = now_s + submit.deadline_s if submit.deadline_s else math.inf
        self._held.append(_WaitingLeg(HeldLeg(conn, submit, expires_s), request.leg_key, waits))
        return False

    def _ask_for(self, request: Request, encoders: Sequence[str], tower: Tower) -> set[bytes]:
        """Asks for a request's images that are not here. Returns the keys of those to wait for."""
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
                conn, num_tokens = self.links.conn_to(encoder), span.stop - span.start
                if not conn or not self._has_room_for(num_tokens, tower):
                    continue
                ask = _Ask(next(self._items), conn, image, num_tokens, self._clock())
                self._asks[key] = ask
                self._post.send(conn, wire.Encode(ask.item, key, image, MOST_WAIT * self._timeouts.encode_timeout_s))
            self._asks[key].legs.add(leg)
            waits.add(key)
        return waits

    def _num_cached(self, request: Request) -> int:
        """Counts the tokens at the prompt's beginning whose KV cache is here."""
        scheduler = self._engine.scheduler
        blocks, num = scheduler.blocks, 0
        for each in scheduler.prompt_hashes(request):
            if each not in blocks and (blocks.tier is None or each not in blocks.tier):
                break
            num += 1
        return num * scheduler.block_size

    def _has_room_for(self, num_tokens: int, tower: Tower) -> bool:
        asked = sum(ask.num_tokens for ask in self._asks.values())
        asked += sum(features.shape[1] for features in tower.landed.values())
        return not asked or asked + num_tokens <= MOST_ASKED_TOKENS

    def abort(self, conn: str, abort: wire.Abort) -> None:
        """Forgets a leg that is held, if its client no longer wants it."""
        key, is_whole = (conn, abort.request_id, abort.attempt), abort.index == -1
        self._forget(lambda held: held.leg.key == key and (is_whole or held.leg.submit.order.sampling.n == 1))

    def client_closed(self, conn: str) -> None:
        """Forgets the legs of a scheduler that is gone."""
        self._forget(lambda held: held.leg.conn == conn)

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
        """Begins every leg that is held."""
        self._release(lambda held: True)

    def _release(self, wanted: Callable[[_WaitingLeg], bool]) -> None:
        for held in self._take(wanted):
            leg = with_rest(held.leg, self._clock())
            self._engine.begin(leg.conn, leg.submit)

    def _take(self, wanted: Callable[[_WaitingLeg], bool]) -> list[_WaitingLeg]:
        taken = [held for held in self._held if wanted(held)]
        self._held = [held for held in self._held if not wanted(held)]
        return taken

    # ---- images

    def _end(self, key: bytes, reason: str = "") -> None:
        """An image is here, or has failed for a reason; legs that wait for nothing else begin."""
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
            self._end(key, event.reason or "this instance sleeps")
            return
        tower.landed[key] = event.features
        self._landed_for[key] = set(ask.legs)
        self._num_landed += 1
        self._waited_s += self._clock() - ask.asked_s
        self._landed_nbytes += event.features.nbytes
        self._end(key)

    def _is_late(self, ask: _Ask, now_s: float) -> bool:
        """Whether the encoder has computed nothing for a while, or its queue is too long."""
        limit_s = self._timeouts.encode_timeout_s
        still_s = now_s - max(ask.asked_s, self.links.progress_s(ask.conn))
        return still_s > limit_s or now_s - ask.asked_s > MOST_WAIT * limit_s

    # ---- events and time

    def set_peers(self, peers: list[wire.PeerInfo]) -> None:
        """Learns which encoders there are; none, while this instance does not prefill."""
        self.links.set_peers(peers)

    def read(self, conn: str, body: wire.Body) -> bool:
        """Handles an encoder's message; False: the message is about something else."""
        match body:
            case wire.Heartbeat(load) if load is not None and self.links.knows(conn):
                self.links.heard(conn, load.num_steps)
            case wire.EncoderAnswer():
                self.links.on_answer(conn, body)
            case wire.EncodeDone():
                found, tower = self._find(body.item, conn), self._engine.tower()
                shape = None
                if found is not None and tower is not None and not found[1].is_read:
                    found[1].is_read = True
                    shape = Shape(tower.shape_of(found[1].image), tower.dtype)
                self.links.fetch(conn, body, shape)
            case wire.EncodeFailed():
                if (found := self._find(body.item, conn)) is not None:
                    self._end(found[0], body.reason)
            case _:
                return False
        return True

    def handle(self, event: FeatureEvent) -> None:
        match event:
            case FeaturesRead():
                self._read(event)
            case EncoderReached() | EncoderUnreached():
                self.links.handle(event)

    def tick(self) -> None:
        """Keeps the deadlines, and drops features that no leg will use."""
        self.links.tick()
        now_s = self._clock()
        for key, ask in [(key, ask) for key, ask in self._asks.items() if self._is_late(ask, now_s)]:
            self._post.send(ask.conn, wire.EncodeAbort([ask.item]))
            self._end(key, f"no features after {now_s - ask.asked_s:.1f} s")
        self._release(lambda held: held.leg.expires_s < now_s)
        tower, here = self._engine.tower(), {held.key for held in self._held}
        for key, legs in list(self._landed_for.items()):
            if tower is None or key not in tower.landed:
                del self._landed_for[key]
            elif not any(leg in here or self._engine.is_here(leg) for leg in legs):
                del tower.landed[key], self._landed_for[key]
