"""Chooses the scheduler that serves a request: pure, from the schedulers' reports. Knows nothing of gRPC or HTTP."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MOST_ENDPOINTS = 1024


@dataclass(slots=True)
class Endpoint:
    """A scheduler's public port.

    `load`: its requests in flight, as last reported; None: unknown. `num_sent`: requests sent to it; `num_seen`: how
    many of these may be included in `load`. `last`: the number of the choice that last sent a request to it.
    """

    address: str
    is_ready: bool = False
    load: int | None = None
    num_sent: int = 0
    num_seen: int = 0
    last: int = 0


class NoneReady(Exception):
    """No scheduler takes requests: 503."""


class AllFull(Exception):
    """Every scheduler that takes requests is at its limit: 429."""


class SchedulerChoice:
    """`most`: requests in flight at one scheduler, 0 for no limit. `num_fallbacks`: further endpoints in an answer."""

    def __init__(self, most: int = 0, num_fallbacks: int = 0) -> None:
        self.most_requests, self.num_endpoints = most, 1 + num_fallbacks
        self._endpoints: dict[str, Endpoint] = {}
        self._num_choices = 0

    @property
    def is_ready(self) -> bool:
        return any(each.is_ready for each in self._endpoints.values())

    def set_addresses(self, addresses: Collection[str]) -> None:
        """Replaces the known schedulers; a new one takes no requests until it has reported."""
        known = self._endpoints
        self._endpoints = {address: known.get(address) or Endpoint(address) for address in addresses}

    def num_sent(self, address: str) -> int:
        """Returns the number of requests sent to a known scheduler. A load that is requested now may include them."""
        return self._endpoints[address].num_sent

    def report(self, address: str, *, is_ready: bool, load: int | None = None, num_seen: int | None = None) -> None:
        """Records a known scheduler's answer. `num_seen`: the value of `num_sent` when the load was requested."""
        each = self._endpoints[address]
        each.is_ready, each.load = is_ready, load
        each.num_seen = each.num_sent if num_seen is None else num_seen

    def choose(self, among: Collection[str] | None = None) -> list[str]:
        """Returns the addresses to try in order, the one with the fewest requests first.

        `among`: addresses that the gateway allows; None: all. Raises NoneReady, AllFull.
        """
        allowed = (
            self._endpoints
            if among is None
            else {each: self._endpoints[each] for each in among if each in self._endpoints}
        )
        ready = [each for each in allowed.values() if each.is_ready]
        if not ready:
            raise NoneReady
        expected = dict(zip((each.address for each in ready), _expected(ready), strict=True))
        most = self.most_requests or math.inf
        free = [each for each in ready if each.load is None or expected[each.address] < most]
        if not free:
            raise AllFull
        order = sorted(free, key=lambda each: (expected[each.address], each.last))
        self._num_choices += 1
        order[0].num_sent += 1
        order[0].last = self._num_choices
        return [each.address for each in order[: self.num_endpoints]]


def _expected(ready: Sequence[Endpoint]) -> list[float]:
    """Estimates the requests in flight at each scheduler. An unknown load counts as the mean of the known ones.

    This mean only affects the order of schedulers; it excludes none.
    """
    loads = [each.load for each in ready if each.load is not None]
    mean = sum(loads) / len(loads) if loads else 0.0
    return [(mean if each.load is None else each.load) + each.num_sent - each.num_seen for each in ready]
