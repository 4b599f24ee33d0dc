"""The legs that run on one worker. All parts of the engine that begin, feed and end legs share this table.

Knows nothing of why a leg ends. Used on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pd_cluster.types import Request, Status


@dataclass(slots=True)
class LegTable:
    """Maps leg keys to `sequences` that have not ended, to `deadlines`, and to `weights` that schedulers assigned.

    `unwanted`: keys of legs whose outputs no client reads any more; `Legs` drops these legs.
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
        """Removes an ended sequence; the leg must be in this table.

        Returns whether it was the last one, which ends the leg.
        """
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
        """Returns, by scheduler's connection, the sum of the weights (in tokens) of its legs that have not ended."""
        sums: dict[str, int] = {}
        for key, sequences in self.sequences.items():
            client = sequences[0].client
            sums[client] = sums.get(client, 0) + self.weights.get(key, 0)
        return sums

    def readdress(self, key: str, client: str) -> None:
        """Sends the further outputs of a running leg to another scheduler, or to none."""
        for request in self.sequences.get(key, ()):
            request.client = client

    def variants(self) -> Iterator[str]:
        """Yields the adapters of legs that are or will be computed here. Omits legs that are being handed over."""
        for sequences in self.sequences.values():
            for each in sequences:
                if each.status is not Status.EXPORTING:
                    yield each.order.variant
