"""Which adapters take part in a step, where more are wanted than a step may have. Integers only.

Adapters take turns: those that have waited longest come first, and one that has just come is behind all others. So of V
adapters that are wanted, each takes part at least once in ceil(V / most) steps, whatever arrives meanwhile. Requests of
the model itself take part in every step.
"""

from __future__ import annotations

from collections.abc import Iterable

from pd_cluster.types import Request


class Turn:
    """The adapters of one step."""

    def __init__(self, chosen: set[str], room: int) -> None:
        self._chosen, self._room = chosen, room

    def has(self, request: Request) -> bool:
        variant = request.order.variant
        return not variant or variant in self._chosen

    def admits(self, request: Request) -> bool:
        """Whether a request that enters takes part; its adapter then has the room that was left."""
        if self.has(request):
            return True
        if not self._room:
            return False
        self._room -= 1
        self._chosen.add(request.order.variant)
        return True


class Turns:
    """`most`: the most adapters in one step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue: dict[str, None] = {}  # adapters that are wanted: the one that has waited longest first

    def next(self, requests: Iterable[Request]) -> Turn:
        """Chooses for a step; `requests` run, or are the first that waits, in the order of service."""
        wanted = dict.fromkeys(request.order.variant for request in requests if request.order.variant)
        self._queue = {variant: None for variant in self._queue if variant in wanted} | wanted
        chosen = list(self._queue)[: self._most]
        for variant in chosen:
            del self._queue[variant]
            self._queue[variant] = None
        return Turn(set(chosen), self._most - len(chosen))
