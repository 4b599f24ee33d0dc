"""The legs of requests that run on one worker, for all parts of the engine that begin, feed and end them.

Knows nothing of why a leg ends. Used on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pd_cluster.types import Request, Status


@dataclass(slots=True)
class LegTable:
    """By leg key: `sequences` that have not ended, `deadlines`, and `weights` that schedulers assigned.

    `unwanted`: keys of legs that nobody reads any more; Legs drops them.
    """

    sequences: dict[str, list[Request]] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    unwanted: set[str] = field(default_factory=set)

    def __contains__(self, key: object) -> bool:
        return key in self.sequences

    def add(self, sequences: list[Request], weight: int, deadline_s: float | None) -> None:
        key = sequences[0].leg_key
        self.sequences[key], self.weights[key] = sequences, weight
        if deadline_s is not None:
            self.deadlines[key] = deadline_s

    def remove(self, request: Request) -> bool:
        """Removes an ended sequence of a leg in this table; returns whether it was the last one, which ends the leg."""
        key = request.leg_key
        self.sequences[key].remove(request)
        if self.sequences[key]:
            return False
        del self.sequences[key]
        self.weights.pop(key, None)
        self.deadlines.pop(key, None)
        return True

    def has(self, request: Request) -> bool:
        return request in self.sequences.get(request.leg_key, ())

    def client_of(self, key: str) -> str | None:
        """Returns the connection that a leg's outputs are sent over; None: there is no such leg."""
        sequences = self.sequences.get(key)
        return sequences[0].client if sequences else None

    def of_client(self, conn: str) -> list[str]:
        return [key for key in self.sequences if self.client_of(key) == conn]

    def outstanding(self) -> dict[str, int]:
        """Returns the summed weights of each scheduler's legs that have not ended, in tokens, by its connection."""
        sums: dict[str, int] = {}
        for key, sequences in self.sequences.items():
            client = sequences[0].client
            sums[client] = sums.get(client, 0) + self.weights.get(key, 0)
        return sums

    def readdress(self, key: str, client: str) -> None:
        """Sends the further outputs of a running leg to another scheduler, or to nobody."""
        for request in self.sequences.get(key, ()):
            request.client = client

    def variants(self) -> Iterator[str]:
        """Yields the adapters of legs that are or will be computed here, without legs that are handed over."""
        for sequences in self.sequences.values():
            for each in sequences:
                if each.status is not Status.EXPORTING:
                    yield each.order.variant
