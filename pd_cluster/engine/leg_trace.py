"""Records the events of transfers on a worker, which sends them to schedulers from time to time.

Any thread may use `Tracer`; only the engine's thread uses `LegNotes`. Knows nothing of the events' readers or of other
processes' clocks. docs/protocol/requests.md lists the names of the events.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

from pd_cluster import wire
from pd_cluster.types import Note, Request

MAX_EVENTS = 20_000  # the most events that wait for a message to a scheduler; the oldest are dropped first


class Tracer:
    """A bounded list of events. Recording an event only appends to it, without counting, searching or waiting."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: deque[tuple[str, float, str, dict[str, int]]] = deque(maxlen=MAX_EVENTS)

    def note(self, transfer_id: str, what: str, **numbers: int) -> None:
        self._noted.append((transfer_id, self._clock(), what, numbers))

    def drain(self) -> list[wire.TraceEvent]:
        """Returns the events since the last call, in order. Only one thread may call it, while others record."""
        noted = self._noted
        return [wire.TraceEvent(*noted.popleft()) for _ in range(len(noted))]


class LegNotes:
    """Records the events of legs from arrival to end. The end of a leg is recorded exactly once."""

    def __init__(self, note: Note, clock: Callable[[], float]) -> None:
        self._note = note
        self._clock = clock
        self._failed: set[str] = set()  # legs that have failed but have not ended
        self._num_tokens: defaultdict[str, int] = defaultdict(int)  # output tokens of ended sequences, by leg
        self._drafts: dict[str, tuple[int, int]] = {}  # by leg: drafted and accepted tokens of ended sequences

    def submitted(self, request: Request, problem: str | None) -> None:
        self._note(request.transfer_id, "submitted")
        if problem is not None:
            self._note(request.transfer_id, "failed")

    def admitted(self, request: Request) -> None:
        num_tokens, num_cached = len(request.prompt_token_ids), max(0, request.num_cached_tokens)
        self._note(request.transfer_id, "admitted", num_tokens=num_tokens, num_cached=num_cached)

    def computed(self, chunks: list[tuple[Request, int]], started_s: float) -> None:
        """Records the chunks of a prefill instance's step that ran from `started_s` until now."""
        took_us = round((self._clock() - started_s) * 1e6)
        for request, num_tokens in [chunk for chunk in chunks if chunk[0].leg == "prefill"]:
            stop = request.num_computed_tokens
            self._note(request.transfer_id, "chunk", start=stop - num_tokens, stop=stop, took_us=took_us)
            if request.output_token_ids:
                self._note(request.transfer_id, "first token")

    def joined(self, request: Request, num_ended: int) -> None:
        """Records that the leg's sequences begin to decode, except `num_ended` that ended with their first token."""
        self._num_tokens[request.leg_key] += num_ended
        self._note(request.transfer_id, "decode start")

    def failed(self, request: Request) -> None:
        self._failed.add(request.leg_key)
        self._note(request.transfer_id, "failed")

    def ended(self, request: Request, is_last: bool) -> None:
        """Records the end of a sequence; a leg ends with its last sequence."""
        key = request.leg_key
        self._num_tokens[key] += len(request.output_token_ids)
        if request.num_draft_tokens:
            num_drafted, num_accepted = self._drafts.get(key, (0, 0))
            self._drafts[key] = num_drafted + request.num_draft_tokens, num_accepted + request.num_accepted_tokens
        if is_last:
            numbers = {"num_tokens": self._num_tokens.pop(key)}
            if (drafts := self._drafts.pop(key, None)) is not None:
                numbers["num_drafted"], numbers["num_accepted"] = drafts
            if key not in self._failed:
                self._note(request.transfer_id, "finished", **numbers)
            self._failed.discard(key)
