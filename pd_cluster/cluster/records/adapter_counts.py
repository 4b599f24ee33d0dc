"""Counts one process's requests by adapter, from their arrival to their end. Runs on the event loop."""

from __future__ import annotations

from collections import Counter

from pd_cluster.process_messages import AdapterUse


class AdapterCounts:
    """Counts requests by the digest of their adapter; a request to the model itself ("") costs only a comparison."""

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()  # requests without a token yet
        self._running: Counter[str] = Counter()

    def arrives(self, variant: str) -> None:
        if variant:
            self._waiting[variant] += 1

    def begins(self, variant: str) -> None:
        """Counts the request as running from its first token on."""
        if variant:
            _less(self._waiting, variant)
            self._running[variant] += 1

    def ends(self, variant: str, has_begun: bool) -> None:
        if variant:
            _less(self._running if has_begun else self._waiting, variant)

    def adapters_in_use(self) -> set[str]:
        return {*self._running, *self._waiting}

    async def publish_adapters(self, names: dict[str, str]) -> None:
        """Does nothing: if this process alone serves, it already has these names."""

    def use(self) -> AdapterUse:
        return AdapterUse(sorted(self._running), sorted(self._waiting))


def _less(counts: Counter[str], variant: str) -> None:
    counts[variant] -= 1
    if not counts[variant]:
        del counts[variant]
