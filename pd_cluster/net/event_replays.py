"""Sends past batches of KV events again, to readers that are slow as well, over a ROUTER that never waits.

A reader gets one replay after the other, and as many end marks as it has made requests.
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
END = (-1).to_bytes(SEQUENCE_NBYTES, "big", signed=True)  # the sequence of the frame that ends a replay
MOST_REPLAYS, MOST_OF_READER = 64, 2  # under way, and one reader's of them
REPLAY_S, WHOLE_REPLAY_S = 10.0, 60.0  # in which a reader of past batches takes some, and all


def frames_of(topic: bytes, number: int, payload: bytes) -> list[bytes]:
    return [topic, number.to_bytes(SEQUENCE_NBYTES, "big"), payload]


@dataclass(slots=True)
class _Replay:
    """Past batches on their way to a reader. `due`: the number of the next, below `stop`; None: the end marks.

    `num_ends`: one for this request, and one for each that was refused to this reader since. `until_s`: when the reader
    has taken something, at the latest; `end_s`: when it has all.
    """

    client: bytes
    due: int | None
    stop: int
    until_s: float
    end_s: float
    num_ends: int = 1


class Replays:
    """`past`: number and batch; its owner adds to it. `under_way`: in the order of their requests."""

    def __init__(self, topic: bytes, past: deque[tuple[int, bytes]]) -> None:
        self._topic, self._past = topic, past
        self.under_way: list[_Replay] = []

    def begin(self, socket: Any, client: bytes, number: int) -> None:
        """Begins a replay of what is there from a number on.

        One too many is only its end mark, behind what the reader gets already.
        """
        own, now_s = [each for each in self.under_way if each.client == client], time.monotonic()
        stop = self._past[-1][0] + 1 if self._past else 0
        replay = _Replay(client, number, stop, now_s + REPLAY_S, now_s + WHOLE_REPLAY_S)
        num_all, num_own = len(self.under_way), len(own)
        if num_own < MOST_OF_READER and num_all < MOST_REPLAYS:
            self.under_way.append(replay)
            return
        log.warning("a request for past KV events gets none: %d are under way, %d to its reader", num_all, num_own)
        if own:
            own[-1].num_ends += 1
            return
        replay.due = None
        with contextlib.suppress(zmq.Again):
            self._try(socket, replay)

    def go_on(self, socket: Any) -> None:
        """Sends what is under way, as far as the readers' queues have room."""
        waiting: list[_Replay] = []
        has_time: dict[bytes, bool] = {}  # each reader whose queue is full
        for replay in self.under_way:
            now_s = time.monotonic()
            if replay.client in has_time:
                replay.until_s = now_s + REPLAY_S  # its turn has not come
            else:
                try:
                    self._try(socket, replay)
                    continue
                except zmq.Again:
                    has_time[replay.client] = now_s < min(replay.until_s, replay.end_s)
                    if not has_time[replay.client]:
                        slow = "a reader of past KV events has taken none for %g s, or not all in %g s: it gets no more"
                        log.warning(slow, REPLAY_S, WHOLE_REPLAY_S)
            if has_time[replay.client]:
                waiting.append(replay)
        self.under_way = waiting

    def _try(self, socket: Any, replay: _Replay) -> None:
        """Sends a part, if the reader is still there. Raises zmq.Again while its queue is full."""
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
        """Yields the batches from a number on that are still there."""
        if self._past:
            most = max(0, self._past[-1][0] - number + 1)  # fewer if numbers are missing
            for each in islice(self._past, max(0, len(self._past) - most), None):
                if number <= each[0] < stop:
                    yield each
