"""What happens to each transfer on a worker, noted where it happens and told to schedulers now and then.

`Tracer` may be used from any thread; `LegNotes` is the engine's thread's own. Knows nothing of who reads the events or
of other processes' clocks; the names of the events are in docs/protocol.md.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.types import Note, Request

MAX_EVENTS = 20_000  # of all transfers, between two messages to a scheduler; after that the oldest are lost


class Tracer:
    """A bounded list of events. To note one costs an append: nothing is counted, looked up or waited for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: deque[tuple[str, float, str, dict[str, int]]] = deque(maxlen=MAX_EVENTS)

    def note(self, transfer_id: str, what: str, **numbers: int) -> None:
        self._noted.append((transfer_id, self._clock(), what, numbers))

    def drain(self) -> list[wire.TraceEvent]:
        """What was noted since the last time, in the order of noting. For one thread; others may note meanwhile."""
        noted = self._noted
        return [wire.TraceEvent(*noted.popleft()) for _ in range(len(noted))]


class LegNotes:
    """A leg's own events, from its coming to its end, which is noted once whatever it was."""

    def __init__(self, note: Note, clock: Callable[[], float]) -> None:
        self._note = note
        self._clock = clock
        self._failed: set[str] = set()  # legs that have failed and not ended
        self._num_tokens: defaultdict[str, int] = defaultdict(int)  # output tokens of ended sequences, by leg

    def submitted(self, request: Request, problem: str | None) -> None:
        self._note(request.transfer_id, "submitted")
        if problem is not None:
            self._note(request.transfer_id, "failed")

    def admitted(self, request: Request) -> None:
        num_tokens, num_cached = len(request.prompt_token_ids), max(0, request.num_cached_tokens)
        self._note(request.transfer_id, "admitted", num_tokens=num_tokens, num_cached=num_cached)

    def computed(self, chunks: list[tuple[Request, int]], started_s: float) -> None:
        """After a step of a prefill instance, which took from `started_s` until now."""
        took_us = round((self._clock() - started_s) * 1e6)
        for request, num_tokens in [chunk for chunk in chunks if chunk[0].leg == "prefill"]:
            stop = request.num_computed_tokens
            self._note(request.transfer_id, "chunk", start=stop - num_tokens, stop=stop, took_us=took_us)
            if request.output_token_ids:
                self._note(request.transfer_id, "first token")

    def joined(self, request: Request, num_ended: int) -> None:
        """Its sequences begin to decode, but for those that have ended with token one."""
        self._num_tokens[request.leg_key] += num_ended
        self._note(request.transfer_id, "decode start")

    def failed(self, request: Request) -> None:
        self._failed.add(request.leg_key)
        self._note(request.transfer_id, "failed")

    def ended(self, request: Request, is_last: bool) -> None:
        """A sequence has ended; with the last one its leg has."""
        key = request.leg_key
        self._num_tokens[key] += len(request.output_token_ids)
        if is_last:
            num_tokens = self._num_tokens.pop(key)
            if key not in self._failed:
                self._note(request.transfer_id, "finished", num_tokens=num_tokens)
            self._failed.discard(key)
