"""An encoder: computes features of images, one at a time. State × event table in docs/protocol/handover.md.

Only the loop's thread computes, and it alone owns the queue and the kept features. The mailbox's thread only passes
values to pairs; the socket's thread only hands out files. Knows nothing of prompts, tokens or KV cache.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import ConnClosed, ConnOpened, Event, Mail
from pd_cluster.engine.handover.links.link_ends import Post
from pd_cluster.engine.lifecycle.availability import Availability
from pd_cluster.engine.lifecycle.engine_sleep import EngineSleep
from pd_cluster.engine.lifecycle.worker_drain import WorkerDrain
from pd_cluster.extras.encoders.encoder_links import EncoderTerms
from pd_cluster.extras.encoders.feature_files import PAIRS, REACH_TOKEN, SHM, FeatureServer, SealedFile
from pd_cluster.extras.encoders.feature_pair import PairSender
from pd_cluster.model.vision.vision_tower import Tower
from pd_cluster.transport.link_events import LinkFailed
from pd_cluster.types import Image, LinkState

log = logging.getLogger(__name__)

TICK_S = 0.1
IDLE_WAIT_S = 0.05
MAX_WAITING = 256  # the most images that are queued or offered; each offer is an open file
MAX_KEPT_IMAGES = 256  # the most images whose features are kept; each is an open file, too


@dataclass(slots=True)
class _Item:
    """An image that a prefill instance waits for. `token` identifies its offer; b"" while the image is queued."""

    conn: str
    number: int
    key: bytes
    image: Image
    until_s: float
    token: bytes = b""


@dataclass(frozen=True, slots=True)
class TowerSource:
    """The loaded tower. `again` loads it after a sleep; None: the encoder never sleeps."""

    tower: Tower
    again: Callable[[], Tower] | None


class EncodeWorker:
    """Computes images for the prefill instances that connect. Implements the loop's Job."""

    def __init__(
        self,
        source: TowerSource,
        terms: EncoderTerms,
        post: Post,
        report: Callable[[Event], None],
        num_kept_tokens: int,
        drain: WorkerDrain,
    ) -> None:
        """`report` passes events of pairs to the loop's thread."""
        self.load = wire.Load()
        self._tower: Tower | None = source.tower
        self._rules, self._load_tower = source.tower.rules, source.again
        self._terms, self._post, self._report, self._clock = terms, post, report, drain.clock
        self._server = FeatureServer()
        self._queue: deque[_Item] = deque()
        self._offers: dict[bytes, _Item] = {}  # by token
        self._kept: OrderedDict[bytes, tuple[SealedFile, int]] = OrderedDict()  # by key, with the number of tokens
        self._num_kept_tokens = num_kept_tokens
        self._peers: dict[str, str] = {}  # name@epoch of prefill instances that have opened a link, by connection
        self._pairs: dict[str, PairSender] = {}  # by connection; the mailbox's thread also reads it
        self._paired_nbytes = 0  # sent over communicators that are now closed
        self._num_hits = self._num_encoded = self._num_resets = 0
        self._encode_s = self._next_tick_s = 0.0
        sleep = EngineSleep(self._go_to_level if source.again is not None else None, self._forget)
        self.state = Availability(drain, sleep, self._peers)

    @property
    def wait_s(self) -> float:
        return 0.0 if self._queue else IDLE_WAIT_S

    @property
    def is_idle(self) -> bool:
        return not self._queue

    @property
    def is_over(self) -> bool:
        return not self._num_waiting

    def flush(self) -> None:
        """Does nothing, because everything is sent at once."""

    def release_all(self) -> None:
        """Does nothing, because nothing is held."""

    def step(self) -> None:
        """Computes one image, if one is queued."""
        if self._queue:
            self.publish()
            self._encode(self._queue.popleft())
        self.publish()

    def close(self) -> None:
        for conn in list(self._pairs):
            self._part(conn)
        self._server.close()
        self._forget()

    @property
    def _num_waiting(self) -> int:
        """Counts images that are queued, or that prefill instances have not received yet."""
        return len(self._queue) + len(self._offers) + sum(map(len, self._pairs.values()))

    # ---- images

    def _encode(self, item: _Item) -> None:
        """Offers an image's features. If they cannot be computed here, the prefill instance computes them."""
        if self._clock() > item.until_s:
            return
        try:
            file = self._features_of(item)
        except OSError as error:
            self._post.send(item.conn, wire.EncodeFailed(item.number, f"no space for the features: {error.strerror}"))
            return
        except torch.AcceleratorError:  # the device is lost, so no image can be computed
            raise
        except Exception as error:  # one image's fault must not end the encoder
            log.exception("an image cannot be computed")
            self._post.send(item.conn, wire.EncodeFailed(item.number, f"the encoder cannot compute it: {error}"))
            return
        if (pair := self._pairs.get(item.conn)) is not None and pair.is_open:
            self._post.send(item.conn, wire.EncodeDone(item.number, REACH_TOKEN, file.nbytes, file.checksum))
            pair.put(file)
            return
        item.token, item.until_s = self._server.offer(file), self._clock() + self._terms.place.transfer_s
        self._offers[item.token] = item
        self._post.send(item.conn, wire.EncodeDone(item.number, item.token, file.nbytes, file.checksum))

    def _features_of(self, item: _Item) -> SealedFile:
        """Returns an image's features; computes them if they were not kept. Raises OSError and the tower's errors."""
        found = self._kept.get(item.key)
        if found is not None:
            file = found[0].duplicate()
            self._kept.move_to_end(item.key)
            self._num_hits += 1
            return file
        assert self._tower is not None  # nothing is queued during sleep
        begun_s = time.monotonic()
        features = self._tower.encode(item.image).cpu().contiguous()
        self._num_encoded += 1
        self._encode_s += time.monotonic() - begun_s
        file = SealedFile.of(features, self._terms.place.checksum)
        try:
            self._keep(item.key, file, features.shape[1])
        except BaseException:
            file.close()
            raise
        return file

    def _keep(self, key: bytes, file: SealedFile, num_tokens: int) -> None:
        """Keeps a copy of an image as the most recently used, if there is space. Raises OSError."""
        if num_tokens > self._num_kept_tokens:
            return  # an image that is too large must not displace the others
        self._kept[key] = file.duplicate(), num_tokens
        while self._kept and (
            sum(num for _, num in self._kept.values()) > self._num_kept_tokens or len(self._kept) > MAX_KEPT_IMAGES
        ):
            _, (dropped, _) = self._kept.popitem(last=False)
            dropped.close()

    def _forget(self) -> None:
        for file, _ in self._kept.values():
            file.close()
        self._kept.clear()

    def _go_to_level(self, level: wire.SleepLevel) -> None:
        assert self._load_tower is not None
        if level == 2:
            self._tower = None
        elif self._tower is None:
            self._tower = self._load_tower()

    def _problem(self, asked: wire.Encode) -> str:
        """Returns why an image is not computed here; "" if it is."""
        if self.state.is_closed:
            return "the encoder is stopping"
        if self.state.sleep.closed:
            return "the encoder is asleep"
        if self._num_waiting >= MAX_WAITING:
            return f"{MAX_WAITING} images already wait at the encoder"
        return self._rules.problem(asked.image) or ("" if asked.image.pixels else "the image came without pixels")

    def _ask(self, conn: str, asked: wire.Encode) -> None:
        if problem := self._problem(asked):
            self._post.send(conn, wire.EncodeFailed(asked.item, problem))
            return
        self._queue.append(_Item(conn, asked.item, asked.key, asked.image, self._clock() + asked.deadline_s))

    def _drop(self, unwanted: Callable[[_Item], bool]) -> None:
        self._queue = deque(item for item in self._queue if not unwanted(item))
        for item in [item for item in self._offers.values() if unwanted(item)]:
            self._server.withdraw(item.token)
            del self._offers[item.token]

    # ---- time and events

    def tick(self) -> None:
        for token in [token for token in self._offers if token not in self._server]:  # received, so no longer offered
            del self._offers[token]
        now_s = self._clock()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._drop(lambda item: bool(item.token) and now_s > item.until_s)

    def publish(self) -> None:
        """Refreshes the load that heartbeats read."""
        told, state = self.load, self.state
        links = {peer: self._link_over(conn) for conn, peer in self._peers.items()}
        paired_nbytes = self._paired_nbytes + sum(pair.sent_nbytes for pair in self._pairs.values())
        self.load = wire.Load(
            num_running=min(1, len(self._queue)),
            num_waiting=max(0, len(self._queue) - 1),
            num_steps=self._num_encoded + self._num_hits,
            num_encoded_images=self._num_encoded,
            image_encode_s=self._encode_s,
            num_encoded_hits=self._num_hits,
            feature_nbytes=self._server.given_nbytes + paired_nbytes,
            num_cache_resets=self._num_resets,
            is_draining=state.drain.has_begun,
            sleep_level=state.sleep.level,
            links=links,
        )
        if (links, state.drain.has_begun, state.sleep.level) != (told.links, told.is_draining, told.sleep_level):
            self._post.beat()
        elif told.shown_now != self.load.shown_now:
            self._post.beat_soon()

    def _link_over(self, conn: str) -> LinkState:
        pair = self._pairs.get(conn)
        return LinkState("up", (pair.transport,) if pair is not None and pair.is_open else (SHM,))

    def handle(self, event: Event) -> None:
        match event:
            case Mail(conn, peer, body) if conn in self.state.schedulers:
                self._read_scheduler(conn, peer, body)
            case Mail(conn, peer, body):
                self._read(conn, peer, body)
            case ConnOpened(conn, peer, "scheduler"):
                self.state.schedulers[conn] = peer
                if self.state.drain.has_begun:
                    self._post.beat()
                log.info("scheduler %s is connected", peer)
            case ConnClosed(conn, peer, _):
                self.state.schedulers.pop(conn, None)
                self._part(conn)
            case LinkFailed(conn, reason) if conn in self._peers:
                log.warning("the pair with %s has failed: %s", self._peers[conn], reason)
                self._part(conn)
                self._post.disconnect(conn)  # the peer notices it, and connects again

    def _part(self, conn: str) -> None:
        """Forgets a prefill instance and all images that it waits for."""
        self._peers.pop(conn, None)
        if (pair := self._pairs.pop(conn, None)) is not None:
            pair.close()
            self._paired_nbytes += pair.sent_nbytes
        self._drop(lambda item: item.conn == conn)

    def _open(self, conn: str, peer: str, asked: wire.EncoderOpen) -> None:
        if problem := self._terms.problem(asked):
            log.error("%s: %s", peer, problem)
            self._post.send(conn, wire.EncoderAnswer(problem))
            return
        self._part(conn)
        self._peers[conn] = peer
        common, group = set(self._terms.ways) & set(asked.transports), ""
        over = next((each for each in PAIRS if each in common), "")
        if over:
            group = secrets.token_hex(16)
            self._pairs[conn] = PairSender(
                group,
                over,
                self._terms.place,
                lambda key, value: self._post.send(conn, wire.LinkValue(over, key, value)),
                lambda reason: self._report(LinkFailed(conn, reason)),
            )
        self._post.send(conn, wire.EncoderAnswer("", self._server.name if SHM in common else "", group, over))

    def intercept(self, conn: str, body: wire.Body) -> bool:
        """Passes link values to the pairs that wait for them. Runs on the mailbox's thread."""
        if not isinstance(body, wire.LinkValue):
            return False
        if (pair := self._pairs.get(conn)) is not None:
            pair.meeting.put(body.key, body.value)
        return True

    def _read_scheduler(self, conn: str, peer: str, body: wire.Body) -> None:
        match body:
            case wire.WantedAdapters(adapters):  # a tower needs no adapters, so all count as loaded
                self._post.send(conn, wire.AdapterStates([each.digest for each in adapters]))
            case wire.ResetCache():
                self._forget()
                self._num_resets += 1
            case wire.Sleep(level):
                self.state.sleep.wish(level)
            case wire.Submit():
                log.warning("a scheduler sent a request, which an encoder cannot serve")
            case _:
                self._read(conn, peer, body)

    def _read(self, conn: str, peer: str, body: wire.Body) -> None:
        match body:
            case wire.EncoderOpen():
                self._open(conn, peer, body)
            case wire.EncoderMeet() if (pair := self._pairs.get(conn)) is not None:
                pair.open()
            case wire.Encode() if conn in self._peers:
                self._ask(conn, body)
            case wire.EncodeAbort(items) if conn in self._peers:
                unwanted = set(items)
                self._drop(lambda item: item.conn == conn and item.number in unwanted)
            case wire.Heartbeat() | wire.Peers() | wire.Abort():
                pass
            case _:
                log.warning("%s sent a %s, which an encoder does not handle", peer, type(body).__name__)
