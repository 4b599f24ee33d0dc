"""Instances that share the cores of one host slow each other while they compute."""

from __future__ import annotations

from typing import Protocol

from pd_cluster.costs.linear_costs import NeighbourCost


class Neighbour(Protocol):
    @property
    def is_prefill(self) -> bool: ...
    def change_pace(self) -> None:
        """Continues what is under way at the speed that holds now."""


class SharedHost:
    """Knows which of its instances compute."""

    def __init__(self, cost: NeighbourCost) -> None:
        self._cost = cost
        self._computing: dict[Neighbour, None] = {}  # in the order of their steps' beginning

    def factor(self, instance: Neighbour) -> float:
        """Returns by how much this instance is slowed now, if it computes."""
        num_computing = len(self._computing) + (instance not in self._computing)
        return self._cost.factor(instance.is_prefill, num_computing)

    def changed(self, instance: Neighbour, computes: bool) -> None:
        """Notes that an instance begins or ends to compute; those that it slows are told."""
        if computes:
            self._computing[instance] = None
        else:
            self._computing.pop(instance, None)
        for other in list(self._computing):
            if other is not instance:
                other.change_pace()
