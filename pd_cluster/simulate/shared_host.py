"""Models instances that share a host's cores and slow each other down while they compute."""

from __future__ import annotations

from typing import Protocol

from pd_cluster.costs.linear_costs import NeighbourCost


class Neighbour(Protocol):
    @property
    def is_prefill(self) -> bool: ...
    def change_pace(self) -> None:
        """Continues the current steps with the new slowdown."""


class SharedHost:
    """Tracks which instances of the host compute."""

    def __init__(self, cost: NeighbourCost) -> None:
        self._cost = cost
        self._computing: dict[Neighbour, None] = {}  # in the order in which their steps began

    def factor(self, instance: Neighbour) -> float:
        """Returns the factor by which this instance would now be slowed if it computed."""
        num_computing = len(self._computing) + (instance not in self._computing)
        return self._cost.factor(instance.is_prefill, num_computing)

    def changed(self, instance: Neighbour, computes: bool) -> None:
        """Records that an instance starts or stops computing, and informs its neighbours."""
        if computes:
            self._computing[instance] = None
        else:
            self._computing.pop(instance, None)
        for other in list(self._computing):
            if other is not instance:
                other.change_pace()
