"""Replays past batches of KV events over a ROUTER that never blocks, even for slow readers.

A reader receives one replay after another, and one end mark for each of its requests.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import zmq

log = logging.getLogger(__name__)

SEQUENCE_NBYTES = 8
END = (-1).to_bytes(SEQUENCE_NBYTES, "big", signed=True)  # the sequence number of the frame that ends a replay
MOST_REPLAYS, MOST_OF_READER = 64, 2  # replays under way: in total, and for one reader
REPLAY_S, WHOLE_REPLAY_S = 10.0, 60.0  # the times within which a reader must take a batch, and all batches


def frames_of(topic: bytes, number: int, payload: bytes) -> list[bytes]:
    return [topic, number.to_bytes(SEQUENCE_NBYTES, "big"), payload]


@dataclass(slots=True)
class _Replay:
    """Past batches that are being sent to a reader.

    `due`: the sequence number of the next batch, below `stop`; None: only end marks remain. `num_ends`: end marks to
    send, one for this request and one for each later request that was refused. `until_s`: the deadline for the reader
    to take a batch; `end_s`: the deadline for all batches.
    """

    client: bytes
    due: int | None
    stop: int
    until_s: float
    end_s: float
    num_ends: int = 1


class EventReplays:
    """`past`: (sequence number, batch), appended by its owner. `under_way`: replays in the order of their requests."""

    def __init__(self, topic: bytes, past: deque[tuple[int, bytes]]) -> None:
        self._topic, self._past = topic, past
        self.under_way: list[_Replay] = []

    def begin(self, socket: Any, client: bytes, number: int) -> None:
        """Begins a replay of the retained batches from a sequence number on.

        A request over the limit gets only its end mark, after the reader's current replays.
        """
        own, now_s = [each for each in self.under_way if each.client == client], time.monotonic()
        stop = self._past[-1][0] + 1 if self._past else 0
        replay = _Replay(client, number, stop, now_s + REPLAY_S, now_s + WHOLE_REPLAY_S)
        num_all, num_own = len(self.under_way), len(own)
        if num_own < MOST_OF_READER and num_all < MOST_REPLAYS:
            self.under_way.append(replay)
            return
        log.warning("refused a replay of KV events: %d are under way, %d of them to its reader", num_all, num_own)
        if own:
            own[-1].num_ends += 1
            return
        replay.due = None
        with contextlib.suppress(zmq.Again):
            self._try(socket, replay)

    def send(self, socket: Any) -> None:
        """Sends replays under way while the readers' queues have room."""
        waiting: list[_Replay] = []
        has_time: dict[bytes, bool] = {}  # reader -> whether it still has time, for readers whose queues are full
        for replay in self.under_way:
            now_s = time.monotonic()
            if replay.client in has_time:
                replay.until_s = now_s + REPLAY_S  # its time begins when earlier replays to this client have ended
            else:
                try:
                    self._try(socket, replay)
                    continue
                except zmq.Again:
                    has_time[replay.client] = now_s < min(replay.until_s, replay.end_s)
                    if not has_time[replay.client]:
                        slow = (
                            "cancelled a replay of KV events: its reader took nothing for %g s, or not all within %g s"
                        )
                        log.warning(slow, REPLAY_S, WHOLE_REPLAY_S)
            if has_time[replay.client]:
                waiting.append(replay)
        self.under_way = waiting

    def _try(self, socket: Any, replay: _Replay) -> None:
        """Sends a part if the reader is still connected. Raises zmq.Again while its queue is full."""
        try:
            if replay.due is not None:
                for number, payload in self._since(replay.due, replay.stop):
                    frames = frames_of(self._topic, number, payload)
                    socket.send_multipart([replay.client, b"", *frames], zmq.NOBLOCK)
                    replay.due, replay.until_s = number + 1, time.monotonic() + REPLAY_S
                replay.due = None
            while replay.num_ends:
                socket.send_multipart([replay.client, b"", b"", END, b""], zmq.NOBLOCK)
                replay.num_ends -= 1
        except zmq.Again:
            raise
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def _since(self, number: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yields the retained batches from a sequence number on."""
        if self._past:
            most = max(0, self._past[-1][0] - number + 1)  # an upper bound: sequence numbers may be missing
            for each in islice(self._past, max(0, len(self._past) - most), None):
                if number <= each[0] < stop:
                    yield each
