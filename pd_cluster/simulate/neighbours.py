"""Instances that share the cores of one host: those of one role slow those of the other while both compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Neighbour(Protocol):
    @property
    def is_prefill(self) -> bool: ...
    def change_pace(self) -> None:
        """Continues what is under way at the speed that holds now."""


class SharedHost:
    """`slows(is_prefill)`: by how much an instance of this role is slowed beside one of the other."""

    def __init__(self, slows: Callable[[bool], float]) -> None:
        self._slows = slows
        self._computing: dict[Neighbour, bool] = {}  # in the order of their steps' beginning

    def factor(self, is_prefill: bool) -> float:
        """Returns by how much an instance of this role is slowed now."""
        return self._slows(is_prefill) if (not is_prefill) in self._computing.values() else 1.0

    def changed(self, instance: Neighbour, computes: bool) -> None:
        """Notes that an instance begins or ends to compute; those that it slows are told."""
        if computes:
            self._computing[instance] = instance.is_prefill
        else:
            self._computing.pop(instance, None)
        for other, is_prefill in list(self._computing.items()):
            if other is not instance and is_prefill != instance.is_prefill:
                other.change_pace()
