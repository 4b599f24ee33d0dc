"""Holds a leg while the KV of its prompt's beginning is transferred from another prefill instance's caches.

The scheduler names the peer (`wire.PullHint`); docs/protocol/requests.md has the table. A pull that fails or is late
costs only time: the leg begins, and this instance computes the tokens that did not arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from pd_cluster import wire
from pd_cluster.engine.legs.held_legs import HeldLeg, with_rest
from pd_cluster.engine.legs.legs import Legs, request_of
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.stages.stage import Released, Stage, outstanding_with
from pd_cluster.types import Request

MIN_WAIT_S = 0.5  # on a busy host, even a short pull may take this long


@dataclass(slots=True)
class _Pulling:
    """A pull and the leg that waits for it.

    `waits`: the link from the peer is still opening, so `Pull` was not sent yet.
    """

    leg: HeldLeg
    pull: Request
    until_s: float
    waits: bool


class PrefixPulls(Stage):
    def __init__(self, scheduler: StepScheduler, legs: Legs, clock: Callable[[], float]) -> None:
        self._scheduler, self._legs, self._clock = scheduler, legs, clock
        self._imports, self._links = legs.handover.imports, legs.handover.in_links.table
        self._held: dict[str, _Pulling] = {}  # by transfer
        self._released: list[Released] = []
        self.num_pulled_tokens = self.num_failed = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    def counted(self, load: wire.Load, schedulers: Mapping[str, str]) -> wire.Load:
        if not (self._held or self.num_pulled_tokens or self.num_failed):
            return load
        return msgspec.structs.replace(
            load,
            num_waiting=load.num_waiting + len(self._held),
            outstanding=outstanding_with(load, [each.leg for each in self._held.values()], schedulers),
            num_pulled_tokens=self.num_pulled_tokens,
            num_failed_pulls=self.num_failed,
        )

    # ---- legs

    def admits(self, conn: str, submit: wire.Submit) -> bool:
        hint = submit.pull
        if hint is None or submit.leg != "prefill":
            return True
        link = self._links.from_peer(hint.peer)
        if link is None and not hint.wakes:
            return True
        if link is not None and self._links.precision(link):  # exact requests cannot use blocks from an inexact link
            return True
        now_s = self._clock()
        request = request_of(submit, conn, now_s)
        num_known = self._scheduler.num_known_tokens(request)
        num_tokens = min(hint.num_tokens, len(self._scheduler.prompt_hashes(request)) * self._scheduler.block_size)
        if num_tokens <= num_known or f"{submit.transfer_id}.pull" in self._held:
            return True
        pull = _pull_of(submit, num_tokens, num_known)
        expires_s = now_s + submit.deadline_s if submit.deadline_s else math.inf
        until_s = min(now_s + max(MIN_WAIT_S, hint.within_s), expires_s)
        self._held[pull.transfer_id] = _Pulling(HeldLeg(conn, submit, expires_s), pull, until_s, link is None)
        if link is not None:
            self._imports.pull(pull, link)
        return False

    def abort(self, conn: str, abort: wire.Abort) -> None:
        key, is_whole = (conn, abort.request_id, abort.attempt), abort.index == -1
        for held in list(self._held.values()):
            if held.leg.key == key and (is_whole or held.leg.submit.order.sampling.n == 1):
                self._drop(held)

    def closed(self, conn: str, reason: str, was_scheduler: bool) -> None:
        for held in [each for each in self._held.values() if each.leg.conn == conn]:
            self._drop(held)

    def release_all(self) -> None:
        for held in list(self._held.values()):
            self._give_up(held)

    def cache_reset(self, is_external: bool) -> None:
        """Abandons all pulls, because their KV was computed before the reset."""
        self.release_all()

    def tick(self) -> None:
        now_s = self._clock()
        for held in [each for each in self._held.values() if each.until_s < now_s]:
            self._give_up(held)

    def released(self) -> list[Released]:
        for waiting in [each for each in self._held.values() if each.waits]:
            if (link := self._links.from_peer(waiting.pull.peer)) is not None:
                waiting.waits = False
                self._imports.pull(waiting.pull, link)
        ended = self._legs.ended_pulls
        while ended:
            transfer_id, num_tokens = ended.popitem()
            if (held := self._held.pop(transfer_id, None)) is not None:
                self.num_pulled_tokens += num_tokens
                self.num_failed += not num_tokens
                self._release(held)
        released, self._released = self._released, []
        return released

    def _give_up(self, held: _Pulling) -> None:
        self.num_failed += 1
        self._drop(held)
        self._release(held)

    def _drop(self, held: _Pulling) -> None:
        """Stops a pull. Its blocks are freed once nothing writes to them."""
        del self._held[held.pull.transfer_id]
        self._imports.abort(held.pull)

    def _release(self, held: _Pulling) -> None:
        leg = with_rest(held.leg, self._clock())
        self._released.append(Released(leg.conn, leg.submit))


def _pull_of(submit: wire.Submit, num_tokens: int, num_known: int) -> Request:
    """Returns the request for a pull, which lands the first `num_tokens` tokens of a leg's prompt."""
    transfer_id, order = f"{submit.transfer_id}.pull", submit.order.without_pixels()
    assert submit.pull is not None
    pull = Request(transfer_id, order, transfer_id=transfer_id, peer=submit.pull.peer, is_pull=True)
    pull.prompt_token_ids, pull.num_cached_tokens = order.prompt_token_ids[:num_tokens], num_known
    return pull
