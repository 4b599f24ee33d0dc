"""The thread that reads features from one encoder, so that no step waits for them. Knows nothing of requests."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.errors import LinkError
from pd_cluster.extras.encoders.feature_events import EncoderReached, EncoderUnreached, FeatureEvent, FeaturesRead
from pd_cluster.extras.encoders.feature_files import SHM, FeatureEndpoint, Shape, fetch, reach
from pd_cluster.extras.encoders.feature_pair import PairReceiver
from pd_cluster.transport.meeting import Meeting

log = logging.getLogger(__name__)

MAX_NBYTES = 1 << 31  # the largest features of an image


class FeatureReader:
    """Reads features in order. First reports whether the encoder is reached, and then an event for each item.

    `post` sends a message to the encoder.
    """

    def __init__(
        self,
        conn: str,
        answer: wire.EncoderAnswer,
        place: FeatureEndpoint,
        post: Callable[[wire.Body], None],
        report: Callable[[FeatureEvent], None],
    ) -> None:
        self.meeting = Meeting(place.connect_s, lambda key, value: post(wire.LinkValue(answer.transport, key, value)))
        self._conn, self._answer, self._place, self._post, self._report = conn, answer, place, post, report
        self._wanted: queue.SimpleQueue[tuple[wire.EncodeDone, Shape | None] | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._pair: PairReceiver | None = None
        threading.Thread(target=self._run, name="features", daemon=True).start()

    def read(self, done: wire.EncodeDone, shape: Shape | None) -> None:
        """Reads features; `FeaturesRead` follows unless this reader is closed. `shape` None: they are not needed."""
        self._wanted.put((done, shape))

    def close(self) -> None:
        """Stops reading. Does not wait for the thread."""
        self._is_closed.set()
        self._wanted.put(None)

    def _run(self) -> None:
        try:
            self._tell(EncoderReached(self._conn, self._open()))
            while (wanted := self._wanted.get()) is not None and not self._is_closed.is_set():
                done, shape = wanted
                if self._pair is not None:
                    self._receive(self._pair, done, shape)
                elif shape is not None:
                    self._fetch(done, shape)
        except LinkError as error:
            self._tell(EncoderUnreached(self._conn, str(error), error.retry))
        except Exception as error:  # otherwise the link would look alive without its thread
            log.exception("the link to an encoder has failed")
            self._tell(EncoderUnreached(self._conn, f"the link has failed: {error}", True))
        finally:
            if self._pair is not None:
                self._pair.close()

    def _open(self) -> wire.TransportName:
        """Reaches the encoder. Returns the transport for features. Raises LinkError."""
        address, group, place = self._answer.address, self._answer.group, self._place
        if address:
            try:
                reach(address, place.connect_s)
                return SHM
            except LinkError as error:
                if error.retry or not group:
                    raise
        self._post(wire.EncoderMeet())
        self._pair = PairReceiver(group, self._answer.transport, self.meeting, place)
        return self._answer.transport

    def _fetch(self, done: wire.EncodeDone, shape: Shape) -> None:
        place = self._place
        try:
            features = fetch(self._answer.address, done.token, shape, place.checksum, done.checksum, place.connect_s)
        except Exception as error:  # only this image fails, because each has its own connection
            self._tell(FeaturesRead(done.item, None, str(error) or type(error).__name__))
        else:
            self._tell(FeaturesRead(done.item, features))

    def _receive(self, pair: PairReceiver, done: wire.EncodeDone, shape: Shape | None) -> None:
        """Receives the next payload from the pair, even if it is no longer needed. Raises LinkError."""
        if not 0 < done.nbytes <= MAX_NBYTES or (shape is not None and shape.nbytes != done.nbytes):
            raise LinkError(f"the encoder announces {done.nbytes} bytes of features", retry=True)
        payload = pair.receive(done.nbytes)
        if shape is None:
            return
        if self._place.checksum.of(payload) != done.checksum:
            self._tell(FeaturesRead(done.item, None, "the encoder's features do not have the announced checksum"))
            return
        self._tell(FeaturesRead(done.item, payload.view(shape.dtype).reshape(shape.sizes)))

    def _tell(self, event: FeatureEvent) -> None:
        if not self._is_closed.is_set():
            self._report(event)
