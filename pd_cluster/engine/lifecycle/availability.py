"""Determines whether a worker takes requests: it may drain, sleep, or change its weights.

docs/protocol/membership.md, "The end of a process", has the rules. Knows nothing of the requests' contents.
"""

from __future__ import annotations

from collections.abc import Sized

from pd_cluster.engine.lifecycle.engine_sleep import EngineSleep
from pd_cluster.engine.lifecycle.engine_weights import EngineWeights
from pd_cluster.engine.lifecycle.worker_drain import WorkerDrain


class Availability:
    """`schedulers`: name@epoch by connection. `clients`: all senders of requests, if they are not the schedulers.

    `weights` None: the weights never change.
    """

    def __init__(
        self,
        drain: WorkerDrain,
        sleep: EngineSleep,
        clients: Sized | None = None,
        weights: EngineWeights | None = None,
    ) -> None:
        self.drain, self.sleep = drain, sleep
        self.weights = EngineWeights(None) if weights is None else weights
        self.schedulers: dict[str, str] = {}
        self._clients: Sized = self.schedulers if clients is None else clients

    @property
    def is_closed(self) -> bool:
        """Whether the worker drains and takes no more requests.

        A draining worker takes no more once all senders of requests know of the drain or are gone, or if it sleeps.
        """
        is_deserted = not self.schedulers or not self._clients
        return self.drain.has_begun and (is_deserted or self.drain.is_heard or bool(self.sleep.closed))

    @property
    def why_closed(self) -> str:
        """Returns why no request is taken now; "" if requests are taken."""
        return (
            "this instance takes no more requests, because it stops"
            if self.is_closed
            else self.sleep.closed or self.weights.closed
        )

    def settle(self) -> None:
        """Changes the weights and the level of sleep as requested. No request may be in progress."""
        if self.weights.is_due and not (self.sleep.level or self.drain.has_begun):
            self.weights.settle()
        if self.sleep.is_due and not self.drain.has_begun:
            self.sleep.settle()
