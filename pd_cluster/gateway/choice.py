"""Which scheduler serves a request: pure, over what the schedulers have reported. Knows nothing of gRPC or HTTP."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

MOST_ENDPOINTS = 1024


@dataclass(slots=True)
class Endpoint:
    """A scheduler's public port. `load`: requests in flight there, as it last reported; None: it takes none.

    `num_since`: requests sent there since; `last`: the number of the choice that sent the last one.
    """

    address: str
    load: int | None = None
    num_since: int = 0
    last: int = 0

    @property
    def expected(self) -> int:
        return (self.load or 0) + self.num_since


class NoneReady(Exception):
    """No scheduler takes requests: 503."""


class AllFull(Exception):
    """Each that takes requests has as many as it may have: 429."""


class Choice:
    """`most`: requests in flight at one scheduler, 0 for no limit. `num_fallbacks`: further endpoints of an answer."""

    def __init__(self, most: int = 0, num_fallbacks: int = 0) -> None:
        self._most, self._num = most, 1 + num_fallbacks
        self._endpoints: dict[str, Endpoint] = {}
        self._num_choices = 0

    @property
    def is_ready(self) -> bool:
        return any(each.load is not None for each in self._endpoints.values())

    def report(self, loads: Mapping[str, int | None]) -> None:
        """Takes a look at all schedulers there are: requests in flight, or None for one that takes no requests."""
        known = self._endpoints
        self._endpoints = {address: known.get(address, Endpoint(address)) for address in loads}
        for address, load in loads.items():
            each = self._endpoints[address]
            each.load, each.num_since = load, 0

    def choose(self, among: Collection[str] | None = None) -> list[str]:
        """Returns the addresses to try in this order, the one with the fewest requests first.

        `among`: those that the gateway allows; None: all. Raises NoneReady, AllFull.
        """
        allowed = (
            self._endpoints
            if among is None
            else {each: self._endpoints[each] for each in among if each in self._endpoints}
        )
        ready = [each for each in allowed.values() if each.load is not None]
        if not ready:
            raise NoneReady
        free = [each for each in ready if not self._most or each.expected < self._most]
        if not free:
            raise AllFull
        order = sorted(free, key=lambda each: (each.expected, each.last))
        self._num_choices += 1
        order[0].num_since += 1
        order[0].last = self._num_choices
        return [each.address for each in order[: self._num]]
