"""Legs that wait until their adapters are loaded, with their deadlines. Does not know where adapters come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from pd_cluster import wire


@dataclass(frozen=True, slots=True)
class HeldLeg:
    """A leg that waits. `expires_s`: its deadline by the worker's clock; infinite: none."""

    conn: str
    submit: wire.Submit
    expires_s: float

    @property
    def key(self) -> tuple[str, str, int]:
        return self.conn, self.submit.request_id, self.submit.attempt


class HeldLegs:
    """Waiting legs by the digests of their adapters, in order of arrival."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._legs: dict[str, list[HeldLeg]] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._legs

    def __iter__(self) -> Iterator[str]:
        """Yields the digests of adapters that legs wait for."""
        return iter(list(self._legs))

    def owners(self, digest: str) -> set[bytes]:
        """Returns the owners of the legs that wait for an adapter; {b""} if only the scheduler wants it."""
        return {leg.submit.owner for leg in self._legs.get(digest, ())} or {b""}

    def add(self, conn: str, submit: wire.Submit) -> None:
        expires_s = self._clock() + submit.deadline_s if submit.deadline_s else math.inf
        self._legs.setdefault(submit.order.variant, []).append(HeldLeg(conn, submit, expires_s))

    def take(self, digest: str) -> list[HeldLeg]:
        """Removes and returns the legs of an adapter, each with the time that is left until its deadline."""
        now_s = self._clock()
        return [with_rest(leg, now_s) for leg in self._legs.pop(digest, ())]

    def take_expired(self) -> list[HeldLeg]:
        now_s = self._clock()
        return self._take_those(lambda leg: leg.expires_s < now_s)

    def abort(self, conn: str, abort: wire.Abort) -> None:
        """Forgets a leg whose client no longer needs it."""
        key = conn, abort.request_id, abort.attempt
        self._take_those(lambda leg: leg.key == key and (abort.index == -1 or leg.submit.order.sampling.n == 1))

    def closed(self, conn: str) -> None:
        """Forgets the legs of a scheduler that is gone."""
        self._take_those(lambda leg: leg.conn == conn)

    def _take_those(self, wanted: Callable[[HeldLeg], bool]) -> list[HeldLeg]:
        taken = [leg for legs in self._legs.values() for leg in legs if wanted(leg)]
        for leg in taken:
            legs = self._legs[leg.submit.order.variant]
            legs.remove(leg)
            if not legs:
                del self._legs[leg.submit.order.variant]
        return taken


def with_rest(leg: HeldLeg, now_s: float) -> HeldLeg:
    """Returns the leg with the time that is left until its deadline."""
    if leg.expires_s == math.inf:
        return leg
    submit = msgspec.structs.replace(leg.submit, deadline_s=max(0.001, leg.expires_s - now_s))
    return HeldLeg(leg.conn, submit, leg.expires_s)
