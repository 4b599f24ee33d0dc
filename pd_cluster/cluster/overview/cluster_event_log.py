"""Keeps a bounded log of notable events of a cluster: an instance joined, died, was drained, or changed its role.

Compares each instance with its previous state, so the code that changes instances needs no hooks; a process that dies
and returns between two comparisons is recognized by its epoch. Knows nothing of requests or HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pd_cluster.cluster.instances.instance_state import Instance

MAX_MARKS = 500
DOWN = frozenset({"unreachable", "failed"})

Kind = Literal["up", "down", "change"]


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """`number` increases by one with each event; `at_s` is Unix time. `reason` is for operators, as in
    cluster_problems.py.
    """

    number: int
    at_s: float
    kind: Kind
    instance_id: str
    text: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**self.to_public(), "text": f"{self.text}: {self.reason}" if self.reason else self.text}

    def to_public(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "reason"}


@dataclass(frozen=True, slots=True)
class _InstanceSnapshot:
    state: str
    role: str
    epoch: int
    was_up: bool


class ClusterEventLog:
    def __init__(self, max_marks: int = MAX_MARKS) -> None:
        self._marks: deque[ClusterEvent] = deque(maxlen=max_marks)
        self._seen: dict[str, _InstanceSnapshot] = {}
        self._number = 0

    def since(self, number: int = 0) -> list[ClusterEvent]:
        """Returns the events after that number, oldest first."""
        return [mark for mark in self._marks if mark.number > number]

    def look(self, at_s: float, instances: Sequence[Instance]) -> None:
        """Logs what has changed since the last call."""
        for instance in instances:
            before, state = self._seen.get(instance.name), instance.shown_state
            is_up = instance.is_ready
            now = _InstanceSnapshot(
                state, instance.role, instance.epoch, is_up or (before is not None and before.was_up)
            )
            self._seen[instance.name] = now
            if before is None:
                if is_up:
                    self.add(at_s, "up", instance.name, "is ready")
            elif is_up and before.was_up and before.epoch and before.epoch != now.epoch:
                self.add(at_s, "up", instance.name, "is ready again, in another process")
            elif before.state != state:
                self._note(at_s, instance, before)
            if before is not None and before.role != instance.role:
                self.add(at_s, "change", instance.name, f"is now {instance.role}; it was {before.role}")
        for name in self._seen.keys() - {instance.name for instance in instances}:
            del self._seen[name]
            self.add(at_s, "change", name, "has left the cluster")

    def _note(self, at_s: float, instance: Instance, before: _InstanceSnapshot) -> None:
        state = instance.shown_state
        if state in DOWN:
            if before.was_up and before.state not in DOWN:
                self.add(at_s, "down", instance.name, f"is {state}", instance.reason)
        elif state == "ready":
            self.add(at_s, "up", instance.name, "is ready")
        elif instance.is_ready:
            self.add(at_s, "change", instance.name, f"is {state}")

    def add(self, at_s: float, kind: Kind, name: str, text: str, reason: str = "") -> None:
        self._number += 1
        self._marks.append(ClusterEvent(self._number, at_s, kind, name, text, reason))
