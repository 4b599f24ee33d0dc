"""Chooses the LoRA adapters of a step if more are needed than a step may have. Uses only integers.

Adapters take turns: those that have waited longest come first, and a new one comes after all others. So each of V
needed adapters is chosen at least once in ceil(V / most) steps, even if others arrive in the meantime. Requests
without an adapter can be in every step.
"""

from __future__ import annotations

from collections.abc import Iterable

from pd_cluster.types import Request
from pd_cluster.types.variants import lora_of


class StepAdapters:
    """The adapters of one step."""

    def __init__(self, chosen: set[str], num_free: int) -> None:
        self._chosen, self._num_free = chosen, num_free

    def has(self, request: Request) -> bool:
        digest = lora_of(request.order.variant)
        return not digest or digest in self._chosen

    def admits(self, request: Request) -> bool:
        """Whether an entering request may be in this step.

        If so, and if its adapter is not chosen yet, takes a free place for the adapter.
        """
        if self.has(request):
            return True
        if not self._num_free:
            return False
        self._num_free -= 1
        self._chosen.add(lora_of(request.order.variant))
        return True


class LoraRotation:
    """`most`: the maximum number of adapters in one step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue: dict[str, None] = {}  # needed adapters, the one that has waited longest first

    def next(self, requests: Iterable[Request]) -> StepAdapters:
        """Chooses the adapters of a step. `requests`, in order of service: those that run, and the first that waits."""
        digests = (lora_of(request.order.variant) for request in requests)
        wanted = dict.fromkeys(digest for digest in digests if digest)
        self._queue = {digest: None for digest in self._queue if digest in wanted} | wanted
        chosen = list(self._queue)[: self._most]
        for digest in chosen:
            del self._queue[digest]
            self._queue[digest] = None
        return StepAdapters(set(chosen), self._most - len(chosen))
